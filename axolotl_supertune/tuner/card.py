"""The model card beside an adapter: PEFT's own, with a section on what the adapter is and how it came about."""

import functools
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from peft import PeftModel

from .config import SupraConfig
from .model import budget_table

_PAPER = "*Super-Tuning: From Activation-Aware Pruning to Sparse Fine-Tuning*"
_BEGIN, _END = "<!-- axolotl-supertune: begin -->", "<!-- axolotl-supertune: end -->"


def write_cards() -> None:
    """Have `PeftModel.create_or_update_model_card` describe SUPRA adapters too; later calls do nothing."""
    original = PeftModel.create_or_update_model_card
    if hasattr(original, "describes_supra"):
        return

    @functools.wraps(original)
    def create_or_update_model_card(self: Any, output_dir: str) -> None:
        original(self, output_dir)
        configs = {name: config for name, config in self.peft_config.items() if isinstance(config, SupraConfig)}
        if configs:
            _describe(Path(output_dir) / "README.md", self, configs)

    create_or_update_model_card.describes_supra = True  # type: ignore[attr-defined]
    PeftModel.create_or_update_model_card = create_or_update_model_card


def note_training(model: Any, lines: Mapping[str, str], datasets: list[str]) -> None:
    """What only the trainer knows, for the cards of this model.

    Args:
        model: a `PeftModel`.
        lines: heading → text, each one line of the section.
        datasets: names on the hub, for the card's metadata.
    """
    model.base_model.supra_card = (dict(lines), list(datasets))


def _describe(path: Path, model: Any, configs: Mapping[str, SupraConfig]) -> None:
    card = ModelCard.load(path)
    lines, datasets = vars(model.base_model).get("supra_card", ({}, []))
    methods = {_method(config).lower() for config in configs.values()}
    card.data.tags = sorted({*(card.data.tags or []), "axolotl-supertune", *methods})
    known = card.data.get("datasets") or []
    if datasets:
        card.data["datasets"] = sorted({*([known] if isinstance(known, str) else known), *datasets})
    blocks = [_block(model, name, config, lines, named=len(configs) > 1) for name, config in configs.items()]
    section = "\n\n".join([_BEGIN, *blocks, _END])
    text = re.sub(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", "", card.text, flags=re.DOTALL)
    heading = re.search(r"^## ", text, flags=re.MULTILINE)
    at = heading.start() if heading else len(text)
    card.text = f"{text[:at].rstrip()}\n\n{section}\n\n{text[at:]}".lstrip("\n")
    card.save(path)


def _block(model: Any, name: str, config: SupraConfig, lines: Mapping[str, str], *, named: bool) -> str:
    """The section on one adapter."""
    rows = budget_table(model, name)
    sparse = sum(row.layers * row.budget.sparse_count for row in rows)
    facts = {
        "Base model": _base(config, model),
        "Method": _sentence(config),
        "Budget": _budget(config),
        "Trained": f"{sum(row.total for row in rows):,} parameters in {sum(row.layers for row in rows)} layers, "
        f"{sparse:,} of them single weights",
        "Calibration": _calibration(config.calibration),
        **({"Gradient": _gradient(config)} if config.by_gradient and sparse else {}),
        **lines,
        "axolotl-supertune": sys.modules[__name__.partition(".")[0]].__version__,
    }
    if config.modules_to_save:
        facts["Trained in full"] = ", ".join(config.modules_to_save)
    title = f"## {_method(config)} adapter" + (f" `{name}`" if named else "")
    return "\n".join([title, "", *(f"- **{key}:** {value}" for key, value in facts.items())]) + (
        "\n\nTo load it, install axolotl-supertune: `import axolotl_supertune.tuner`, then `PeftModel.from_pretrained`."
    )


def _method(config: SupraConfig) -> str:
    return "Super" if config.supra_lambda == 0 else "Supra"


def _sentence(config: SupraConfig) -> str:
    parts = [] if config.supra_lambda == 0 else [f"λ = {config.supra_lambda}, α = {config.lora_alpha}"]
    if config.supra_lambda < 1 or config.sparse_density is not None:
        hybrid = f" (β = {config.hybrid_beta})" if config.sparse_direction == "hybrid" else ""
        seed = f" (seed {config.support_seed})" if config.sparse_direction == "random" else ""
        rows = ", spread over the rows" if config.support_scope == "row" else ""
        parts.append(f"support {config.mask_score}-{config.sparse_direction}{hybrid}{seed}{rows}")
    return f"{_method(config)}, {', '.join(parts)}, of {_PAPER}"


def _budget(config: SupraConfig) -> str:
    if config.budget_scope != "layer":
        shared = {"density": "at one density in all layers", "global": "where the scores of all layers together say"}
        return f"{_own_budget(config)}; the whole of it {shared[config.budget_scope]}"
    return _own_budget(config)


def _own_budget(config: SupraConfig) -> str:
    if config.r0 is not None:
        return f"rank {config.r0}: as many parameters as a LoRA of rank {config.r0}"
    return f"density {config.sparse_density} of every adapted layer"


def _base(config: SupraConfig, model: Any) -> str:
    held = getattr(model.get_base_model(), "config", None)
    name = config.base_model_name_or_path or getattr(held, "_name_or_path", None) or "not known"
    bits = {"load_in_4bit": "4 bits", "load_in_8bit": "8 bits"}
    used = [text for key, text in bits.items() if (config.base_quantization or {}).get(key)]
    return f"{name}, quantized to {used[0]} by bitsandbytes" if used else name


def _gradient(config: SupraConfig) -> str:
    made = config.gradient
    if made is None:
        return "not taken yet: the low-rank part is warming up, and the support holds the place of one"
    drawn = f" ({made['rows']} rows, seed {made['seed']})" if "rows" in made else ""
    return f"of {made['batches']} batches{drawn}, before step {made['step'] + 1}"


def _calibration(made: Mapping[str, Any] | None) -> str:
    if made is None:
        return "none: the scores need no activations"
    dataset = str(made.get("dataset", "?"))
    if "training_data" in made:
        return f"{made['samples']} training records of {made['training_data']} (seed {made.get('seed', '?')})"
    dataset = Path(dataset).name if Path(dataset).exists() else dataset
    samples, length, seed = (made.get(key, "?") for key in ("samples", "sequence_len", "seed"))
    return f"{samples} × {length} tokens of {dataset} (seed {seed})"
