"""The device of tests of kernels: they are compiled on a GPU and run in Triton's interpreter elsewhere."""

import os

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") else "cuda"
