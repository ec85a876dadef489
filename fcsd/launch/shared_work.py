"""The ranks that share an evaluation: each computes some of the batches, then all know all answers."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from fcsd.errors import NonFiniteError
from fcsd.launch.world import World

Batch = list[int]
T = TypeVar("T")


@dataclass(frozen=True)
class Team:
    """Ranks and how they work together.

    Batches are formed before they are shared out, so that answers do not depend on the number of ranks.

    Attributes:
        world: the ranks; None for this process alone.
        lockstep: the model is itself spread over the ranks (expert parallelism, ZeRO-3), so that every rank must
            run each of its parts equally often.
    """

    world: World | None = None
    lockstep: bool = False

    @property
    def leads(self) -> bool:
        """Whether this is the rank that talks."""
        return self.world is None or self.world.rank == 0

    def share(self, batches: Iterable[Batch]) -> list[Batch]:
        """This rank's batches; in lockstep as many as every other's, the last of all being repeated."""
        whole = list(batches)
        if self.world is None:
            return whole
        if self.lockstep:
            whole += whole[-1:] * (-len(whole) % self.world.size)
        return whole[self.world.rank :: self.world.size]

    def together(self, work: Callable[[], dict[int, T]]) -> dict[int, T]:
        """The answers of all ranks; an error of one is raised on all."""
        if self.world is None:
            return work()
        return {index: answer for part in self.world.everywhere(work) for index, answer in part.items()}

    def on_first(self, work: Callable[[], T]) -> T:
        """The result of work that one rank does for all."""
        return work() if self.world is None else self.world.on_first(work)

    def any(self, flag: bool) -> bool:
        """In lockstep, whether the flag is up on any rank; else whether it is up here."""
        return bool(self.most(int(flag)))

    def most(self, number: int) -> int:
        """In lockstep, the largest of the ranks' numbers; else the number."""
        if self.world is None or not self.lockstep:
            return number
        import torch
        import torch.distributed as dist

        device = self.world.device if dist.get_backend(self.world.group) == "nccl" else "cpu"
        numbers = torch.tensor([number], device=device)
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self.world.group)
        return int(numbers)

    def require_finite(self, finite: bool) -> None:
        """A model that overflows must never be given a score.

        Raises:
            NonFiniteError: some logit was NaN or infinite, in lockstep on any rank.
        """
        if self.any(not finite):
            raise NonFiniteError("the model's logits are NaN or infinite", "no score is reported for such a model")


ALONE = Team()
