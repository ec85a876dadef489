"""What of a recipe and of the hardware a plan depends on."""

from dataclasses import dataclass
from typing import Literal

import torch

from fcsd.config import HELD_OUT, NO_METRIC, Parallel, Recipe
from fcsd.models.selection import select_layers

GIB = 2**30
HELD_OUT_ROWS = 512  # of a held-out text whose recipe names no max_rows; assumed
USABLE = 0.99  # of the memory as it is sold: the driver's share of an H200 is 1.2 GiB


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a run.

    Attributes:
        gpus: in each node.
        memory: of one GPU, in GiB, as it is sold (an H200 has 141, of which torch sees 139.8).
        price: of one GPU for an hour, in whatever currency.
        source: a sentence that says where these figures are from, if the user did not give them.
    """

    gpus: int = 8
    nodes: int = 1
    memory: float = 141.0
    price: float | None = None
    source: str = ""

    @property
    def world(self) -> int:
        """All GPUs: the processes of the run."""
        return self.gpus * self.nodes


def present(world: int) -> Hardware:
    """The GPUs of this machine, ``world`` of them whether or not it has as many; H200s are assumed if it has none."""
    if not torch.cuda.is_available():
        return Hardware(world, source="no GPU is present here, so the plan assumes H200s of 141 GiB")
    properties = torch.cuda.get_device_properties(0)
    seen = properties.total_memory / GIB
    source = f"{properties.name} with {seen:.1f} GiB, as present here; hours assume the arithmetic of an H200"
    return Hardware(world, memory=seen / USABLE, source=source)


@dataclass(frozen=True)
class Setup:
    """What of a recipe memory and speed depend on; every knob that the search may turn is a field.

    Attributes:
        teacher: where the frozen teacher's experts are, if there is one.
        terms: those of ``kl`` and ``sft`` that count.
        compared: layers whose streams are held against the teacher's.
        masked: attention runs with a mask, because rows hold several documents and packed attention is off.
        document: mean number of tokens of a document in a row; None takes a row for one document.
        fused: with experts over several ranks, each norm is one kernel.
        imbalance: rows that the fullest expert-parallel rank receives over the mean. Random routers come close to 1;
            1.2 leaves room for trained ones, whose worst layers are less even. Not measured on a trained model.
        overlap_comm: DeepSpeed's option of that name: gradients are reduced during backward through two buckets.
        keep: newest checkpoints that stay; ``best`` adds the one with the best early-stopping score.
        saves, saves_per_hour: checkpoints that are written, by steps and by time.
        evaluations: measurements of the held-out loss, on ``held_out`` rows each.
        benchmarks: scores by a benchmark for early stopping.
        cached: token ids that the teacher cache stores for each position; 0 without a cache.
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
    masked: bool = False
    imbalance: float = 1.2
    overlap_comm: bool = False
    document: int | None = None
    fused: bool = True
    best: bool = False
    saves: int = 0
    saves_per_hour: float = 0.0
    evaluations: int = 0
    held_out: int = 0
    benchmarks: int = 0
    cached: int = 0

    @property
    def steps(self) -> float:
        """Optimizer steps of the run."""
        return self.tokens / self.batch_tokens

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


def setup_of(recipe: Recipe, world: int, layers: int, plain: bool = True) -> Setup:
    """The setup of a recipe on so many processes.

    Args:
        layers: decoder layers of the model.
        plain: all of them attend to everything before a token, which packed attention requires.
    """
    train, objective, parallel = recipe.train, recipe.objective, recipe.parallel
    stop, save, cache = recipe.early_stop, recipe.checkpoint, recipe.objective.teacher_cache
    weights = {"kl": objective.kl, "sft": objective.sft}
    compared = bool(objective.hidden.weight)
    scores = 0 if stop.metric == NO_METRIC else train.steps // stop.every
    held_out = recipe.data.held_out
    evaluations = train.steps // train.eval_every + 1 if train.eval_every else 1
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
        teacher=_placement(parallel) if (objective.kl or compared) and cache is None else "none",
        terms=tuple(name for name, weight in weights.items() if weight),
        compared=len(select_layers(objective.hidden.layers, layers)) if compared else 0,
        chunk_tokens=objective.chunk_tokens,
        freeze_embeddings=objective.freeze_embeddings,
        freeze_lm_head=objective.freeze_lm_head,
        keep=save.keep,
        masked=not (train.attention == "packed" and train.dtype == "bf16" and plain),
        fused=parallel.fused,
        best=stop.metric != NO_METRIC,
        saves=1 + (train.steps // save.every_steps if save.every_steps else 0),
        saves_per_hour=60 / save.every_minutes if save.every_minutes else 0.0,
        evaluations=(evaluations + (scores if stop.metric == HELD_OUT else 0)) if held_out else 0,
        held_out=(held_out.max_rows or HELD_OUT_ROWS) if held_out else 0,
        benchmarks=scores if stop.benchmark else 0,
        cached=cache.top_k if cache else 0,
    )


def _placement(parallel: Parallel) -> Literal["replicated", "sharded"]:
    """Where a teacher's experts are: with the student's, unless the recipe says otherwise."""
    return "sharded" if parallel.teacher_ep_size > 1 else "replicated"
