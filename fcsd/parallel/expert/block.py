"""What the rest of fcsd knows of a MoE block whose routed experts are divided over ranks.

A library that divides experts is an adapter behind ``ExpertBlock``: ``autoep.py`` is the one for DeepSpeed.
``lookup.py`` finds the block of a module.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from fcsd.models.wiring import Blocks
from fcsd.parallel.expert.placement import Placement


class Routing(NamedTuple):
    """The router's choice for a rank's tokens; experts go by their canonical numbers."""

    scores: Tensor  # [tokens, top_k]
    experts: Tensor  # [tokens, top_k]
    counts: Tensor  # [experts], how many (token, k) pairs chose each expert


class Origin(NamedTuple):
    """A tensor of transformers' MoE block, and the tensors of a divided block that hold its values.

    Attributes:
        name: its name inside transformers' block.
        parts: names inside the divided block. The parts lie one below the other in the original tensor, or in each
            expert's row of it.
        of_experts: whether the first dimension counts experts, of which each rank has its own.
    """

    name: str
    parts: tuple[str, ...]
    of_experts: bool = False


class ExpertBlock(Protocol):
    """A MoE block as one rank of an expert-parallel group sees it."""

    @property
    def router(self) -> nn.Module:
        """The module that chooses: ``[tokens, hidden]`` -> scores, experts and counts as in ``Routing``."""
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
        """Let the router choose experts for ``tokens [tokens, hidden]``, and count the choice."""
        ...

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        """This rank's experts on the rows they received: ``[rows, hidden] -> [rows, hidden]`` in the same order.

        Args:
            rows: ordered by the rank they came from, then by the slot of their expert. The caller keeps no reference,
                so that the memory is free while the experts run.
            counts: ``[ranks, slots]``, how many rows came from each rank for each slot.
        """
        ...

    def origin(self, name: str, blocks: Blocks) -> Origin | None:
        """The tensor of transformers' block that the tensor ``name`` of this block is the first part of.

        Args:
            blocks: transformers' names in this architecture.

        Returns: None if ``name`` is a later part of an original tensor.
        """
        ...
