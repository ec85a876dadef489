"""Tensor parallelism: sums over ranks for row-parallel products, which may be in flight."""
