"""Triton kernels, each with a torch reference that computes the same.

A plan counts the memory of the kernels in ``gated``, ``rows``, ``rotary`` and ``latent`` on the meta device. There they
allocate and keep the same tensors, and nothing is computed.
"""
