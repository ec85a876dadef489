"""Counts the bytes and rows that dispatch and combine send to other ranks."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fcsd.parallel.transports.transport import Splits


@dataclass
class Traffic:
    """What this rank has sent and received since ``reset``. It is computed on the host from the splits of exchanges.

    Attributes:
        sent: bytes that this rank has sent to other ranks.
        fullest: the largest number of rows that this rank has received in one dispatch, its own rows included.
    """

    sent: int = 0
    fullest: int = 0

    def reset(self) -> None:
        """Begin to count at zero."""
        self.sent = self.fullest = 0

    def add(self, rows: Tensor, splits: Splits, group: Any, *, dispatch: bool) -> None:
        """Count one exchange.

        Args:
            rows: what this rank sends, ``[sent, width]``.
            group: the process group of the ranks that exchange rows.
            dispatch: whether the rows are those of dispatch in the forward direction.
        """
        away = len(rows) - splits.sends[dist.get_rank(group)]
        self.sent += away * rows.shape[1] * rows.element_size()
        if dispatch:
            self.fullest = max(self.fullest, sum(splits.receives))
