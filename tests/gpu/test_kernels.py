"""The Triton kernels on a GPU: against float64 at real sizes, in poisoned memory, without a synchronisation."""

import copy
import gc
import io
import warnings
from collections import Counter

import pytest

pytest.importorskip("triton")

import torch
from kernel_cases import (
    SUPPORTS,
    Block,
    assert_close,
    dense_linear,
    gradients,
    kernel_layer,
    make_case,
    met,
    relative_error,
)
from peft import get_peft_model
from torch.nn.attention import SDPBackend, sdpa_kernel

from axolotl_supertune import SupraConfig
from axolotl_supertune.method.sizes import KERNELS_VARIABLE
from axolotl_supertune.ops import dispatch, effective_weight, kernels
from axolotl_supertune.ops.fused import GatedMLP, Group, gated_mlp, linear_group
from axolotl_supertune.ops.operands import mask_seed
from axolotl_supertune.tuner import SupraLinear

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# One token; a part of every block; the bench's batch; more than is transposed at once.
TOKENS = [1, 7, 16 * 196, 20000]
# Of results that are rounded once or twice, and of an MLP's, whose inner activations are rounded too.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
MLP_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-5}
B, INNER = 1024, 2816
# q, k and v of grouped-query attention: one output wider than the input is tested with the MLP.
GROUPS = {
    "sl sl sl": [(1024, "sl"), (256, "sl"), (256, "sl")],
    "s s s": [(1024, "s"), (256, "s"), (256, "s")],
    "l l": [(1024, "l"), (256, "l")],
    "s l sl": [(1024, "s"), (256, "l"), (1000, "sl")],
}


def poison():
    """Fill memory that the allocator will hand out again with NaN in every floating-point format."""
    sizes = [2**10] * 64 + [2**14] * 64 + [2**18] * 64 + [2**22] * 32 + [2**26] * 16
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in sizes]
    del blocks


@pytest.fixture(autouse=True)
def poisoned_memory():
    poison()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def draw(*shape, dtype, seed=7):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random).to(device="cuda", dtype=dtype)


def group_cases(kind, dtype, **options):
    return [
        make_case(c, B, parts, rank=(8, 6, 3)[at], seed=at, dtype=dtype, device="cuda", bias=at == 1, **options)
        for at, (c, parts) in enumerate(GROUPS[kind])
    ]


def run_group(cases, x, dropout=0.0):
    group = Group([kernel_layer(case, dropout=dropout) for case in cases])
    poison()
    return gradients(linear_group(x, group), x, cases)


def exact_group(cases, x, kept=(None, None, None), probability=0.0):
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    outputs = [dense_linear(exact, case, mask, probability) for case, mask in zip(doubles, kept, strict=False)]
    return gradients(outputs, exact, doubles)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", GROUPS)
def test_group(kind, dtype, tokens):
    cases, x = group_cases(kind, dtype), draw(tokens, B, dtype=dtype).requires_grad_()
    found = run_group(cases, x)
    assert all(found[name].dtype == torch.float32 for name in found if name[0] in "ULR")
    assert_close(found, exact_group(cases, x), TOLERANCE[dtype])


