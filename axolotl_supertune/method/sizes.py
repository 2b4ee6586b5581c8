"""Sizes that both the computation and the memory estimate of `plan` use: integers and names, no torch, no Triton."""

# Environment variable that chooses what computes the adapted layers: `auto`, `triton` or `reference`.
KERNELS_VARIABLE = "SUPERTUNE_KERNELS"

# Bytes of dense fp32 weight gradients that a choice of supports by gradient holds at once; one larger layer exceeds it.
DENSE_BYTES = 2 * 2**30

# The layers of a gated MLP that the kernels compute as one function, in the order of its arguments.
GATED_MLP = ("gate_proj", "up_proj", "down_proj")

# Tokens that the kernels transpose in one piece for sampled products; longer inputs take several pieces.
TOKENS_PER_TRANSPOSE = 16384

# Support entries that one program of a sampled product computes; they share a row or a column of the weight.
ENTRIES_PER_CHUNK = 4


def fits_int32(size: int) -> bool:
    """Whether int32 holds every flat index into `size` = c·b weights, the largest being size - 1."""
    return size <= 2**31


def samples_by_row(out_features: int, in_features: int) -> bool:
    """Whether the chunks of a sampled product share a row of the weight, not a column.

    They share a feature of the larger side: its operand is streamed, and that of the smaller side gathered, which then
    fits into the L2 cache.
    """
    return out_features >= in_features


def padded_rank(rank: int) -> int:
    """r': the rank that the kernels compute with, a power of two of at least 16; 0 without a low-rank part."""
    return max(16, 1 << (rank - 1).bit_length()) if rank else 0
