"""`parallel`: how a run is divided among processes, and how they communicate."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fcsd.config.fields import NonNegative, Positive, Section
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format


def _known_format(value: str) -> str:
    try:
        Format.parse(value)
    except ConfigError as error:
        raise ValueError(f"{error}; {error.hint}") from error
    return value


FormatName = Annotated[str, AfterValidator(_known_format)]


class Quantised(Section):
    """The formats of the student's rows in dispatch and combine; docs/slow_links.md explains them. null
    sends bf16. The gradients of all weights are computed as if rows were not rounded (straight-through). The teacher's
    rows are not rounded, nor are those of evaluations during the run."""

    dispatch: FormatName | None = None
    """The format of the rows that are sent to the experts, for example `int8` or `int4:g32`."""
    combine: FormatName | None = None
    """The format of the experts' outputs on their way back."""
    dispatch_grad: FormatName | None = None
    """The format of the gradients of the rows of dispatch. Formats of gradients have bf16 scales."""
    combine_grad: FormatName | None = None
    """The format of the gradients of the rows of combine."""

    @property
    def any(self) -> bool:
        """Whether any direction has a format."""
        return any((self.dispatch, self.combine, self.dispatch_grad, self.combine_grad))


class Placement(Section):
    """When the student's experts change places between processes, so that the busiest process receives fewer rows;
    docs/slow_links.md explains it."""

    every: NonNegative = 0
    """Search better places every this many steps, by the experts that the tokens of the last step chose; 0 leaves every
    expert where it is."""
    swaps: Positive | None = None
    """The largest number of swaps in a layer at a time. null swaps as long as a swap saves more time until the next
    search than the move takes."""
    far_cost: Annotated[float, Field(gt=0)] = 8.0
    """With `dedup: node`: how many times as long a byte takes between nodes as inside a node."""
    work_cost: Annotated[float, Field(ge=0)] = 1.0
    """How many times as long an expert computes for a row as the row takes to arrive from a process of the same node.
    Above 0 the search also makes the work of the busiest process smaller. 0 counts rows alone, as HierMoE does."""


class Parallel(Section):
    """How a run is divided among processes, and how they communicate."""

    zero_stage: Literal[0, 1, 2] = 1
    """The DeepSpeed ZeRO stage: 0 keeps optimizer states and gradients on every process, 1 divides the optimizer
    states among the processes, 2 the gradients, too. Weights are divided by `tp_size` or `ep_size`."""
    ep_size: Positive = 1
    """The expert-parallel size: the number of processes that divide the experts of each MoE layer among them. It
    divides the number of processes and the number of experts. 1 keeps all experts on every process."""
    tp_size: Positive = 1
    """The tensor-parallel size: the number of neighbouring processes that shard the decoder layers of a dense student
    and its teacher, and compute with the same rows. It divides the number of processes, the heads, the key-value heads
    and the intermediate size. Every process has the whole embeddings and the whole output head. A run may be resumed
    with another size."""
    overlap: Literal["on", "eager-sync", "off"] = "on"
    """With `ep_size` or `tp_size` above 1: `on` runs other computation during the all-to-alls or all-reduces,
    `eager-sync` takes the same order but waits for each of them at once, and `off` runs the blocking reference. The
    results are the same."""
    all_reduce: Literal["nccl", "host"] = "nccl"
    """With `tp_size` above 1: how the all-reduces travel. `host` sends them through memory of the host, between 2 to 8
    GPUs of one host without peer access, and sums in fp32 in the order of the processes. With two processes the
    results are the same; with more they differ by rounding."""
    transport: Literal["auto", "nccl", "host"] = "auto"
    """With `ep_size` above 1: how rows travel between GPUs. `auto` copies them into symmetric memory if the GPUs of an
    expert-parallel group are in one host, and uses NCCL otherwise; `nccl` always uses NCCL. `host` sends them through
    memory of the host by copy engines, between 2 to 8 GPUs of one host without peer access. The results are the
    same."""
    quantised: Quantised = Quantised()
    """The formats of the rows that processes exchange. By default all rows are bf16. With `ep_size: 1` nothing is sent,
    but rows are rounded in the same way, so the effect on training can be studied on one GPU."""
    fused: bool = True
    """On GPUs: compute each norm in one kernel, rotate queries and keys by one, and move rows to and from experts by
    one kernel in each direction. With `ep_size: 1` the product inside each gated MLP and each routed expert is one
    kernel, too. This is faster and takes less memory, and results differ from the unfused ones by rounding."""
    dedup: Literal["off", "rank", "node"] = "off"
    """With `ep_size` above 1: how often the row of a token is sent if several of its experts are in one place. `off`
    sends it once for each expert, `rank` once to each process that holds any of them, and `node` once to each node,
    where one process forwards it to the others. Results differ from those of `off` by rounding. A model whose tokens
    choose one expert always uses `off`."""
    node_size: Positive | None = None
    """With `dedup: node`: the number of neighbouring processes that form a node. It divides `ep_size` and is smaller
    than it."""
    placement: Placement = Placement()
    """Moves experts between processes during the run. Losses and weights stay the same, up to rounding."""
    teacher_placement: Literal["auto", "sharded", "replicated"] = "auto"
    """Where the teacher's experts are: `sharded` divides them among `ep_size` processes, `replicated` keeps all of them
    on every process. `auto` means `sharded` if `ep_size` is above 1."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.teacher_placement == "sharded" and self.ep_size == 1:
            raise ValueError("parallel.teacher_placement sharded needs parallel.ep_size above 1")
        if self.placement.every and self.ep_size == 1:
            raise ValueError("parallel.placement.every needs parallel.ep_size above 1: one process has all experts")
        if self.all_reduce == "host" and self.tp_size == 1:
            raise ValueError("parallel.all_reduce host needs parallel.tp_size above 1: nothing else is summed so")
        if self.transport == "host" and self.ep_size == 1:
            raise ValueError("parallel.transport host needs parallel.ep_size above 1: otherwise no rows are sent")
        if self.transport == "host" and self.overlap == "off":
            raise ValueError("parallel.transport host needs parallel.overlap on or eager-sync: off sends by NCCL")
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
