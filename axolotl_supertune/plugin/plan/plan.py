"""Plans a training: what a YAML would train, how much memory it takes, and what would be refused.

No weight is loaded: the model is made from its config on the meta device. Importing this module imports no torch.
"""

from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

from ...method.budget import budget_rows
from . import memory
from .from_yaml import CHECKED, engine_of, job_of, unlike_llama
from .result import Plan

if TYPE_CHECKING:
    from .data_checks import Findings


def make(
    raw: MutableMapping[str, Any],
    *,
    gpus: int | None = None,
    tokens: int | None = None,
    texts_read: "dict[str, Findings] | None" = None,
) -> Plan:
    """Plan the training that a YAML describes.

    Args:
        raw: the YAML's mapping, which is left as it is.
        gpus: how many processes train, one a GPU; None: as the YAML or the environment says.
        tokens: length of the longest record, if shorter than sequence_len.
        texts_read: as in `calibration_findings`.

    Raises:
        ValueError: the adapter is another one, its budgets are impossible, or the base model's config cannot be read.
    """
    engine = engine_of(raw, gpus)
    from ...tuner.targets import layer_budgets
    from ..create import adapter_config, check_all_matched
    from ..quantized_base import check_base
    from .checked_config import checked_config
    from .data_checks import calibration_findings, data_findings, gradient_findings, start_findings

    checked = checked_config(raw, engine.processes)
    cfg = checked.cfg
    model, model_config = meta_model(cfg)
    try:
        method = adapter_config(model, cfg)
        budgets = layer_budgets(model, method)
        check_all_matched(cfg, model, budgets)
    except TypeError as error:
        raise ValueError(str(error)) from error
    plan = Plan(cfg, method, budget_rows(budgets), checked.refusals)
    try:
        check_base(cfg["base_model"], model_config)
    except ValueError as error:
        plan.refusals.append(str(error))
    sparse = [name for name, budget in budgets.items() if budget.sparse_count]
    findings = [data_findings(cfg), start_findings(cfg, method)]
    if not any(key.startswith("calibration_") for key in checked.removed):
        findings.append(calibration_findings(cfg, model, model_config, sparse, texts_read))
    if method.gradient_batches and sparse:
        findings.append(gradient_findings(cfg, method.gradient_batches, engine.processes))
    for finding in findings:
        plan.refusals += finding.refusals
        plan.unchecked += finding.unchecked
    if method.compares_layers:
        plan.notes.append(
            "each layer has the sparse entries of its own budget; budget_scope: global moves them between layers"
        )
    text = model_config.get_text_config()
    plan.unknown = unlike_llama(text)
    if not plan.unknown:
        if text.model_type not in CHECKED:
            plan.notes.append(f"a {text.model_type} model takes the memory of a Llama of its sizes; nobody measured it")
        plan.job = job_of({**cfg, **checked.removed}, method, model, text, engine, tokens, plan.notes)
        _estimate(plan)
    return plan


def _estimate(plan: Plan) -> None:
    job = plan.job
    assert job is not None
    try:
        plan.estimate = memory.estimate(job.shape, plan.rows, job.step, job.engine, job.calibration, job.gradient)
    except ValueError as error:
        plan.unknown = str(error)


def meta_model(cfg: Any) -> tuple[Any, Any]:
    """The base model without weights, and its config.

    Raises:
        ValueError: the config cannot be read, or is not one of a causal language model.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ..axolotl_compat import load_model_config

    try:
        config = load_model_config(cfg)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"base_model: the config of {cfg['base_model']} cannot be read; without the hub, name a folder "
            f"that holds the model's config.json: {error}"
        ) from error
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation="eager", trust_remote_code=bool(cfg.get("trust_remote_code"))
            )
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"base_model: {cfg['base_model']} is no causal language model: {error}") from error
    return model, config
