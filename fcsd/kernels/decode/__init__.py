"""Kernels of decoding steps, which have one token in each row: routed experts. They have no backward pass."""
