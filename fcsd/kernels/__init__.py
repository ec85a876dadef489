"""Triton kernels, each equal to a torch reference elsewhere in fcsd."""
