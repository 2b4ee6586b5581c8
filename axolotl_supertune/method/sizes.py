"""Sizes that both the computation and the memory estimate of `plan` use: integers and names, no torch, no Triton."""

# Bytes of dense fp32 weight gradients that a choice of supports by gradient holds at once; one larger layer exceeds it.
DENSE_BYTES = 2 * 2**30

# The layers of a gated MLP that the kernels compute as one function, in the order of its arguments.
GATED_MLP = ("gate_proj", "up_proj", "down_proj")

# Tokens that the kernels transpose in one piece for sampled products; longer inputs take several pieces.
TOKENS_AT_ONCE = 16384

# Support entries that one program of a sampled product computes; they share a row or a column of the weight.
ENTRIES_PER_CHUNK = 4


def padded_rank(rank: int) -> int:
    """r': the rank that the kernels compute with, a power of two of at least 16; 0 without a low-rank part."""
    return max(16, 1 << (rank - 1).bit_length()) if rank else 0
