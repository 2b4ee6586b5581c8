"""The benchmark files and tiny models, for all tests of the tasks."""

from benchmark_models import *  # noqa: F403 (fixtures)