@pytest.mark.parametrize("kind", SUPPORTS)
@pytest.mark.parametrize(("c", "b"), [(512, 384), (384, 512), (333, 501)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_support(kind, c, b, dtype):
    case = make_case(c, b, "sl", kind=kind, count=700, dtype=dtype, device="cuda")
    other = make_case(c, b, "s", kind=kind, seed=1, count=601, dtype=dtype, device="cuda")
    x = draw(1000, b, dtype=dtype).requires_grad_()
    assert_close(run_group([case, other], x), exact_group([case, other], x), TOLERANCE[dtype])
    alone = run_group([other], x)
    assert_close(alone, exact_group([other], x), TOLERANCE[dtype])


def mlp_cases(parts, dtype, **options):
    sizes = [(INNER, B), (INNER, B), (B, INNER)]
    return [
        make_case(c, n, part, rank=8, seed=at, dtype=dtype, device="cuda", **options)
        for at, ((c, n), part) in enumerate(zip(sizes, parts, strict=True))
    ]


def run_mlp(cases, x, dropout=0.0):
    mlp = GatedMLP(*(kernel_layer(case, dropout=dropout) for case in cases))
    poison()
    return gradients([gated_mlp(x, mlp)], x, cases)


def exact_mlp(cases, x, kept=(None, None, None), probability=0.0):
    exact, doubles = x.detach().double().requires_grad_(), [case.double() for case in cases]
    gate, up = (dense_linear(exact, doubles[at], kept[at], probability) for at in (0, 1))
    h = torch.nn.functional.silu(gate) * up
    return gradients([dense_linear(h, doubles[2], kept[2], probability)], exact, doubles)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [("sl", "sl", "sl"), ("s", "s", "s"), ("s", "sl", "l")])
def test_gated_mlp(parts, dtype, tokens):
    cases, x = mlp_cases(parts, dtype), draw(tokens, B, dtype=dtype).requires_grad_()
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), MLP_TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["two columns", "empty", "full column"])
def test_gated_mlp_of_any_support(kind):
    cases = mlp_cases(("s", "s", "s"), torch.bfloat16, kind=kind, count=1500)
    x = draw(1000, B, dtype=torch.bfloat16).requires_grad_()
    assert_close(run_mlp(cases, x), exact_mlp(cases, x), MLP_TOLERANCE[torch.bfloat16])


def seed_of_next_call(x, threshold):
    state = torch.cuda.get_rng_state()
    seed = mask_seed(x, threshold)
    torch.cuda.set_rng_state(state)
    return seed


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(dtype):
    """Against the masks that the mask kernel shows, which has other blocks than those that use them."""
    tokens, probability = 777, 0.1
    x = draw(tokens, B, dtype=dtype).requires_grad_()
    seed = seed_of_next_call(x, 1)
    mask = lambda width, stream: kernels.dropout_mask(seed, (tokens, width), probability, x.device, stream)  # noqa: E731
    state = torch.cuda.get_rng_state()
    cases = group_cases("sl sl sl", dtype)
    kept = [mask(B, stream) for stream in range(3)]
    assert abs(float(kept[0].float().mean()) - 0.9) < 0.01
    found = run_group(cases, x, dropout=probability)
    assert_close(found, exact_group(cases, x, kept, met(probability)), TOLERANCE[dtype])
    torch.cuda.set_rng_state(state)
    cases = mlp_cases(("sl", "sl", "sl"), dtype)
    kept = [mask(B, 0), mask(B, 1), mask(INNER, 2)]
    found = run_mlp(cases, x, dropout=probability)
    assert_close(found, exact_mlp(cases, x, kept, met(probability)), MLP_TOLERANCE[dtype])


def test_masks_of_successive_calls_differ():
    x = draw(64, B, dtype=torch.bfloat16)
    group = Group([kernel_layer(make_case(256, B, "l", dtype=torch.bfloat16, device="cuda"), dropout=0.5)])
    torch.manual_seed(3)
    first, second = linear_group(x, group)[0], linear_group(x, group)[0]
    torch.manual_seed(3)
    assert not torch.equal(first, second)
    assert torch.equal(linear_group(x, group)[0], first)
    torch.manual_seed(4)
    assert not torch.equal(linear_group(x, group)[0], first)


def test_views_that_are_not_aligned_or_not_contiguous():
    """After a first call with aligned ones, for which the kernels were compiled."""
    cases = group_cases("sl sl sl", torch.bfloat16)
    group = Group([kernel_layer(case) for case in cases])
    memory = draw(2 * 65 * B, dtype=torch.bfloat16)
    views = [memory[: 65 * B].view(65, B), memory[1 : 1 + 65 * B].view(65, B), memory[: 65 * B].view(B, 65).t()]
    views.append(memory.view(65, 2 * B)[:, 3 : 3 + B])
    for view in views:
        x = view.requires_grad_()
        found = gradients(linear_group(x, group), x, cases)
        assert_close(found, exact_group(cases, x), TOLERANCE[torch.bfloat16])


