"""The dtypes that a recipe names, as torch's."""

import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
