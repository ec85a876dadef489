"""Dequantises fp8 weights by the block size in the config, where transformers divides a matrix evenly by its scales.

transformers takes the size of a block from the number of scales. If the block does not divide a dimension, the last
block is smaller, and transformers then either shifts all blocks without a word or refuses the matrix: 200 rows in
blocks of 128 would be read as 100 + 100, and 576 rows (``kv_a_proj_with_mqa`` of DeepSeek-V3) not at all.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def dequantise(values: Tensor, scales: Tensor, block: Sequence[int]) -> Tensor:
    """The values of a matrix in fp32.

    Args:
        values: ``[..., rows, columns]``, float8_e4m3fn.
        scales: ``[..., ceil(rows / block[0]), ceil(columns / block[1])]``, one for each block.
        block: the rows and columns of a block; the last blocks of a dimension may be smaller.

    Raises:
        ValueError: the matrix has another number of blocks than of scales.
    """
    rows, columns = values.shape[-2:]
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape[-2:]) != grid:
        raise ValueError(f"{rows} x {columns} values in blocks of {list(block)} have {list(scales.shape)} scales")
    whole = values.float()
    of_columns = scales.float().repeat_interleave(block[1], -1)[..., :columns]
    for number in range(grid[0]):  # row by row of blocks, so that no second matrix of this size is made
        whole[..., number * block[0] : (number + 1) * block[0], :] *= of_columns[..., number : number + 1, :]
    return whole


@contextmanager
def blocks_of_config() -> Iterator[None]:
    """A context in which transformers dequantises fp8 weights while it loads them as :func:`dequantise` does."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    original = Fp8Dequantize._dequantize_one

    def by_block(self: Any, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None) -> Tensor:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if block is None or quantized.dtype != torch.float8_e4m3fn or scales.dtype not in _FLOATS:
            return original(self, quantized, scales, output_dtype=output_dtype)
        return dequantise(quantized, scales, block).to(output_dtype or scales.dtype)

    Fp8Dequantize._dequantize_one = by_block
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = original


_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
