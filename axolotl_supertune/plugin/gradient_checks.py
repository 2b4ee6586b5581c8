"""What a YAML may not say beside a support that is chosen by gradient."""

from collections.abc import Mapping
from typing import Any

from ..engines import engine_of

# Key → why; the remedy is the same for all.
_REFUSED: dict[str, str] = {
    "fp16": "gradients underflow in fp16 without the scale that training finds as it goes; bf16: true needs none",
    "torch_compile": "it was not tested",
    "streaming": "the batches are drawn from a training set that is there as a whole",
    "pretraining_dataset": "the batches are drawn from a training set that is there as a whole",
}


def check(cfg: Mapping[str, Any], has_sparse_part: bool) -> None:
    """Raise ValueError, naming the key, for a mode in which the gradient cannot be taken, or needs none.

    Args:
        cfg: the YAML, with a gradient score that is not random.
        has_sparse_part: whether there is any support to choose.
    """
    if not has_sparse_part:
        if int(cfg.get("low_rank_warmup_steps") or 0):
            raise ValueError(
                f"low_rank_warmup_steps: {cfg['low_rank_warmup_steps']} has no effect with supra_lambda: 1, which is "
                "LoRA: there is no sparse part to begin after it; drop it."
            )
        return
    engine = engine_of(cfg)
    by_engine = {engine.key: engine.gradient_refusal} if engine.key and engine.gradient_refusal else {}
    for key, reason in (by_engine | _REFUSED).items():
        if cfg.get(key):
            # Mappings and lists are long, and whether they are there is what matters.
            value = f": {cfg[key]}" if isinstance(cfg[key], str | bool | int) else ""
            raise ValueError(
                f"{key}{value} does not work with mask_score: {cfg['mask_score']}: {reason}. Remove {key}, or "
                "choose the support by mask_score: wanda or magnitude."
            )
    steps, warmup = cfg.get("max_steps"), cfg.get("low_rank_warmup_steps") or 0
    if isinstance(steps, int) and 0 < steps <= int(warmup):
        raise ValueError(
            f"low_rank_warmup_steps: {warmup} leaves none of max_steps: {steps} to the sparse part; lower it."
        )
    if int(warmup) and cfg.get("load_best_model_at_end"):
        raise ValueError(
            f"load_best_model_at_end: true does not work with low_rank_warmup_steps: {warmup}: the best checkpoint may "
            "be one from before the support was chosen. Remove load_best_model_at_end, or low_rank_warmup_steps."
        )
