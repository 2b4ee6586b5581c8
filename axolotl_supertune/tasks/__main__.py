"""`python -m axolotl_supertune.tasks` prints the folder for `lm_eval --include_path`; `contamination FILE` reports."""

import click

from . import TASK_FOLDER
from .contamination.contamination import contamination


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Print the folder of the lm-eval tasks, or run a command on their data."""
    if context.invoked_subcommand is None:
        click.echo(TASK_FOLDER)


main.add_command(contamination)

if __name__ == "__main__":
    main()
