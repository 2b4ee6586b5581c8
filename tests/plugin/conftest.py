"""Trainings in this process, each with the plugins of its YAML and no others."""

import pytest
from axolotl_runs import *  # noqa: F403 (fixtures)


@pytest.fixture(autouse=True)
def only_its_own_plugins(fresh_plugins):
    pass
