"""Trainings in this process."""

from axolotl_runs import *  # noqa: F403 (fixtures)
