"""The settings of a recipe and the properties of the hardware that a plan depends on."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fcsd.config import NO_METRIC, TERMS, Parallel, Recipe, exclusions
from fcsd.config.recipe import pauses
from fcsd.errors import ConfigError
from fcsd.models.adapters.nf4 import BYTES
from fcsd.models.adapters.targets import Chosen
from fcsd.models.selection import select_layers

GIB = 2**30
HELD_OUT_ROWS = 512  # rows that are assumed for a held-out text if the recipe has no max_rows
MOST_MEMORY = 1e6  # GiB of one GPU, above which a figure is a mistake
MOST_PRICE = 1e12  # of one GPU for an hour, in the smallest currency
USABLE = 0.99  # usable share of a GPU's nominal memory; on an H200 the driver takes 1.2 GiB


@dataclass(frozen=True)
class Hardware:
    """The GPUs of a run.

    Attributes:
        gpus: GPUs in each node.
        nodes: nodes of the run.
        memory: nominal memory of one GPU in GiB (an H200 has 141, of which torch sees 139.8).
        price: price of one GPU for an hour, in any currency.
        source: a sentence that says where these figures come from; empty if the caller gave them.

    Raises:
        ConfigError: the memory or the price is no plausible number, such as infinity.
    """

    gpus: int = 8
    nodes: int = 1
    memory: float = 141.0
    price: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.memory <= MOST_MEMORY:
            raise ConfigError(f"no GPU has {self.memory:g} GiB of memory", hint="--gpu-mem takes a number such as 141")
        if self.price is not None and not 0 <= self.price <= MOST_PRICE:
            raise ConfigError(f"no GPU costs {self.price:g} per hour", hint="--price takes a number such as 2.5")

    @property
    def world(self) -> int:
        """GPUs of all nodes, which is the number of processes of the run."""
        return self.gpus * self.nodes


def present(gpus: int, nodes: int = 1, price: float | None = None) -> Hardware:
    """Hardware of ``gpus`` GPUs in each node, of the type that this machine has; H200s are assumed if it has none.

    The machine itself may have fewer GPUs.
    """
    if not torch.cuda.is_available():
        source = "no GPU is present here, so the plan assumes H200s of 141 GiB; fcsd plan --gpu-mem plans for others"
        return Hardware(gpus, nodes, price=price, source=source)
    properties = torch.cuda.get_device_properties(0)
    seen = properties.total_memory / GIB
    source = f"{properties.name} with {seen:.1f} GiB, as present here; hours assume the arithmetic of an H200"
    return Hardware(gpus, nodes, memory=seen / USABLE, price=price, source=source)


@dataclass(frozen=True)
class Rounded:
    """The frozen weights that are in memory as NF4, which every process holds whole.

    Attributes:
        values: their number.
        largest: values of the largest weight, which a pass decodes.
        outputs: the most outputs of one of their layers.
    """

    values: int
    largest: int
    outputs: int


@dataclass(frozen=True)
class Parts:
    """What trains beside frozen weights.

    Attributes:
        rank: the rank of each adapter; 0 without adapters.
        chosen: the names of all that trains.
        words: the parts of the model itself that train, as in ``optim.train``.
        in_adapters: parameters of all adapters.
        own: parameters of the parts of the model itself.
        routed: those of them that are in routed experts.
        outside: those of them that are outside of the decoder layers.
        largest: parameters of the largest tensor that trains.
        frozen: the first decoder layers, in which and before which nothing trains.
        shared: those of them that student and teacher compute once; see ``shared_prefix``.
        rounded: the frozen weights that are in memory as NF4; None if all are in the run's dtype.
        drafts: whether the parts are a draft head beside the model, of which nothing trains.
    """

    rank: int
    chosen: Chosen
    words: tuple[str, ...]
    in_adapters: int
    own: int
    routed: int
    outside: int
    largest: int
    frozen: int
    shared: int
    rounded: Rounded | None = None
    drafts: bool = False

    @property
    def trained(self) -> int:
        """Everything that trains."""
        return self.in_adapters + self.own

    def of_rank(self, degree: int) -> "Parts":
        """What one of ``degree`` tensor-parallel ranks has of the parts: a part of what is in layers, and the rest."""
        own = (self.own - self.outside) // degree + self.outside
        return replace(self, own=own, largest=self.largest if self.outside else self.largest // degree)


@dataclass(frozen=True)
class Setup:
    """The settings of a recipe that memory and speed depend on; every setting that the search may change is a field.

    Attributes:
        world: processes of the run, one for each GPU.
        micro_batch_size: rows of ``seq_len`` tokens in a forward pass of one process.
        batch_tokens: tokens of an optimizer step, over all processes.
        tokens: tokens of the whole run.
        teacher: whether each rank holds all of the frozen teacher's experts (``replicated``) or they are spread over
            the expert-parallel ranks (``sharded``); ``none`` if no teacher runs beside the student.
        terms: the terms of the loss that compute logits.
        compared: number of layers whose streams the loss compares with the teacher's.
        keep: newest checkpoints that are kept.
        masked: whether attention runs with a mask, because rows hold several documents and packed attention is off.
        imbalance: rows that the fullest expert-parallel rank receives, divided by the mean. Random routers come close
            to 1. The value 1.2 leaves room for trained routers, whose worst layers are less even. It has not been
            measured on a trained model.
        offload: what is on the host: nothing, or all states of AdamW, so that it runs there.
        moments: what AdamW's two moments are kept in.
        overlap_comm: DeepSpeed's option of that name, which reduces gradients during backward through two buckets.
        document: mean number of tokens of a document in a row; with None, a row counts as one document.
        tp_size: processes that shard the decoder layers of a model; they compute with the same rows.
        fused: whether each norm and each rotation is one kernel and, if no experts are divided, also the product inside
            each gated MLP and each move of rows to and from routed experts.
        alone: whether one process may update its weights with ``OneProcessAdamW`` instead of ZeRO; see ``zero``.
        best: whether the checkpoint with the best early-stopping score is kept as well.
        saves: checkpoints that are written after a fixed number of steps, and the last one.
        saves_per_hour: checkpoints that are written per hour because a fixed time has passed.
        saves_beside: whether checkpoints are written while the run goes on (``checkpoint.overlap``).
        evaluations: measurements of the held-out loss, on ``held_out`` rows each; every score is one, too.
        benchmarks: how often a benchmark computes a score for early stopping.
        parts: what trains beside frozen weights, which are the teacher's, too; None if all weights train.
    """

    world: int
    micro_batch_size: int
    seq_len: int
    batch_tokens: int
    tokens: int
    dtype: Literal["bf16", "fp32"] = "bf16"
    accumulate_dtype: Literal["bf16", "fp32"] = "bf16"
    zero_stage: int = 1
    offload: Literal["none", "host"] = "none"
    moments: Literal["fp32", "8bit"] = "fp32"
    recompute: bool = False
    ep_size: int = 1
    tp_size: int = 1
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
    alone: bool = True
    best: bool = False
    saves: int = 0
    saves_per_hour: float = 0.0
    saves_beside: bool = False
    evaluations: int = 0
    held_out: int = 0
    benchmarks: int = 0
    parts: Parts | None = None

    @property
    def steps(self) -> float:
        """Optimizer steps of the run."""
        return self.tokens / self.batch_tokens

    @property
    def width(self) -> int:
        """Bytes of a weight or an activation."""
        return 2 if self.dtype == "bf16" else 4

    @property
    def spared(self) -> int:
        """Bytes of weights that a GPU does not hold because they are in NF4."""
        rounded = None if self.parts is None else self.parts.rounded
        return 0 if rounded is None else int((self.width - BYTES) * rounded.values)

    @property
    def gradient_width(self) -> int:
        """Bytes of a gradient in the dtype in which it is accumulated."""
        return 4 if "fp32" in (self.dtype, self.accumulate_dtype) else 2

    @property
    def zero(self) -> int:
        """The stage of ZeRO that runs; 0 on one process whose weights ``OneProcessAdamW`` updates."""
        plain = (self.dtype, self.offload, self.moments) == ("bf16", "none", "fp32")
        return 0 if self.alone and self.world == 1 and plain else self.zero_stage

    @property
    def copies(self) -> int:
        """The processes, or groups of processes that shard a model, which divide the rows."""
        return self.world // self.tp_size

    @property
    def accumulation(self) -> float:
        """Micro-batches of an optimizer step; a fraction if the processes cannot split the batch into whole ones."""
        return self.batch_tokens / (self.micro_batch_size * self.seq_len * self.copies)

    def possible(self, experts: int) -> bool:
        """Whether a run accepts this setup for a model with ``experts`` routed experts in a layer (0 if dense)."""
        settings = {
            exclusions.SHARDED: self.tp_size > 1,
            exclusions.EXPERTS: self.ep_size > 1,
            exclusions.ON_HOST: self.offload == "host",
            exclusions.UNDIVIDED: self.zero_stage == 0,
            exclusions.ROUNDED_MOMENTS: self.moments == "8bit",
            exclusions.FROZEN: self.parts is not None,
            exclusions.OWN_PARTS: self.parts is not None and self.parts.own > 0 and not self.parts.drafts,
            exclusions.DRAFTS: self.parts is not None and self.parts.drafts,
            exclusions.ADAPTERS: self.parts is not None and self.parts.in_adapters > 0,
            exclusions.NF4: self.parts is not None and self.parts.rounded is not None,
        }
        if exclusions.conflict({name for name, is_set in settings.items() if is_set}):
            return False
        if experts and self.tp_size > 1:
            return False
        divides = experts % self.ep_size == 0 if experts else self.ep_size == 1
        return divides and self.world % (self.ep_size * self.tp_size) == 0 and self.accumulation.is_integer()


def with_parts(setup: Setup, parts: Parts) -> Setup:
    """The setup of a run that trains these parts: what is not named is frozen."""
    frozen = {"freeze_embeddings": "embeddings" not in parts.words, "freeze_lm_head": "head" not in parts.words}
    return replace(setup, parts=parts, **frozen)


def setup_of(recipe: Recipe, world: int, layers: int, plain: bool = True) -> Setup:
    """The setup of a recipe on ``world`` processes, without what trains beside frozen weights; see ``setup_for``.

    Args:
        plain: whether in all of them a token attends to all tokens before it, which packed attention requires.
    """
    train, objective, parallel = recipe.train, recipe.objective, recipe.parallel
    stop, save = recipe.early_stop, recipe.checkpoint
    scored = 0 if stop.metric == NO_METRIC else stop.every
    held_out = sum(text.max_rows or HELD_OUT_ROWS for text in recipe.data.measured.values())
    return Setup(
        world=world,
        micro_batch_size=train.micro_batch_size,
        seq_len=recipe.data.seq_len,
        batch_tokens=train.batch_tokens,
        tokens=train.steps * train.batch_tokens,
        dtype=train.dtype,
        accumulate_dtype=recipe.accumulate_dtype,
        zero_stage=parallel.zero_stage,
        offload=recipe.optim.offload,
        moments=recipe.optim.moments,
        recompute=train.activation_checkpointing,
        ep_size=parallel.ep_size,
        tp_size=parallel.tp_size,
        teacher=_placement(parallel) if recipe.needs_original else "none",
        terms=tuple(name for name in objective.weights if TERMS[name].models),
        compared=len(select_layers(objective.hidden.layers, layers)) if objective.hidden.weight else 0,
        chunk_tokens=objective.chunk_tokens,
        freeze_embeddings=objective.freeze_embeddings,
        freeze_lm_head=objective.freeze_lm_head,
        keep=save.keep,
        masked=not (train.attention == "packed" and train.dtype == "bf16" and plain),
        fused=parallel.fused,
        alone=not parallel.quantised.any,
        best=stop.metric != NO_METRIC,
        saves=pauses(0, train.steps, save.every_steps),
        saves_per_hour=60 / save.every_minutes if save.every_minutes else 0.0,
        saves_beside=save.overlap,
        evaluations=pauses(0, train.steps, train.eval_every, scored) if held_out else 0,
        held_out=held_out,
        benchmarks=train.steps // stop.every if stop.benchmark else 0,
    )


def _placement(parallel: Parallel) -> Literal["replicated", "sharded"]:
    """Where the teacher's experts are: sharded as the student's are, unless the recipe asks for replicated ones."""
    return "sharded" if parallel.teacher_ep_size > 1 else "replicated"


def uncounted(recipe: Recipe, hardware: Hardware, ranks: int = 1) -> list[str]:
    """A text for each setting that changes time, memory or disk in a way that the plan does not know.

    Settings whose effect the plan knows are fields of ``Setup``. docs/planning.md lists both kinds.

    Args:
        ranks: those of a Desync wiring.
    """
    train, parallel, divided = recipe.train, recipe.parallel, recipe.parallel.ep_size > 1
    found = {
        "train.compile: compiled layers start fewer kernels, and compiling takes minutes": train.compile,
        "train.adapter: the small kernels of the adapters, which the host starts": train.adapter is not None,
        "train.trace_every: steps that are profiled": train.trace_every > 0,
        "optim.moments: time that rounding the moments takes or saves": recipe.optim.moments != "fp32",
        "init.wiring: all-to-alls that the standard wiring exposes": divided and recipe.init.wiring == "standard",
        f"desync: each GPU computes {ranks} ranks of converted layers, in up to {ranks} times the time and memory": (
            ranks > parallel.tp_size
        ),
        "deterministic: slower kernels": recipe.deterministic,
        "objective.hidden: the overlap that the compared layers lose": divided and recipe.objective.hidden.weight > 0,
        "parallel.overlap: time that all-to-alls expose": divided and parallel.overlap != "on",
        "parallel.tp_size: time that all-reduces expose, and the activations that sharding saves": parallel.tp_size > 1,
        "parallel.dedup: what it saves and costs": parallel.dedup != "off",
        "parallel.quantised: what formats save and cost": parallel.quantised.any,
        "parallel.placement: searches and swaps of experts": parallel.placement.every > 0,
        "all-to-alls between nodes": parallel.ep_size > hardware.gpus,
        "early_stop: the run may end earlier; a step with the best score is saved in addition": (
            recipe.early_stop.metric != NO_METRIC
        ),
        "sweep: the trials before the run": recipe.sweep is not None,
    }
    return [text for text, is_set in found.items() if is_set]
