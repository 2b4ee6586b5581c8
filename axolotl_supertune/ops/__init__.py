"""The adapted linear layer y = x·Ŵᵀ + bias with Ŵ = W + M⊙U + γ·L·R.

`reference` is the plain PyTorch that a reader checks against the paper; `fused` is the same with Triton kernels;
`transient` is for a weight that is there only while it is used (quantized bases, FSDP2); `choice` decides. `fused` and
`inplace` need Triton: import them where `choice.takes_kernels` said yes.
"""

from .dispatch import compute_dtype, takes_kernels
from .reference import LowRank, Sparse, effective_weight, merged_weight, sparse_linear

__all__ = ["LowRank", "Sparse", "compute_dtype", "effective_weight", "merged_weight", "sparse_linear", "takes_kernels"]
