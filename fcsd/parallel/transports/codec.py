"""Defines the interface of a codec, which packs each row into a record of bytes for the wire, and unpacks it."""

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """Encodes rows as records and decodes them, on the current stream.

    ``Exchange`` sends the records through any transport, which copies them unchanged. A codec may move rows as well: it
    may make several records of a row, and it may decode another number of rows than there are records. The codec of the
    gradients then moves them back.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """``[rows, width]`` of a floating dtype -> a new ``uint8 [rows, bytes of a record]``."""
        ...

    def decode(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """``uint8 [rows, bytes of a record]`` -> a new ``[rows, width]`` of ``dtype``."""
        ...