def test_numbers_of_tokens_in_any_order():
    """One group, bound once: what the first call compiled must not be special to its T."""
    cases = group_cases("sl sl sl", torch.bfloat16)
    group = Group([kernel_layer(case) for case in cases])
    for tokens in (16, 1, 64, 333, 17000, 2):
        x = draw(tokens, B, dtype=torch.bfloat16).requires_grad_()
        poison()
        found = gradients(linear_group(x, group), x, cases)
        assert_close(found, exact_group(cases, x), TOLERANCE[torch.bfloat16])


def test_indices_and_addresses_beyond_31_bits():
    """T · c above 2³¹: a long input of a wide layer."""
    c, b, tokens = 65536, 32, 33000
    case = make_case(c, b, "sl", count=3000, dtype=torch.bfloat16, device="cuda")
    x = draw(tokens, b, dtype=torch.bfloat16).requires_grad_()
    (y,) = linear_group(x, Group([kernel_layer(case)]))
    dy = torch.zeros_like(y)
    dy[-5:] = 1
    y.backward(dy)
    last, double = x.detach()[-5:].double().requires_grad_(), case.double()
    exact = dense_linear(last, double)
    exact.sum().backward()
    assert relative_error(y[-5:], exact) <= 1e-2
    assert relative_error(x.grad[-5:], last.grad) <= 1e-2
    for found, expected in zip(case.trained().values(), double.trained().values(), strict=True):
        assert relative_error(found.grad, expected.grad) <= 1e-2


@pytest.mark.parametrize("dtype", DTYPES)
def test_entry_writes_what_a_merge_would_and_restores_the_very_bits(dtype):
    case = make_case(512, 384, "sl", count=5000, dtype=dtype, device="cuda")
    slot = kernel_layer(case).slot
    assert torch.equal(slot.weight, effective_weight(case.weight, case.sparse()))
    assert torch.equal(slot.packed[1][:3], case.R.to(dtype))
    assert torch.equal(slot.packed[0][:3], (case.L.t() * case.scaling).to(dtype))
    assert not slot.packed[1][3:].any()
    slot.restore()
    assert torch.equal(slot.weight, case.weight)


# Whole models


def config(**changes):
    knobs = {"mask_score": "magnitude", "supra_lambda": 0.5, "lora_dropout": 0.0, "init_weights": False}
    return SupraConfig(**{**knobs, "task_type": "CAUSAL_LM", **changes})


def adapt(model, seed=1, **changes):
    torch.manual_seed(seed)
    model = get_peft_model(model, config(**changes)).train()
    with torch.no_grad():
        for layer in supra_layers(model).values():
            for L in layer.supra_L.values():
                L.mul_(0.05)
    return model


def supra_layers(model):
    return {module.layer_name: module for module in model.modules() if isinstance(module, SupraLinear)}


def trained(model):
    return [each for each in model.parameters() if each.requires_grad]


def step(model, ids, seed=5, run=None):
    model.zero_grad()
    torch.manual_seed(seed)
    with sdpa_kernel(SDPBackend.MATH):  # the others may sum in any order
        logits = (model if run is None else run)(ids).logits
        logits.float().square().mean().backward()
    named = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    return {"logits": logits.detach().clone(), **named}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


@pytest.fixture
def make(tiny_llama):
    """A function (dtype, **changes of the config) → an adapted tiny Llama on the GPU."""

    def build(dtype=torch.bfloat16, **changes):
        return adapt(tiny_llama(dtype=dtype).cuda(), **changes)

    return build


@pytest.fixture
def gpu_ids(ids):
    return ids.cuda()


