"""The `supertune` group, which Axolotl finds by its entry point, and the list of its commands."""

import click

from .bench import bench
from .calibrate import calibrate
from .contamination import contamination
from .evaluate import evaluate
from .export import export
from .inspect import inspect
from .overlap import overlap
from .plan import plan
from .report import report
from .sweep import sweep


@click.group()
def supertune() -> None:
    """Super and Supra: plan, calibrate, evaluate, inspect, export; grids; contamination checks; what a step costs."""


for command in (bench, calibrate, contamination, evaluate, export, inspect, overlap, plan, report, sweep):
    supertune.add_command(command)
