"""Shares the batches of an evaluation among ranks: each rank computes some of them, and all ranks get all answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from fcsd.errors import NonFiniteError
from fcsd.launch.world import World

Batch = list[int]
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """The ranks that share an evaluation, and how they work together.

    The batches are formed before they are shared, so the answers do not depend on the number of ranks.

    Attributes:
        world: the ranks; None for this process alone.
        lockstep: whether the model itself is divided over the ranks (expert parallelism, ZeRO-3). Every rank must then
            run the model equally often.
        together_on_all: whether every layer is divided over the ranks (tensor parallelism). Every rank must then run
            the model on the same inputs, so each of them does all the work and gets all the answers itself.
    """

    world: World | None = None
    lockstep: bool = False
    together_on_all: bool = False

    @property
    def leads(self) -> bool:
        """Whether this is the rank that prints and writes: rank 0."""
        return self.world is None or self.world.rank == 0

    def share(self, batches: Iterable[Batch]) -> list[Batch]:
        """The batches of this rank. In lockstep every rank gets equally many: the last batch of all is repeated."""
        whole = list(batches)
        if self.world is None or self.together_on_all:
            return whole
        if self.lockstep:
            whole += whole[-1:] * (-len(whole) % self.world.size)
        return whole[self.world.rank :: self.world.size]

    def together(self, work: Callable[[], dict[int, T]]) -> dict[int, T]:
        """The answers of all ranks, by index; an error on one rank is raised on all."""
        if self.world is None or self.together_on_all:
            return work()
        return {index: answer for part in self.world.everywhere(work) for index, answer in part.items()}

    @property
    def shares(self) -> int:
        """Among how many ranks the requests are divided."""
        return 1 if self.world is None or self.lockstep or self.together_on_all else self.world.size

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of ``work``, which rank 0 does for all ranks."""
        return work() if self.world is None else self.world.on_first(work)

    def any(self, flag: bool) -> bool:
        """In lockstep, whether ``flag`` is true on any rank; otherwise ``flag``."""
        return bool(self.most(int(flag)))

    def most(self, number: int) -> int:
        """In lockstep, the largest ``number`` of all ranks; otherwise ``number``."""
        if self.world is None or not self.lockstep:
            return number
        import torch
        import torch.distributed as dist

        device = self.world.device if dist.get_backend(self.world.group) == "nccl" else "cpu"
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.world.group)
        return int(numbers)

    def require_finite(self, finite: bool) -> None:
        """Refuse a model whose logits are not finite.

        Args:
            finite: whether all logits on this rank are finite.

        Raises:
            NonFiniteError: a logit was NaN or infinite on this rank, or in lockstep on any rank.
        """
        if self.any(not finite):
            raise NonFiniteError("the model's logits are NaN or infinite", "nothing is reported for such a model")


ALONE = Team()