@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_model_equals_the_reference_path(make, gpu_ids, monkeypatch, supra_lambda):
    model = make(torch.float32, supra_lambda=supra_lambda)
    found = step(model, gpu_ids)
    assert all(layer._slots for layer in supra_layers(model).values())
    monkeypatch.setenv(KERNELS_VARIABLE, "reference")
    twin = make(torch.float32, supra_lambda=supra_lambda)
    assert_close(found, step(twin, gpu_ids), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(make, gpu_ids, dtype):
    model = make(torch.float32)
    expected = step(model, gpu_ids)
    with torch.autocast("cuda", dtype=dtype):
        found = step(model, gpu_ids)
    assert found["logits"].dtype == dtype
    assert all(each.dtype == torch.float32 for name, each in found.items() if name != "logits")
    assert_close(found, expected, {torch.bfloat16: 0.2, torch.float16: 3e-2}[dtype])


@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_two_identical_steps_give_the_same_bits(make, gpu_ids, supra_lambda):
    model = make(supra_lambda=supra_lambda, lora_dropout=0.1)
    first = step(model, gpu_ids)
    poison()
    assert_equal(step(model, gpu_ids), first)
    assert_equal(step(make(supra_lambda=supra_lambda, lora_dropout=0.1), gpu_ids), first)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_with_dropout_gives_the_same_gradients(make, gpu_ids, use_reentrant):
    model = make(lora_dropout=0.3)
    expected = step(model, gpu_ids)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_equal(step(model, gpu_ids), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_base_bits_are_restored_after_training(make, gpu_ids, tiny_llama, dtype):
    plain, model = tiny_llama(dtype=dtype).cuda(), make(dtype)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2, fused=True)
    for _ in range(3):
        step(model, gpu_ids)
        optimizer.step()
    names = list(supra_layers(model))
    written = [
        not torch.equal(supra_layers(model)[name].base_layer.weight, plain.get_submodule(name).weight) for name in names
    ]
    assert all(written)
    state = model.state_dict()
    for name, layer in supra_layers(model).items():
        assert torch.equal(layer.base_layer.weight, plain.get_submodule(name).weight)
        assert torch.equal(state[f"base_model.model.{name}.base_layer.weight"], plain.get_submodule(name).weight)
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(model(gpu_ids).logits, plain(gpu_ids).logits)
    assert_equal(model.unload().state_dict(), plain.state_dict())


@pytest.mark.parametrize("fused_step", [True, False])
def test_a_step_of_the_optimizer_is_seen_by_the_next_forward(make, gpu_ids, monkeypatch, fused_step):
    results = []
    for by in ("auto", "reference"):
        monkeypatch.setenv(KERNELS_VARIABLE, by)
        model = make(torch.float32)
        optimizer = torch.optim.AdamW(trained(model), lr=1e-2, fused=fused_step, foreach=False)
        for _ in range(3):
            step(model, gpu_ids)
            optimizer.step()
        results.append(step(model, gpu_ids)["logits"])
    assert relative_error(*results) <= 1e-3


@pytest.mark.parametrize("forward_before", [False, True])
def test_copies_of_a_model_that_ran(forward_before):
    """What was bound and compiled for one model is not copied or pickled with it."""
    block = Block(64, 96, device="cuda", dtype=torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    model = adapt(block, task_type=None, target_modules=targets)
    x = draw(33, 64, dtype=torch.bfloat16)
    if forward_before:
        sum(y.float().sum() for y in model(x)).backward()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            for one, other in zip(twin(x), model(x), strict=True):
                assert torch.equal(one, other)


def test_a_cuda_layer_on_the_reference_path_is_named_once(make, gpu_ids, monkeypatch):
    monkeypatch.setattr(dispatch, "_warned", set())
    model = make(torch.float64)
    with pytest.warns(UserWarning, match=r"computed by the slower reference path: .*float64"):
        model(gpu_ids)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(gpu_ids)


# No waiting


class Synchronizations:
    """Counts, by place in the code, what waits for the GPU inside a `with`."""

    def __enter__(self):
        self._catch = warnings.catch_warnings(record=True)
        self._caught = self._catch.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return self

    def __exit__(self, *args):
        torch.cuda.set_sync_debug_mode("default")
        self._catch.__exit__(*args)
        found = [each for each in self._caught if "synchronizing CUDA operation" in str(each.message)]
        self.places = Counter(f"{each.filename}:{each.lineno}" for each in found)


def training_step(model, optimizer, ids):
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    optimizer.step()


@pytest.mark.parametrize("dropout", [0.0, 0.05])
@pytest.mark.parametrize("supra_lambda", [0, 0.5, 1])
def test_a_training_step_waits_for_the_gpu_no_more_than_the_base(make, tiny_llama, gpu_ids, supra_lambda, dropout):
    """transformers' own code may wait; nothing is added to it."""
    base = tiny_llama(dtype=torch.bfloat16).cuda().train()
    counts = []
    for model in (base, make(supra_lambda=supra_lambda, lora_dropout=dropout)):
        optimizer = torch.optim.AdamW(trained(model), lr=1e-3, fused=True)
        for _ in range(2):
            training_step(model, optimizer, gpu_ids)
        with Synchronizations() as waits:
            training_step(model, optimizer, gpu_ids)
        counts.append(waits.places)
    assert not counts[1] - counts[0]
    assert not [place for place in counts[1] if "axolotl_supertune" in place]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_a_training_step_of_adapted_layers_never_waits(supra_lambda, checkpointing):
    """Nothing but adapted layers: whatever waits raises."""
    block = Block(64, 96, device="cuda", dtype=torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    model = adapt(block, task_type=None, target_modules=targets, supra_lambda=supra_lambda, lora_dropout=0.05)
    x = draw(33, 64, dtype=torch.bfloat16).requires_grad_()
    optimizer = torch.optim.AdamW(trained(model), lr=1e-3, fused=True)

    def once():
        optimizer.zero_grad()
        if checkpointing:
            outputs = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False, preserve_rng_state=False)
        else:
            outputs = model(x)
        sum(y.float().square().mean() for y in outputs).backward()
        optimizer.step()

    for _ in range(2):
        once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Memory


@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_gated_mlp_keeps_less_than_the_reference(monkeypatch, supra_lambda):
    """Two activations of the intermediate size instead of four or more."""
    kept = {}
    for by in ("auto", "reference"):
        monkeypatch.setenv(KERNELS_VARIABLE, by)
        torch.manual_seed(0)
        block = Block(B, INNER, device="cuda", dtype=torch.bfloat16)
        names = ["gate_proj", "up_proj", "down_proj"]
        model = adapt(block, task_type=None, target_modules=names, supra_lambda=supra_lambda)
        mlp, x = model.base_model.model.mlp, draw(4096, B, dtype=torch.bfloat16).requires_grad_()
        mlp(x).sum().backward()  # what is bound once
        model.zero_grad()
        x.grad = None
        gc.collect()
        before = torch.cuda.memory_allocated()
        y = mlp(x)
        kept[by] = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        del y, model, mlp, block
    activation = 4096 * INNER * 2
    assert kept["auto"] < kept["reference"]
    assert kept["auto"] < 2.2 * activation


# torch.compile


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("supra_lambda", [0, 0.5])
def test_compiled_model_trains_and_gives_the_eager_gradients(make, gpu_ids, supra_lambda):
    model = make(torch.float32, supra_lambda=supra_lambda)
    compiled = torch.compile(model, fullgraph=False)
    optimizer = torch.optim.AdamW(trained(model), lr=1e-3, fused=True)
    for _ in range(2):
        assert_close(step(model, gpu_ids, run=compiled), step(model, gpu_ids), 1e-3)
        optimizer.step()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_model_draws_its_masks_from_the_seed(make, gpu_ids, autocast):
    model = make(torch.float32 if autocast else torch.bfloat16, lora_dropout=0.1)
    compiled = torch.compile(model, fullgraph=False)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        plain = step(model, gpu_ids, run=compiled)
        assert all(torch.isfinite(each).all() for each in plain.values())
        assert_equal(step(model, gpu_ids, run=compiled), plain)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:.*slower reference path")
def test_compiled_layers_that_the_kernels_cannot_compute(make, gpu_ids):
    model = make(torch.float64)
    compiled = torch.compile(model, fullgraph=False)
    # Inductor fuses what Llama computes in fp32 whatever the model is in.
    assert_close(step(model, gpu_ids, run=compiled), step(model, gpu_ids), 1e-5)
