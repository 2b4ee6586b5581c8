"""Model card of an adapter: PEFT's card with a section on the method, budget, base and training of the adapter."""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from torch import Tensor

from .checkpoint import ADAPTERS_TO_SAVE
from .config import SupraConfig
from .peft_compat import extend
from .quantization.settings import settings_backend
from .targets import budget_table

_PAPER = "*Super-Tuning: From Activation-Aware Pruning to Sparse Fine-Tuning*"
# Lines of `note_training`, which an export copies from the adapter's card.
_TRAINING_HEADINGS = ("Training data", "Training", "Axolotl")
_BEGIN, _END = "<!-- axolotl-supertune: begin -->", "<!-- axolotl-supertune: end -->"


def extend_model_card() -> None:
    """Extend `PeftModel.create_or_update_model_card` to describe SUPRA adapters; later calls do nothing."""
    extend("create_or_update_model_card", _create_or_update_model_card)


def _create_or_update_model_card(original: Callable[..., None], model: Any, output_dir: str) -> None:
    """`PeftModel.create_or_update_model_card` of a model with SUPRA adapters."""
    original(model, output_dir)
    saved = ADAPTERS_TO_SAVE.get()
    configs = {
        name: config
        for name, config in model.peft_config.items()
        if isinstance(config, SupraConfig) and (saved is None or name in saved)
    }
    if configs:
        _describe(Path(output_dir) / "README.md", model, configs)


def note_training(model: Any, lines: Mapping[str, str], datasets: list[str]) -> None:
    """Add facts that only the trainer knows to the cards of this model.

    Args:
        model: a `PeftModel`.
        lines: heading → text; each becomes a line of the section.
        datasets: names on the hub, for the card's metadata.
    """
    model.base_model.supra_card = (dict(lines), list(datasets))


