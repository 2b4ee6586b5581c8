"""`python -m axolotl_supertune.tasks` prints the folder for `lm_eval --include_path`; `contamination FILE` reports.

An entry point: what it runs is a command of `commands`, which the import contract of the rooms allows here only.
"""

import click

from ..commands.contamination import contamination
from . import TASK_FOLDER


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Print the folder of the lm-eval tasks, or run a command on their data."""
    if context.invoked_subcommand is None:
        click.echo(TASK_FOLDER)


main.add_command(contamination)

if __name__ == "__main__":
    main()
