"""Defines the interface of a MoE block whose routed experts are divided over ranks.

A library that divides experts has an adapter that implements ``ExpertBlock`` and finds the blocks of a model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from fcsd.models.wiring import Blocks
from fcsd.parallel.expert.placement import Placement


class Routing(NamedTuple):
    """The router's choice for the tokens of one rank. Experts have the numbers that the router and the files use."""

    scores: Tensor  # [tokens, top_k]
    experts: Tensor  # [tokens, top_k]
    counts: Tensor  # [experts], how many (token, k) pairs chose each expert


class Origin(NamedTuple):
    """A tensor of transformers' MoE block, and the tensors of a divided block that hold its values.

    Attributes:
        name: the name of the tensor inside transformers' block.
        parts: the names of tensors inside the divided block. Concatenated along the first dimension they are the
            original tensor, or one expert's row of it.
        of_experts: whether the first dimension is that of experts, of which each rank holds its own.
    """

    name: str
    parts: tuple[str, ...]
    of_experts: bool = False


class ExpertOrder(NamedTuple):
    """The rows that a rank has received, in the order in which its experts compute them.

    Attributes:
        source: int64 ``[rows]``, for each row in this order its number among those received, or -1 for a row of zeros
            that fills up the rows of an expert.
        counts: the number of rows of each expert in this order, those of zeros included, as the block needs it.
        received: how many rows this rank has received.
    """

    source: Tensor
    counts: Tensor
    received: int


class ExpertBlock(Protocol):
    """A MoE block as one rank of an expert-parallel group sees it."""

    @property
    def router(self) -> nn.Module:
        """The module that chooses experts: ``[tokens, hidden]`` -> scores, experts and counts as in ``Routing``."""
        ...

    @property
    def experts(self) -> nn.Module:
        """The module that holds the parameters of this rank's experts."""
        ...

    @property
    def shared(self) -> Callable[[Tensor], Tensor] | None:
        """The shared experts, ``[batch, seq, hidden] -> [batch, seq, hidden]``; None if the block has none."""
        ...

    @property
    def placement(self) -> Placement:
        """Which rank of ``group`` holds each routed expert."""
        ...

    @property
    def group(self) -> Any:
        """The process group of the ranks that share the routed experts."""
        ...

    @property
    def rank(self) -> int:
        """This process's rank in ``group``."""
        ...

    @property
    def top_k(self) -> int:
        """How many experts each token chooses."""
        ...

    @property
    def prescaled(self) -> bool:
        """Whether the scores multiply the experts' inputs (Llama-4) instead of their outputs."""
        ...

    def route(self, tokens: Tensor) -> Routing:
        """Let the router choose experts for ``tokens [tokens, hidden]``, and count its choices in the block."""
        ...

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Run this rank's experts on the rows that they received: ``[rows, hidden] -> [rows, hidden]``, in order.

        Args:
            rows: the rows, ordered by the rank that sent them, then by the slot of their expert. The caller keeps no
                reference to them, so that their memory is free while the experts run.
            counts: ``[ranks, slots]``, the number of rows from each rank for each slot. ``[1, slots]`` says that the
                rows are ordered by slot, wherever they come from.
        """
        ...

    def place(self, placement: Placement) -> None:
        """Say that the experts are where ``placement`` says. The caller moves the weights."""
        ...

    def order(self, counts: Tensor, received: int) -> ExpertOrder:
        """The order in which this rank's experts compute the rows that they received.

        Args:
            counts: ``[ranks, slots]`` as in ``run``.
            received: the number of rows, the sum of ``counts``. The host knows it.
        """
        ...

    def run_ordered(self, rows: Tensor, order: ExpertOrder) -> Tensor:
        """Run this rank's experts on rows ``[rows, hidden]`` that are in the order of ``order``, as is the result.

        The outputs of rows of zeros mean nothing.
        """
        ...

    def origin(self, name: str, blocks: Blocks) -> Origin | None:
        """The tensor of transformers' block whose first part is the tensor ``name`` of this block.

        Args:
            blocks: the names of the architecture's modules in transformers.

        Returns: None if ``name`` is a later part of an original tensor.
        """
        ...
