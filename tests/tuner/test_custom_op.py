"""Under torch.compile the reference path gives the eager gradients: what is not traced right would not train."""

import pytest
import torch
from peft import get_peft_model
from torch import nn

from axolotl_supertune import SupraConfig


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("supra_lambda", "dropout"), [(0, 0.0), (0.5, 0.0), (0.5, 0.1), (1, 0.0)])
@pytest.mark.slow
def test_the_reference_path_compiles_to_the_eager_gradients(supra_lambda, dropout, dtype, backend):
    torch.manual_seed(3)
    settings = {"supra_lambda": supra_lambda, "lora_dropout": dropout, "mask_score": "magnitude", "r0": 2}
    config = SupraConfig(**settings, init_weights=False, target_modules=["0", "2"])
    base = nn.Sequential(nn.Linear(12, 16), nn.SiLU(), nn.Linear(16, 8, bias=False)).to(dtype)
    model = get_peft_model(base, config).train()
    x = torch.randn(5, 12, dtype=dtype)

    def gradients(run):
        model.zero_grad()
        torch.manual_seed(5)
        run(x).square().sum().backward()
        return {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}

    expected = gradients(model)
    torch._dynamo.reset()
    found = gradients(torch.compile(model, backend=backend))
    assert all(each.any() for each in expected.values())
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each)
