"""Modules of transformers that compute the same with fcsd's kernels."""
