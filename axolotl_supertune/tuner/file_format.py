"""File format of an adapter's layers: supports in two bytes per entry, values in fp32 or bf16, and a checksum.

A support is stored as the gaps between its entries. Entry i_k has the gap g = i_k − i_{k−1} − 1, with i_{−1} = −1. It
is coded as g // 65535 codes of 65535 ("skip 65535 weights"), followed by g % 65535. Every sorted support has exactly
one encoding, and every sequence of codes that ends in an entry is a sorted support. At most c·b / 65535 codes are
skips. The alternative, a count per row and a column per entry, takes 2.6 MiB more for Llama-3-8B at rank budget 8.

Versions, by the tensors of one layer:

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
# Names of a layer's tensors in all versions.
NAMES = (*TRAINED, "indices", "shape", "codes", "checksum")

_SKIP = 2**16 - 1  # the code for "skip this many weights"


def encode_support(indices: Tensor) -> Tensor:
    """Encode a support.

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
    if int(gaps.max()) < _SKIP:
        return gaps.to(torch.uint16)
    last = torch.cumsum(gaps // _SKIP + 1, 0)
    codes = gaps.new_full((int(last[-1]),), _SKIP)
    codes[last - 1] = gaps % _SKIP
    return codes.to(torch.uint16)


def decode_support(codes: Tensor, size: int) -> Tensor:
    """Decode what `encode_support` returned.

    Args:
        codes: (n,) uint16.
        size: c·b of the layer.

    Returns:
        (s,) strictly increasing, of `index_dtype(size)`, on the codes' device.

    Raises:
        ValueError: not uint16, a skip at the end, or an index outside the layer.
    """
    if codes.dtype != torch.uint16 or codes.dim() != 1:
        raise ValueError(f"codes of a support are 1-D uint16, not {codes.dtype} of shape {tuple(codes.shape)}.")
    if not len(codes):
        return torch.empty(0, dtype=index_dtype(size), device=codes.device)
    steps = codes.to(torch.int32)
    entries = steps != _SKIP
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
    """Convert one layer to the newest format, on the CPU.

    Args:
        tensors: a complete layer in format 0: `shape`, and those of `values`, `indices`, `L` and `R` that it has.
        values_dtype: `fp32` or `bf16`, of `values`, `L` and `R` in the file.

    Raises:
        ValueError: an unknown dtype, or indices that are not strictly increasing.
    """
    if values_dtype not in VALUES_DTYPES:
        raise ValueError(f"values_dtype={values_dtype!r} is not one of {', '.join(VALUES_DTYPES)}.")
    packed = {name: tensor.detach().cpu() for name, tensor in tensors.items()}
    for name in TRAINED:
        if name in packed:
            packed[name] = packed[name].to(VALUES_DTYPES[values_dtype]).contiguous()
    if "indices" in packed:
        codes = encode_support(packed["indices"])
        # For a very sparse support the codes can take more bytes than the indices.
        if codes.nbytes < packed["indices"].nbytes:
            del packed["indices"]
            packed["codes"] = codes
    packed["checksum"] = _checksum(packed, FORMAT)
    return packed


def unpack_layer(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert one layer of any format to format 0, values in fp32, on the tensors' devices.

    Raises:
        ValueError: a newer format, a checksum that does not match, or invalid codes.
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
    """(33,) uint8: the version, and sha256 over name, dtype, shape and bytes of the tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return torch.tensor([version, *digest.digest()], dtype=torch.uint8)
