"""Triton kernels, each with a torch reference that computes the same."""
