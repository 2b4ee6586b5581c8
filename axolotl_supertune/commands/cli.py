"""The `supertune` group, which Axolotl finds by its entry point, and the list of its commands."""

import click

from .bench import bench
from .calibrate import calibrate
from .contamination import contamination
from .evaluate import evaluate
from .export import export
from .init import init
from .inspect import inspect
from .overlap import overlap
from .plan import plan
from .report import report
from .sweep import sweep


@click.group()
def supertune() -> None:
    """Super and Supra: init, plan, calibrate, evaluate, inspect, export; grids; contamination; cost of a step."""


for command in (bench, calibrate, contamination, evaluate, export, init, inspect, overlap, plan, report, sweep):
    supertune.add_command(command)
