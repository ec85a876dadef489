"""What of a recipe and of the hardware a plan depends on."""

from dataclasses import dataclass
from typing import Literal

from fcsd.config import Parallel, Recipe
from fcsd.models.selection import select_layers

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a run.

    Attributes:
        gpus: in each node.
        memory: of one GPU, in GiB, as it is sold (an H200 has 141, of which torch sees 139.8).
        price: of one GPU for an hour, in whatever currency.
    """

    gpus: int = 8
    nodes: int = 1
    memory: float = 141.0
    price: float | None = None

    @property
    def world(self) -> int:
        """All GPUs: the processes of the run."""
        return self.gpus * self.nodes


@dataclass(frozen=True)
class Setup:
    """What of a recipe memory and speed depend on; every knob that the search may turn is a field.

    Attributes:
        teacher: where the frozen teacher's experts are, if there is one.
        terms: those of ``kl`` and ``sft`` that count.
        compared: layers whose streams are held against the teacher's.
        packed: rows hold several documents, so attention runs with a mask.
        imbalance: rows that the fullest expert-parallel rank receives over the mean. Random routers come close to 1;
            1.2 leaves room for trained ones, whose worst layers are less even. Not measured on a trained model.
        overlap_comm: DeepSpeed's option of that name: gradients are reduced during backward through two buckets.
    """

    world: int
    micro_batch_size: int
    seq_len: int
    batch_tokens: int
    tokens: int
    dtype: Literal["bf16", "fp32"] = "bf16"
    accumulate_dtype: Literal["bf16", "fp32"] = "bf16"
    zero_stage: int = 1
    recompute: bool = False
    ep_size: int = 1
    teacher: Literal["none", "replicated", "sharded"] = "none"
    terms: tuple[str, ...] = ("kl",)
    compared: int = 0
    chunk_tokens: int | None = None
    freeze_embeddings: bool = False
    freeze_lm_head: bool = False
    keep: int = 2
    packed: bool = True
    imbalance: float = 1.2
    overlap_comm: bool = False

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient as it is accumulated."""
        return 4 if "fp32" in (self.dtype, self.accumulate_dtype) else 2

    @property
    def accumulation(self) -> float:
        """Micro-batches of an optimizer step; a fraction where the batch is no multiple of what runs at once."""
        return self.batch_tokens / (self.micro_batch_size * self.seq_len * self.world)

    def possible(self, experts: int) -> bool:
        """Whether a run accepts it, for a model of so many experts a layer."""
        divides = experts % self.ep_size == 0 if experts else self.ep_size == 1
        return divides and self.world % self.ep_size == 0 and self.accumulation.is_integer()


def setup_of(recipe: Recipe, world: int, layers: int) -> Setup:
    """The setup of a recipe on so many processes, for a model of so many layers."""
    train, objective, parallel = recipe.train, recipe.objective, recipe.parallel
    weights = {"kl": objective.kl, "sft": objective.sft}
    compared = bool(objective.hidden.weight)
    return Setup(
        world=world,
        micro_batch_size=train.micro_batch_size,
        seq_len=recipe.data.seq_len,
        batch_tokens=train.batch_tokens,
        tokens=train.steps * train.batch_tokens,
        dtype=train.dtype,
        accumulate_dtype=recipe.accumulate_dtype,
        zero_stage=parallel.zero_stage,
        recompute=train.activation_checkpointing,
        ep_size=parallel.ep_size,
        teacher=_placement(parallel) if (objective.kl or compared) and objective.teacher_cache is None else "none",
        terms=tuple(name for name, weight in weights.items() if weight),
        compared=len(select_layers(objective.hidden.layers, layers)) if compared else 0,
        chunk_tokens=objective.chunk_tokens,
        freeze_embeddings=objective.freeze_embeddings,
        freeze_lm_head=objective.freeze_lm_head,
        keep=recipe.checkpoint.keep,
    )


def _placement(parallel: Parallel) -> Literal["replicated", "sharded"]:
    """Where a teacher's experts are: with the student's, unless the recipe says otherwise."""
    return "sharded" if parallel.teacher_ep_size > 1 else "replicated"
