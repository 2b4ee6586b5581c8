"""A weight that FSDP2 gathers, on a GPU: the kernels, exact gradients, and no dense tensor beside that weight.

One process is enough: `fully_shard` frees and fills its weight as with many.
"""

import pytest

pytest.importorskip("triton")

import torch
import torch.distributed as dist
from peft import get_peft_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.cuda_memory import PeakMemory
from axolotl_supertune.ops import effective_weight
from axolotl_supertune.ops.gathered_weight import GatheredSlot

C, B, TOKENS = 4096, 2048, 512
MIB = 2**20


@pytest.fixture
def mesh(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def draw(*shape, seed=7, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * scale).bfloat16()


@pytest.fixture
def make(mesh):
    """A function (supra_lambda, reshard) → a block of one adapted layer, sharded; its weight; its layer."""

    def make(supra_lambda, reshard):
        linear = nn.Linear(B, C, bias=False, device="cuda", dtype=torch.bfloat16)
        linear.weight.data = draw(C, B, scale=0.02)
        knobs = {"mask_score": "magnitude", "r0": 8, "supra_lambda": supra_lambda, "lora_dropout": 0.0}
        config = SupraConfig(target_modules=["layer"], init_weights=False, **knobs)
        block = nn.Sequential()
        block.add_module("layer", linear)
        block = get_peft_model(block, config).base_model.model
        weight = linear.weight.detach().clone()
        policy = MixedPrecisionPolicy(param_dtype=None, reduce_dtype=torch.float32)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
        return block, weight, block.layer

    return make


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_gradients_are_those_of_the_dense_weight(make, supra_lambda, reshard):
    block, weight, layer = make(supra_lambda, reshard)
    x, dy = draw(TOKENS, B).requires_grad_(), draw(TOKENS, C, seed=8)
    y = block(x)
    assert type(layer.base_layer.weight).__name__ == ("DTensor" if reshard else "Parameter")
    y.backward(dy)
    assert type(layer.layer_guards[True].result.slot) is GatheredSlot
    assert not layer._gradients
    assert torch.equal(whole(layer.base_layer.weight), weight), "nothing is left in it"

    trained = {name.split(".")[-2]: whole(each) for name, each in layer.named_parameters() if each.requires_grad}
    (part,) = layer.sparse_parts(["default"])
    indices = part.indices.long()
    effective = effective_weight(weight, [part._replace(values=trained["supra_values"])]).double()
    gradient = dy.double().t() @ x.detach().double()
    expected = {"supra_values": gradient.view(-1)[indices]}
    if supra_lambda:
        L, R = trained["supra_L"].double(), trained["supra_R"].double()
        scaling = layer.supra_scaling["default"]
        effective = effective + scaling * L @ R
        expected |= {"supra_L": scaling * gradient @ R.t(), "supra_R": scaling * L.t() @ gradient}
    grads = {name.split(".")[-2]: whole(each.grad) for name, each in layer.named_parameters() if each.requires_grad}
    assert grads.keys() == expected.keys()
    for name, exact in expected.items():
        assert grads[name].dtype == torch.float32
        tolerance = 1e-5 if name == "supra_values" else 1e-2  # the low-rank part passes through bf16 products
        assert (grads[name].double() - exact).norm() <= tolerance * exact.norm(), name
    for found, exact in ((y, x.detach().double() @ effective.t()), (x.grad, dy.double() @ effective)):
        assert (found.double() - exact).norm() <= 1e-2 * exact.norm()


def test_beside_the_gathered_weight_there_is_no_effective_weight_and_no_dense_gradient(make):
    block, weight, _ = make(0, True)
    x, dy = draw(TOKENS, B).requires_grad_(), draw(TOKENS, C, seed=8)
    block(x).backward(dy)  # what is made once is made
    x.grad = None
    memory = PeakMemory(torch.device("cuda"))
    y = block(x)
    kept = torch.cuda.memory_allocated() - memory.before
    y.backward(dy)
    peak = memory.read() - memory.before
    size = weight.nbytes  # 16 MiB; a dense fp32 gradient would be 32
    assert kept <= y.nbytes + MIB, "the weight was freed after forward"
    operands = x.nbytes + y.nbytes
    # What arrives and the weight that it becomes; then the weight, and the operands with their transposed copies and
    # gradients.
    assert peak <= max(2 * size + operands, size + 4 * operands) + 2 * MIB
