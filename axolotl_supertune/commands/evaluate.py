"""`axolotl supertune eval`: score a trained adapter with lm-evaluation-harness."""

from pathlib import Path

import click

from .errors import user_errors
from .files import read_yaml, write_json


@click.command("eval")
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--tasks", default="supertune_math", show_default=True, help="Comma-separated lm-eval tasks.")
@click.option("--adapter", type=click.Path(path_type=Path), help="Adapter folder. Default: the config's output_dir.")
@click.option("--base", "base_only", is_flag=True, help="Score the base model without an adapter.")
@click.option("--limit", type=float, help="Items per task (below 1: a share).")
@click.option("--batch-size", default="8", show_default=True)
@click.option("--device", help="Default: cuda where there is one, else cpu.")
@click.option("--data-dir", help="Folder of the six benchmark files (SUPERTUNE_DATA_DIR).")
@click.option("--contamination", "report", type=click.Path(exists=True), help="Report: adds acc_clean, n_clean.")
@click.option("--output", type=click.Path(path_type=Path), help="Default: OUTPUT_DIR/supertune_eval.json.")
def evaluate(
    config: Path,
    tasks: str,
    adapter: Path | None,
    base_only: bool,
    limit: float | None,
    batch_size: str,
    device: str | None,
    data_dir: str | None,
    report: str | None,
    output: Path | None,
) -> None:
    """Score the trained adapter of CONFIG with lm-evaluation-harness.

    Axolotl's own `axolotl lm-eval` gives the harness output_dir as a whole model, which an adapter is not.
    """
    with user_errors():
        settings = read_yaml(config)
        folder = Path(settings.get("output_dir") or ".")
        target = output or folder / "supertune_eval.json"
        from ..tasks import evaluation

        trained = None if base_only else evaluation.check_adapter(adapter or folder)
        arguments = evaluation.model_arguments(settings, trained)
    from .. import tuner  # noqa: F401 (registers SUPRA, also where the start-up hook is off)

    # Outside `user_errors`: an error of the harness or of a model needs its traceback.
    results, tables = evaluation.evaluate(
        arguments,
        tasks.split(","),
        limit=limit,
        batch_size=int(batch_size) if batch_size.isdigit() else batch_size,
        device=device,
        data_dir=data_dir,
        contamination=report,
    )
    for table in tables:
        click.echo(table)
    with user_errors(target):
        write_json(target, results)
    click.echo(f"wrote {target}")
