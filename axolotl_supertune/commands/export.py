"""`axolotl supertune export`: write an adapter in a form that needs no axolotl-supertune."""

from pathlib import Path

import click

from .errors import user_errors

FORMATS = ("shira", "merged", "lora+base")  # of tuner.export, which loads torch
# As Axolotl's YAML spells them, and as torch does.
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@click.command("export")
@click.argument("adapter", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--to", "target", type=click.Choice(FORMATS), required=True, help="What to write.")
@click.option("--output", type=click.Path(path_type=Path), required=True, help="A folder that does not exist yet.")
@click.option("--base", help="Folder or name of the base model. Default: the one that the adapter names.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", *DTYPES, *DTYPES.values()]),
    default="auto",
    show_default=True,
    help="The base model's, as in training; auto is that of its files.",
)
def export(adapter: Path, target: str, output: Path, base: str | None, dtype: str) -> None:
    """Write the Super or Supra adapter in folder ADAPTER in a form that needs no axolotl-supertune.

    \b
    shira      an adapter for stock PEFT (λ = 0 under the rank budget); no base model is read
    merged     a whole model
    lora+base  OUTPUT/base, the base with the sparse part merged, and OUTPUT/lora, a plain LoRA for it: for
               engines that serve many LoRAs of one base
    """
    from ..tuner.export import export_adapter

    with user_errors(output):
        export_adapter(adapter, target, output, base=base, dtype=DTYPES.get(dtype, dtype))
    click.echo(f"wrote {output}")
