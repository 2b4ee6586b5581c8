"""The model card beside an adapter: PEFT's own, with a section on what the adapter is and how it came about."""

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
# Headings of `note_training`, which an export takes over from the adapter's card.
_OF_THE_TRAINER = ("Training data", "Training", "Axolotl")
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
    """What only the trainer knows, for the cards of this model.

    Args:
        model: a `PeftModel`.
        lines: heading → text, each one line of the section.
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
    """The README.md of what an adapter was exported to.

    Args:
        folder: of the product.
        adapter: the adapter's folder; what its own card says of the training is taken over.
        config, tensors: the adapter's, the tensors as `read_adapter` gives them.
        title: what the product is.
        library: `peft` or `transformers`.
        base: the model that the product needs, or was made from.
        trained_on: the base that the adapter was trained on.
        loading: how the product is loaded.
    """
    lines, datasets = _noted(adapter / "README.md")
    sparse = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith(".supra_values"))
    low_rank = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith((".supra_L", ".supra_R")))
    layers = sum(name.endswith(".supra_shape") for name in tensors)
    section = _block(
        title,
        config,
        _with_bits(trained_on or "not known", config),
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


def _noted(path: Path) -> tuple[dict[str, str], list[str]]:
    """What `note_training` wrote into a card, if there is one."""
    if not path.is_file():
        return {}, []
    card = ModelCard.load(path)
    found = dict(re.findall(r"^- \*\*(.+?):\*\* (.*)$", card.text, flags=re.MULTILINE))
    datasets = card.data.get("datasets") or []
    return (
        {heading: found[heading] for heading in _OF_THE_TRAINER if heading in found},
        [datasets] if isinstance(datasets, str) else datasets,
    )


def _describe(path: Path, model: Any, configs: Mapping[str, SupraConfig]) -> None:
    card = ModelCard.load(path)
    lines, datasets = vars(model.base_model).get("supra_card", ({}, []))
    methods = {method_name(config).lower() for config in configs.values()}
    card.data.tags = sorted({*(card.data.tags or []), "axolotl-supertune", *methods})
    known = card.data.get("datasets") or []
    if datasets:
        card.data["datasets"] = sorted({*([known] if isinstance(known, str) else known), *datasets})
    blocks = [_of_adapter(model, name, config, lines, named=len(configs) > 1) for name, config in configs.items()]
    section = "\n\n".join([_BEGIN, *blocks, _END])
    text = re.sub(rf"{re.escape(_BEGIN)}.*?{re.escape(_END)}\n*", "", card.text, flags=re.DOTALL)
    heading = re.search(r"^## ", text, flags=re.MULTILINE)
    at = heading.start() if heading else len(text)
    card.text = f"{text[:at].rstrip()}\n\n{section}\n\n{text[at:]}".lstrip("\n")
    card.save(path)


def _of_adapter(model: Any, name: str, config: SupraConfig, lines: Mapping[str, str], *, named: bool) -> str:
    """The section on one adapter of a model."""
    rows = budget_table(model, name)
    sizes = (
        sum(row.total for row in rows),
        sum(row.layers for row in rows),
        sum(row.layers * row.budget.sparse_count for row in rows),
    )
    return _block(
        f"{method_name(config)} adapter" + (f" `{name}`" if named or name != "default" else ""),
        config,
        _base(config, model),
        sizes,
        lines,
        "To load it, install axolotl-supertune: `import axolotl_supertune.tuner`, then `PeftModel.from_pretrained`.",
    )


def _block(
    title: str, config: SupraConfig, base: str, sizes: Sequence[int], lines: Mapping[str, str], loading: str
) -> str:
    """A section; sizes are the parameters, the layers, and those parameters that are single weights."""
    facts = {
        "Base model": base,
        "Method": _sentence(config),
        "Budget": _budget(config),
        "Trained": f"{sizes[0]:,} parameters in {sizes[1]} layers, {sizes[2]:,} of them single weights",
        "Calibration": _calibration(config),
        **({"Gradient": _gradient(config)} if config.by_gradient and sizes[2] and not config.combination else {}),
        **lines,
        "axolotl-supertune": sys.modules[__name__.partition(".")[0]].__version__,
    }
    if config.modules_to_save:
        facts["Trained in full"] = ", ".join(config.modules_to_save)
    return "\n".join([f"## {title}", "", *(f"- **{key}:** {value}" for key, value in facts.items()), "", loading])


def method_name(config: SupraConfig) -> str:
    """As the paper calls it; a sum of adapters by what it holds."""
    if config.combination is not None:
        ranks = [rank for rank, _ in config.combination.get("layers", {}).values()]
        low_rank = any(ranks) or any(method_name(part) == "Supra" for part in config.parts().values())
        return "Supra" if low_rank else "Super"
    return "Super" if config.supra_lambda == 0 else "Supra"


def _sentence(config: SupraConfig) -> str:
    return f"{_method(config)}, of {_PAPER}"


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
        return _of_parts(config, _budget) or "that of its parts"
    if config.budget_scope != "layer":
        shared = {"density": "at one density in all layers", "global": "where the scores of all layers together say"}
        return f"{_own_budget(config)}; the whole of it {shared[config.budget_scope]}"
    return _own_budget(config)


def _of_parts(config: SupraConfig, describe: Callable[[SupraConfig], str]) -> str:
    return "; ".join(f"`{name}`: {describe(part)}" for name, part in config.parts().items())


def _own_budget(config: SupraConfig) -> str:
    if config.r0 is not None:
        return f"rank {config.r0}: as many parameters as a LoRA of rank {config.r0}"
    return f"density {config.sparse_density} of every adapted layer"


def _base(config: SupraConfig, model: Any) -> str:
    held = getattr(model.get_base_model(), "config", None)
    return _with_bits(config.base_model_name_or_path or getattr(held, "_name_or_path", None) or "not known", config)


def _with_bits(name: str, config: SupraConfig) -> str:
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
        return _of_parts(config, _calibration) or "that of its parts"
    made = config.calibration
    if made is None:
        return "none: the scores need no activations"
    dataset = str(made.get("dataset", "?"))
    if "training_data" in made:
        return f"{made['samples']} training records of {made['training_data']} (seed {made.get('seed', '?')})"
    if "sequence_len" not in made:  # of `calibrate`, which was not told where its windows are from
        named = f" of {dataset}" if "dataset" in made else ", of a text that was not named"
        return f"{made.get('samples', '?')} windows, {made.get('tokens', '?')} tokens in all{named}"
    dataset = Path(dataset).name if Path(dataset).exists() else dataset
    samples, length, seed = (made.get(key, "?") for key in ("samples", "sequence_len", "seed"))
    return f"{samples} × {length} tokens of {dataset} (seed {seed})"
