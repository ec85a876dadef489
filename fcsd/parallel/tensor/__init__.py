"""Tensor parallelism: which rank has which part of a weight, and the sums over ranks in training."""
