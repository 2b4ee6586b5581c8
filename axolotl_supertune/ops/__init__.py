"""The adapted linear layer y = x·Ŵᵀ + bias with Ŵ = W + M⊙U + γ·L·R, as one autograd function."""

from .reference import LowRank, Sparse, effective_weight, merged_weight, sparse_linear

__all__ = ["LowRank", "Sparse", "effective_weight", "merged_weight", "sparse_linear"]