def write_product_card(
    folder: Path,
    adapter: Path,
    config: SupraConfig,
    tensors: Mapping[str, Tensor],
    *,
    title: str,
    library: str,
    base: str | None,
    trained_on: str | None,
    loading: str,
) -> None:
    """Write the README.md of an exported adapter.

    Args:
        folder: of the exported files.
        adapter: folder of the adapter; the training facts of its card are copied.
        config: of the adapter.
        tensors: of the adapter, from `read_adapter`.
        title: heading of the section.
        library: `peft` or `transformers`.
        base: model that the export needs or was merged into.
        trained_on: base model of the adapter.
        loading: how to load the export.
    """
    lines, datasets = _training_facts(adapter / "README.md")
    sparse = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith(".supra_values"))
    low_rank = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith((".supra_L", ".supra_R")))
    layers = sum(name.endswith(".supra_shape") for name in tensors)
    section = _section(
        title,
        config,
        with_quantization(trained_on or "not known", config),
        (sparse + low_rank, layers, sparse),
        lines,
        loading,
    )
    data = ModelCardData(
        base_model=base,
        library_name=library,
        pipeline_tag="text-generation" if config.task_type == "CAUSAL_LM" else None,
        tags=["axolotl-supertune", method_name(config).lower()],
        datasets=datasets or None,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{_BEGIN}\n\n{section}\n\n{_END}\n").save(folder / "README.md")


def _training_facts(path: Path) -> tuple[dict[str, str], list[str]]:
    """The facts and datasets that `note_training` added to a card; empty without a card."""
    if not path.is_file():
        return {}, []
    card = ModelCard.load(path)
    facts = dict(re.findall(r"^- \*\*(.+?):\*\* (.*)$", card.text, flags=re.MULTILINE))
    datasets = card.data.get("datasets") or []
    return (
        {heading: facts[heading] for heading in _TRAINING_HEADINGS if heading in facts},
        [datasets] if isinstance(datasets, str) else datasets,
    )


def _describe(path: Path, model: Any, configs: Mapping[str, SupraConfig]) -> None:
    """Write the section on these adapters into PEFT's card, replacing an earlier one."""
    card = ModelCard.load(path)
    lines, datasets = vars(model.base_model).get("supra_card", ({}, []))
    methods = {method_name(config).lower() for config in configs.values()}
    card.data.tags = sorted({*(card.data.tags or []), "axolotl-supertune", *methods})
    known = card.data.get("datasets") or []
    if datasets:
        card.data["datasets"] = sorted({*([known] if isinstance(known, str) else known), *datasets})
    blocks = [_adapter_section(model, name, config, lines, named=len(configs) > 1) for name, config in configs.items()]
    section = "\n\n".join([_BEGIN, *blocks, _END])
    text = re.sub(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", "", card.text, flags=re.DOTALL)
    heading = re.search(r"^## ", text, flags=re.MULTILINE)
    at = heading.start() if heading else len(text)
    card.text = f"{text[:at].rstrip()}\n\n{section}\n\n{text[at:]}".lstrip("\n")
    card.save(path)


def _adapter_section(model: Any, name: str, config: SupraConfig, lines: Mapping[str, str], *, named: bool) -> str:
    """The part of the section about one adapter."""
    rows = budget_table(model, name)
    sizes = (
        sum(row.total for row in rows),
        sum(row.layers for row in rows),
        sum(row.layers * row.budget.sparse_count for row in rows),
    )
    return _section(
        f"{method_name(config)} adapter" + (f" `{name}`" if named or name != "default" else ""),
        config,
        _base(config, model),
        sizes,
        lines,
        "To load it, install axolotl-supertune: `import axolotl_supertune.tuner`, then `PeftModel.from_pretrained`.",
    )


def _section(
    title: str, config: SupraConfig, base: str, sizes: Sequence[int], lines: Mapping[str, str], loading: str
) -> str:
    """A section in Markdown; `sizes` are (trained parameters, layers, trained single weights)."""
    described = settings(config, has_support=bool(sizes[2]))
    facts = {
        "Base model": base,
        "Method": f"{described.pop('Method')}, of {_PAPER}",
        "Budget": described.pop("Budget"),
        "Trained": f"{sizes[0]:,} parameters in {sizes[1]} layers, {sizes[2]:,} of them single weights",
        **described,
        **lines,
        "axolotl-supertune": sys.modules[__name__.partition(".")[0]].__version__,
    }
    if config.modules_to_save:
        facts["Trained in full"] = ", ".join(config.modules_to_save)
    return "\n".join([f"## {title}", "", *(f"- **{key}:** {value}" for key, value in facts.items()), "", loading])


def settings(config: SupraConfig, *, has_support: bool) -> dict[str, str]:
    """An adapter's settings in a few words: its method, its budget, and what its support was chosen on.

    Args:
        has_support: whether it has a sparse part in any layer.
    """
    gradient = {"Gradient": _gradient(config)} if config.by_gradient and has_support and not config.combination else {}
    return {"Method": _method(config), "Budget": _budget(config), "Calibration": _calibration(config), **gradient}


def method_name(config: SupraConfig) -> str:
    """The paper's name of the method: Super or Supra. For a weighted sum Supra if it has a low-rank part."""
    if config.combination is not None:
        ranks = [rank for rank, _ in config.combination.get("layers", {}).values()]
        low_rank = any(ranks) or any(method_name(part) == "Supra" for part in config.parts().values())
        return "Supra" if low_rank else "Super"
    return "Super" if config.supra_lambda == 0 else "Supra"


def _method(config: SupraConfig) -> str:
    if config.combination is not None:
        were = {name: f" ({_method(part)})" for name, part in config.parts().items()}
        weights = config.combination["weights"]
        terms = [f"{weight:g} × `{name}`{were.get(name, '')}" for name, weight in weights.items()]
        return f"{method_name(config)}, the sum ({config.combination['type']}) of {', '.join(terms)}"
    parts = [] if config.supra_lambda == 0 else [f"λ = {config.supra_lambda}, α = {config.lora_alpha}"]
    parts.append(f"support {config.choice_of_support}" if config.has_sparse_part else config.choice_of_support)
    return f"{method_name(config)}, {', '.join(parts)}"


def _budget(config: SupraConfig) -> str:
    if config.combination is not None:
        return _for_each_part(config, _budget) or "that of its parts"
    if config.budget_scope != "layer":
        shared = {"density": "at one density in all layers", "global": "where the scores of all layers together say"}
        return f"{_own_budget(config)}; the whole of it {shared[config.budget_scope]}"
    return _own_budget(config)


def _for_each_part(config: SupraConfig, describe: Callable[[SupraConfig], str]) -> str:
    return "; ".join(f"`{name}`: {describe(part)}" for name, part in config.parts().items())


def _own_budget(config: SupraConfig) -> str:
    if config.r0 is not None:
        return f"rank {config.r0}: as many parameters as a LoRA of rank {config.r0}"
    return f"density {config.sparse_density} of every adapted layer"


def _base(config: SupraConfig, model: Any) -> str:
    base_config = getattr(model.get_base_model(), "config", None)
    name = config.base_model_name_or_path or getattr(base_config, "_name_or_path", None) or "not known"
    return with_quantization(name, config)


def with_quantization(name: str, config: SupraConfig) -> str:
    """A base model's name, and how it was quantized."""
    settings = config.base_quantization
    backend = settings_backend(settings)
    if not settings or backend is None:
        return name
    return f"{name}, quantized to {backend.stored_bits(settings)} bits by {backend.name}"


def _gradient(config: SupraConfig) -> str:
    made = config.gradient
    if made is None:
        return "not taken yet: the low-rank part is warming up, and the support holds the place of one"
    drawn = f" ({made['rows']} rows, seed {made['seed']})" if "rows" in made else ""
    return f"of {made['batches']} batches{drawn}, before step {made['step'] + 1}"


def _calibration(config: SupraConfig) -> str:
    if config.combination is not None:
        return _for_each_part(config, _calibration) or "that of its parts"
    made = config.calibration
    if made is None:
        return "none: the scores need no activations"
    dataset = str(made.get("dataset", "?"))
    if "training_data" in made:
        return f"{made['samples']} training records of {made['training_data']} (seed {made.get('seed', '?')})"
    if "sequence_len" not in made:  # of `calibrate`, which does not know the origin of its windows
        named = f" of {dataset}" if "dataset" in made else ", of a text that was not named"
        return f"{made.get('samples', '?')} windows, {made.get('tokens', '?')} tokens in all{named}"
    dataset = Path(dataset).name if Path(dataset).exists() else dataset
    samples, length, seed = (made.get(key, "?") for key in ("samples", "sequence_len", "seed"))
    return f"{samples} × {length} tokens of {dataset} (seed {seed})"
