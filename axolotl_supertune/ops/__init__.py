"""Forward and backward of an adapted linear layer, y = x·Ŵᵀ + bias with Ŵ = W + M⊙U + γ·L·R.

`dispatch` chooses between `fused`, with Triton kernels, and `reference`, in plain PyTorch; `recomputed_weight` serves
layers whose weight is formed anew at each use: quantized ones, and gathered ones that the kernels do not compute.
Modules that need Triton (`fused`, `inplace_weight`, `gathered_weight` and the kernels) are imported only where
`takes_kernels` returned True.
"""

from .dispatch import compute_dtype, takes_kernels
from .reference import LowRank, Sparse, effective_weight, merged_weight, sparse_linear

__all__ = ["LowRank", "Sparse", "compute_dtype", "effective_weight", "merged_weight", "sparse_linear", "takes_kernels"]
