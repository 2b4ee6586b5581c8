"""The bytes that the kernels save for backward are those of the memory estimate."""

import pytest
import torch
from allocated import kept_bytes
from peft import get_peft_model

from axolotl_supertune import SupraConfig, budget_table
from axolotl_supertune.plugin.plan.activations import activation_bytes
from axolotl_supertune.plugin.plan.from_yaml import shape_of
from axolotl_supertune.plugin.plan.workload import Step


@pytest.mark.parametrize("supra_lambda", [0, 0.8])
def test_forward_keeps_what_is_estimated(tiny_llama, supra_lambda):
    model = tiny_llama(num_hidden_layers=2).train()
    model.config.use_cache = False
    shape = shape_of(model, model.config, [])
    config = SupraConfig(r0=8, supra_lambda=supra_lambda, mask_score="magnitude", task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    ids = torch.randint(0, shape.vocabulary, (2, 16), generator=torch.Generator().manual_seed(0))
    known = [*model.parameters(), *model.buffers(), ids]
    kept = kept_bytes(lambda: model(input_ids=ids, labels=ids).loss, known)
    step = Step(*ids.shape, width=4)
    logarithms = 4 * step.tokens * shape.vocabulary  # of the softmax
    # Left out: cos and sin, and the roots in the norms.
    assert kept == pytest.approx(activation_bytes(shape, budget_table(model), step)[0] + logarithms, rel=0.02)
