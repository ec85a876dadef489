"""`parallel`: how a run is divided among processes, and how they communicate."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, model_validator

from fcsd.config.fields import Positive, Section


def _no_stage_3(value: object) -> object:
    if value == 3:
        raise ValueError(
            "ZeRO-3 is not supported: it shards the output head, which the loss reads outside of its module, and it "
            "releases parameters that the reordered backward pass of overlapped experts still needs; raise "
            "parallel.ep_size instead, which divides most of the weights"
        )
    return value


class Parallel(Section):
    """How a run is divided among processes, and how they communicate."""

    zero_stage: Annotated[Literal[0, 1, 2], BeforeValidator(_no_stage_3)] = 1
    """The DeepSpeed ZeRO stage: 0 keeps optimizer states and gradients on every process, 1 divides the optimizer
    states among the processes, 2 the gradients, too."""
    ep_size: Positive = 1
    """The expert-parallel size: the number of processes that divide the experts of each MoE layer among them. It
    divides the number of processes and the number of experts. 1 keeps all experts on every process."""
    overlap: Literal["on", "eager-sync", "off"] = "on"
    """With `ep_size` above 1: `on` runs other computation during the all-to-alls, `eager-sync` takes the same order but
    waits for each all-to-all at once, and `off` runs the blocking reference. The results are the same."""
    transport: Literal["auto", "nccl"] = "auto"
    """With `ep_size` above 1: how rows travel between GPUs. `auto` copies them into symmetric memory if the GPUs of an
    expert-parallel group are in one host, and uses NCCL otherwise; `nccl` always uses NCCL."""
    fused: bool = True
    """With `ep_size` above 1, on GPUs: compute each norm and each permutation of rows in one kernel. This is faster,
    and results differ from the unfused ones by rounding."""
    dedup: Literal["off", "rank", "node"] = "off"
    """With `ep_size` above 1: how often the row of a token is sent if several of its experts are in one place. `off`
    sends it once for each expert, `rank` once to each process that holds any of them, and `node` once to each node,
    where one process forwards it to the others. Results differ from those of `off` by rounding. A model whose tokens
    choose one expert always uses `off`."""
    node_size: Positive | None = None
    """With `dedup: node`: the number of neighbouring processes that form a node. It divides `ep_size` and is smaller
    than it."""
    teacher_placement: Literal["auto", "sharded", "replicated"] = "auto"
    """Where the teacher's experts are: `sharded` divides them among `ep_size` processes, `replicated` keeps all of them
    on every process. `auto` means `sharded` if `ep_size` is above 1."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.teacher_placement == "sharded" and self.ep_size == 1:
            raise ValueError("parallel.teacher_placement sharded needs parallel.ep_size above 1")
        if self.dedup != "off" and self.ep_size == 1:
            raise ValueError(f"parallel.dedup {self.dedup} needs parallel.ep_size above 1")
        if self.dedup == "node" and self.node_size is None:
            raise ValueError("parallel.dedup node needs parallel.node_size, the number of processes of a node")
        if self.node_size is not None and (self.ep_size % self.node_size or not 1 < self.node_size < self.ep_size):
            raise ValueError(
                f"parallel.node_size {self.node_size} must be above 1, below parallel.ep_size {self.ep_size}, and "
                "divide it; if all processes are on one node, set parallel.dedup: rank"
            )
        return self

    @property
    def teacher_ep_size(self) -> int:
        """The number of processes that divide the teacher's experts."""
        return 1 if self.teacher_placement == "replicated" else self.ep_size
