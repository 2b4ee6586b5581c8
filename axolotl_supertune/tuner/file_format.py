"""The layers of an adapter in a file: supports in two bytes an entry, values in fp32 or bf16, a checksum over both.

A support is stored as its gaps. Entry i_k is coded as g = i_k − i_{k−1} − 1, with i_{−1} = −1: as g % 65535 after
g // 65535 codes of 65535, each of which says "65535 further, no entry yet". Every sorted support has one code, and
every code that ends in an entry is a sorted support. At most c·b / 65535 codes are no entries; the other plan, a count
per row and a column per entry, takes 2.6 MiB more at the shapes of Llama-3-8B under rank budget 8.

Versions of the format, of one layer's tensors:

- 0: `values`, `L`, `R` (fp32), `indices` (int32, int64 for layers of more than 2³¹ weights), `shape` (int32, [c, b]);
- 1: `codes` (uint16) instead of `indices` where they take fewer bytes, `values`, `L` and `R` in fp32 or bf16, and
  `checksum` (uint8, 33): the version, and the sha256 of the others.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from ..method.support import index_dtype

FORMAT = 1
VALUES_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRAINED = ("values", "L", "R")
# Every name that a tensor of a layer has in any version.
NAMES = (*TRAINED, "indices", "shape", "codes", "checksum")

_FURTHER = 2**16 - 1


def encode_support(indices: Tensor) -> Tensor:
    """The codes of a support.

    Args:
        indices: (s,) strictly increasing, ≥ 0, any integer dtype.

    Returns:
        (n,) uint16, n ≥ s, on the indices' device.

    Raises:
        ValueError: not strictly increasing, or negative.
    """
    wide = indices.long()
    gaps = torch.diff(wide, prepend=wide.new_full((1,), -1)) - 1
    if not len(gaps):
        return gaps.to(torch.uint16)
    if int(gaps.min()) < 0:
        raise ValueError("the support is not a strictly increasing set of indices ≥ 0.")
    if int(gaps.max()) < _FURTHER:
        return gaps.to(torch.uint16)
    last = torch.cumsum(gaps // _FURTHER + 1, 0)
    codes = gaps.new_full((int(last[-1]),), _FURTHER)
    codes[last - 1] = gaps % _FURTHER
    return codes.to(torch.uint16)


def decode_support(codes: Tensor, size: int) -> Tensor:
    """The support that `encode_support` coded.

    Args:
        codes: (n,) uint16.
        size: c·b of the layer.

    Returns:
        (s,) strictly increasing, of `index_dtype(size)`, on the codes' device.

    Raises:
        ValueError: other than uint16, a gap without an entry at the end, or an index that the layer does not have.
    """
    if codes.dtype != torch.uint16 or codes.dim() != 1:
        raise ValueError(f"codes of a support are 1-D uint16, not {codes.dtype} of shape {tuple(codes.shape)}.")
    if not len(codes):
        return torch.empty(0, dtype=index_dtype(size), device=codes.device)
    steps = codes.to(torch.int32)
    entries = steps != _FURTHER
    steps += entries
    indices = steps.cumsum(0, dtype=torch.int64) - 1
    last = int(indices[-1])
    if not bool(entries[-1]):
        raise ValueError("the codes of a support end in a gap.")
    if last >= size:
        raise ValueError(f"the codes of a support lead to index {last:,} of a layer of {size:,} weights.")
    if not bool(entries.all()):
        indices = indices[entries]
    return indices.to(index_dtype(size))


def pack_layer(tensors: Mapping[str, Tensor], values_dtype: str = "fp32") -> dict[str, Tensor]:
    """One layer in the newest format, on the CPU.

    Args:
        tensors: in format 0, whole: `shape`, and what the budget gave of `values`, `indices`, `L` and `R`.
        values_dtype: `fp32` or `bf16`, of `values`, `L` and `R` in the file.

    Raises:
        ValueError: unknown dtype, or indices that are no support.
    """
    if values_dtype not in VALUES_DTYPES:
        raise ValueError(f"values_dtype={values_dtype!r} is not one of {', '.join(VALUES_DTYPES)}.")
    packed = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    for name in TRAINED:
        if name in packed:
            packed[name] = packed[name].to(VALUES_DTYPES[values_dtype]).contiguous()
    if "indices" in packed:
        codes = encode_support(packed["indices"])
        # A support so thin that its gaps take more bytes than its indices stays what it is.
        if codes.nbytes < packed["indices"].nbytes:
            del packed["indices"]
            packed["codes"] = codes
    packed["checksum"] = _checksum(packed, FORMAT)
    return packed


def unpack_layer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One layer in format 0, values in fp32, each tensor on its device; a layer of format 0 is returned as it is.

    Raises:
        ValueError: a newer format, tensors that are not those the checksum was made of, or codes of no support.
    """
    plain = dict(tensors)
    if "checksum" not in plain:
        return plain
    stored = plain.pop("checksum").cpu()
    if not len(stored) or int(stored[0]) != FORMAT:
        version = int(stored[0]) if len(stored) else "none"
        raise ValueError(
            f"the file is of format {version}, this version of axolotl-supertune reads 0 to {FORMAT}: install "
            "a newer one."
        )
    if not stored.equal(_checksum(plain, FORMAT)):
        raise ValueError("the checksum does not match: the file is damaged, or a tensor was changed or lost.")
    if "codes" in plain:
        rows, width = plain["shape"].tolist()
        plain["indices"] = decode_support(plain.pop("codes"), rows * width)
    for name in TRAINED:
        if name in plain:
            plain[name] = plain[name].float()
    return plain


def _checksum(tensors: Mapping[str, Tensor], version: int) -> Tensor:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor([version, *digest.digest()], dtype=torch.uint8)
