"""Kernels of decoding steps, which have one token in each row: attention to keys or latents, and routed experts.

None of them has a backward pass.
"""
