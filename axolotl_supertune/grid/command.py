"""The command `sweep`. What it runs is imported when it is called: Axolotl takes ten seconds to load."""

import os
from pathlib import Path
from typing import get_args

import click

FAILED, UNFINISHED = 1, 3


@click.command()
@click.argument("grid", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--gpus", help="0,1,…: one run each. Default: all visible ones; without any, and with none, the CPU.")
@click.option("--jobs-per-gpu", type=click.IntRange(min=1), default=1, show_default=True, help="Runs at once on one.")
@click.option(
    "--until",
    type=click.Choice(["train", "choose", "score"]),
    default="score",
    show_default=True,
    help="Stop after training all rates, after the other seeds at the chosen ones, or after scoring.",
)
@click.option("--retry-failed", is_flag=True, help="Start failed runs again.")
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds: nothing is started that would not end by then, and what runs then is stopped.",
)
@click.option("--dry-run", is_flag=True, help="List what would run, and why some would be refused.")
def sweep(
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

    from .sweep.jobs import Devices, OutOfTime, Signalled
    from .sweep.sweep import Stage, Sweep

    assert until in get_args(Stage)
    console = Console(highlight=False)
    try:
        devices = Devices(visible_gpus(gpus), jobs_per_gpu)
        work = Sweep(grid, devices, console, time_limit=time_limit, retry_failed=retry_failed)
        if dry_run:
            said = work.foresee()  # before the list: Axolotl logs
            click.echo(work.plan())
            for line in [f"Refused: {each}" for each in said.refusals] + [f"Unchecked: {e}." for e in said.unchecked]:
                click.echo(line)
            if said.refusals:
                raise SystemExit(FAILED)
            return
        try:
            good = work.sweep(until)  # type: ignore[arg-type]
        except OSError as error:
            error.filename = error.filename or str(work.runs_dir)  # a full disk names no file
            raise
        finally:
            console.print(work.summary())
    except OSError as error:
        if error.errno is None or isinstance(error, FileNotFoundError):
            raise click.ClickException(str(error)) from error
        where = error.filename or "a file of the grid's output_dir"
        raise click.ClickException(
            f"{where}: {error.strerror}. What is done stays, and the same command goes on when that is mended: make "
            "room, or give this grid an output_dir that can be written."
        ) from error
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    except OutOfTime:
        console.print("The time limit came first; the same command goes on.")
        raise SystemExit(UNFINISHED) from None
    except Signalled as signalled:
        console.print(f"Stopped by {signalled}; the same command goes on.")
        raise SystemExit(128 + signalled.number) from None
    if not good:
        raise SystemExit(FAILED)


def visible_gpus(asked: str | None) -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES will say, a GPU each.

    Args:
        asked: numbers among the GPUs that this process sees, comma-separated; `none` or an empty text for the CPU; None
            for all.

    Raises:
        ValueError: a GPU that is not there, or is named twice.
    """
    import torch

    count = torch.cuda.device_count()
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named[:count] if named else [str(number) for number in range(count)]
    if asked is None:
        return tuple(names)
    wanted = [] if asked.strip() in ("", "none") else [each.strip() for each in asked.split(",")]
    for each in wanted:
        if not each.isdigit() or int(each) >= count or wanted.count(each) > 1:
            raise ValueError(
                f"--gpus {asked}: {each!r} is not one of the {count} GPUs here, each named once, from 0 on."
            )
    return tuple(names[int(each)] for each in wanted)
