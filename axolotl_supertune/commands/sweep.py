"""`axolotl supertune sweep`: train, choose and score all methods of a grid."""

from pathlib import Path

import click

from .errors import disk_errors, user_errors

FAILED, UNFINISHED = 1, 3


@click.command("sweep")
@click.argument("grid", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpus", help="0,1,…: one run each. Default: all visible ones; without any, and with none, the CPU.")
@click.option("--jobs-per-gpu", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at once on one.")
@click.option(
    "--until",
    type=click.Choice(["train", "choose", "score"]),
    default="score",
    show_default=True,
    help="Stop after training all rates, after the further seeds at the chosen ones, or after scoring.",
)
@click.option("--retry-failed", is_flag=True, help="Start failed runs again.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds: nothing is started that would not end by then, and what runs then is stopped.",
)
@click.option("--dry-run", is_flag=True, help="List what would run, and why some would be refused.")
@click.pass_context
def sweep(
    context: click.Context,
    grid: Path,
    gpus: str | None,
    jobs_per_gpu: int,
    until: str,
    retry_failed: bool,
    time_limit: float | None,
    dry_run: bool,
) -> None:
    """Train, choose and score all methods of GRID, as far as that is not done.

    Every run is an `axolotl train` of its own, in METHOD/lr…-ep…-seed… of the grid's output_dir. What was stopped, in
    whatever way, goes on with the same command. A method's learning rate is the one with the lowest validation NLL.

    Exit codes: 0 all is done; 1 runs failed, or (--dry-run) would be refused; 3 the time limit came first; 130 and 143
    Ctrl-C and SIGTERM.
    """
    from rich.console import Console

    from ..grid.sweep.devices import Devices, visible_gpus
    from ..grid.sweep.jobs import OutOfTime, Signalled
    from ..grid.sweep.sweep import Sweep

    console = Console(highlight=False)
    try:
        with user_errors(), disk_errors("a file of the grid's output_dir"):
            devices = Devices(visible_gpus(gpus), jobs_per_gpu)
            work = Sweep(grid, devices, console, time_limit=time_limit, retry_failed=retry_failed)
            if dry_run:
                foreseen = work.foresee()  # before the list: Axolotl logs
                click.echo(work.listing())
                for refusal in foreseen.refusals:
                    click.echo(f"Refused: {refusal}")
                for unchecked in foreseen.unchecked:
                    click.echo(f"Not checked: {unchecked}.")
                if foreseen.refusals:
                    context.exit(FAILED)
                return
            try:
                with disk_errors(work.runs_dir):
                    complete = work.sweep(until)  # type: ignore[arg-type]
            finally:
                console.print(work.summary())
    except OutOfTime:
        console.print("The time limit came first; the same command goes on.")
        context.exit(UNFINISHED)
    except Signalled as signalled:
        console.print(f"Stopped by {signalled}; the same command goes on.")
        context.exit(128 + signalled.number)
    if not complete:
        context.exit(FAILED)
