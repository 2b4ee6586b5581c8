"""Supports and layers in a file: exact, small, and refused when damaged."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from axolotl_supertune.method.budget import layer_budget
from axolotl_supertune.method.support import index_dtype, random_support
from axolotl_supertune.tuner import file_format
from axolotl_supertune.tuner.file_format import decode_support, encode_support, pack_layer, unpack_layer

GAPS = st.one_of(st.integers(0, 300), st.integers(65_530, 65_540), st.integers(131_060, 131_080), st.integers(0, 10**7))


def support(gaps, size):
    return (torch.tensor(gaps, dtype=torch.int64) + 1).cumsum(0).sub(1).to(index_dtype(size))


@settings(deadline=None, max_examples=300)
@given(st.lists(GAPS, max_size=40), st.integers(0, 10**6))
def test_every_support_comes_back(gaps, beyond):
    size = sum(gaps) + len(gaps) + beyond
    indices = support(gaps, size)
    codes = encode_support(indices)
    assert codes.dtype == torch.uint16
    assert len(codes) == len(gaps) + sum(gap // 65_535 for gap in gaps)
    decoded = decode_support(codes, size)
    assert decoded.dtype == indices.dtype
    assert torch.equal(decoded, indices)


@pytest.mark.parametrize(
    "gaps",
    [
        [],
        [0],
        [65_534],
        [65_535],
        [65_536],
        [2**31],
        [5, 2**31 - 1, 0],
        [2**31, 2**33 + 17, 3],
    ],
)
def test_supports_at_the_edges(gaps):
    size = sum(gaps) + len(gaps)
    indices = support(gaps, size)
    assert torch.equal(decode_support(encode_support(indices), size), indices)
    if gaps:
        with pytest.raises(ValueError, match=rf"lead to index {size - 1:,} of a layer of {size - 1:,} weights"):
            decode_support(encode_support(indices), size - 1)


@pytest.mark.parametrize("indices", [[3, 2], [1, 1], [-1, 4]])
def test_what_is_no_support_is_not_encoded(indices):
    with pytest.raises(ValueError, match="strictly increasing set of indices ≥ 0"):
        encode_support(torch.tensor(indices))


def test_codes_that_end_in_a_gap_are_refused():
    with pytest.raises(ValueError, match="end in a gap"):
        decode_support(torch.tensor([4, 65_535]).to(torch.uint16), 10**6)
    with pytest.raises(ValueError, match=r"not torch\.int32"):
        decode_support(torch.tensor([4], dtype=torch.int32), 10**6)


def test_an_entry_takes_two_bytes():
    for shape in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)):
        count = layer_budget(*shape, supra_lambda=0, r0=8).sparse_count
        indices = random_support(shape[0] * shape[1], count, seed=1, layer="x")
        assert encode_support(indices).nbytes == 2 * count
    # Crowded into a few columns, or a few rows, as uneven norms do it.
    columns = (torch.arange(14336)[:, None] * 4096 + torch.tensor([0, 7, 4095])).flatten()
    rows = (torch.tensor([3, 14_000])[:, None] * 4096 + torch.arange(4096)).flatten()
    assert encode_support(columns).nbytes == 2 * len(columns)
    assert encode_support(rows).nbytes <= 2 * (len(rows) + 14_000 * 4096 // 65_535)


def layer(dtype=torch.float32, indices=(0, 5, 70_000)):
    generator = torch.Generator().manual_seed(0)
    return {
        "shape": torch.tensor([400, 300], dtype=torch.int32),
        "indices": torch.tensor(indices, dtype=torch.int32),
        "values": torch.randn(len(indices), generator=generator).to(dtype),
        "L": torch.randn(400, 2, generator=generator),
        "R": torch.randn(2, 300, generator=generator),
    }


@pytest.mark.parametrize("values_dtype", ["fp32", "bf16"])
def test_a_layer_comes_back(values_dtype):
    plain = layer()
    packed = pack_layer(plain, values_dtype)
    assert packed.keys() == {"shape", "codes", "values", "L", "R", "checksum"}
    assert packed["checksum"][0] == file_format.FORMAT == 1
    back = unpack_layer(packed)
    assert back.keys() == plain.keys()
    for name, tensor in plain.items():
        expected = tensor.bfloat16().float() if values_dtype == "bf16" and name in file_format.TRAINED else tensor
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], expected), name


def test_a_layer_of_format_0_is_what_it_is():
    plain = layer()
    assert unpack_layer(plain) == plain


def test_indices_that_codes_would_not_shorten_stay():
    indices = torch.tensor([10**6, 3 * 10**6], dtype=torch.int32)
    plain = {"shape": torch.tensor([2000, 2000], dtype=torch.int32), "indices": indices, "values": torch.ones(2)}
    packed = pack_layer(plain)
    assert "codes" not in packed
    assert torch.equal(unpack_layer(packed)["indices"], indices)


@pytest.mark.parametrize("name", ["shape", "codes", "values", "L", "R"])
@pytest.mark.parametrize("damage", ["bit", "lost", "dtype"])
def test_any_change_breaks_the_checksum(name, damage):
    packed = pack_layer(layer())
    if damage == "bit":
        packed[name].view(torch.uint8).view(-1)[-1] ^= 1
    elif damage == "dtype":
        packed[name] = packed[name].view(torch.int16)
    else:
        del packed[name]
    with pytest.raises(ValueError, match="checksum does not match"):
        unpack_layer(packed)


def test_a_newer_format_is_refused():
    packed = pack_layer(layer())
    packed["checksum"][0] = 2
    with pytest.raises(ValueError, match=r"of format 2, .* reads 0 to 1: install a newer one"):
        unpack_layer(packed)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match=r"values_dtype='fp8' is not one of fp32, bf16"):
        pack_layer(layer(), "fp8")
