"""Tensor parallelism: the sums over ranks that row-parallel products need, in flight."""
