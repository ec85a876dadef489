"""The workload of the benchmark of a step, whose values are checked before any process starts."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from studies.formats.directions import parse_formats
from transformers import AutoConfig, PretrainedConfig

from fcsd.bench.shapes import SHAPES
from fcsd.errors import ConfigError, unknown_value
from fcsd.parallel.expert.hierarchical import Dedup

STOCK, STANDARD, EAGER, OVERLAPPED, BOUND = "stock", "standard", "eager-sync", "overlapped", "comm-free"
TUNED = "stock-tuned"  # AutoEP's own layer with the options that it offers for speed; on GPUs
# Variants that copy rows into the peers' memory: overlapped, and under the standard wiring with blocking collectives.
COPIES, STANDARD_COPIES = "copies", "standard-copies"
BY_HOST = "by-host"  # overlapped, with rows that go through memory of the host
OVERLAPS = (OVERLAPPED, COPIES, BY_HOST)
OURS = (STANDARD, STANDARD_COPIES, EAGER, BOUND, *OVERLAPS)
FUSED = "-fused"  # suffix of the variants that run one kernel for each norm and each permutation of rows
VARIANTS = (STOCK, TUNED, *OURS, *(name + FUSED for name in OURS))
# Variants of the distillation step: with a mask instead of packed attention, and with every collective awaited at once.
MASKED, BLOCKING = "masked", "blocking"
WITH_TEACHER = (OVERLAPPED, MASKED, BLOCKING, BOUND)
ROUTERS = ("initialised", "uniform")
DEDUPS: tuple[Dedup, ...] = get_args(Dedup)


class Changed(NamedTuple):
    """An overlapped variant with another deduplication, in quantised communication, or both; None changes nothing."""

    base: str
    dedup: Dedup | None
    format: str | None


@dataclass(frozen=True)
class Workload:
    """The workload that is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``; with a teacher also the directory of a checkpoint, of which only the
            config is read.
        layers: decoder layers of a shape; for a checkpoint, its config gives the number.
        micro_batch: sequences of ``seq`` tokens per rank and forward pass.
        seq: tokens of a sequence.
        teacher: whether the step is that of ``fcsd distill``, with teacher, loss and optimizer, or that of training.
        routers: ``initialised`` keeps the random router; ``uniform`` sends equally many tokens to every expert. If
            there are none, it is both, or ``uniform`` with a teacher.
        variants: names from ``VARIANTS``, or with a teacher from ``WITH_TEACHER`` and ``BY_HOST``, of which
            ``overlapped`` is the step of ``fcsd distill``. If there are none, it is the usual ones.
        formats: formats of rows, as ``parse_formats`` reads them. Each overlapped variant is also timed with each
            of them.
        rounds: how often each variant is timed; the variants take turns.
        steps: timed steps of a variant in each round.
        accumulation: with a teacher, forward passes in a step of each process.
        sets: with a teacher, ``--set`` assignments to the recipe. By default the recipe has KL from a teacher, ZeRO-1,
            and experts spread over all processes.
        recompute: without a teacher, whether activation checkpointing recomputes every layer.
        optimizer: without a teacher, whether the step includes AdamW under ZeRO-1; otherwise it is only forward and
            backward, without an engine.
        dedup: without a teacher, ``off``, ``rank`` or ``node``; see ``parallel.dedup`` in the recipe. It holds for all
            variants except ``stock`` and the bound, which need no deduplication: the bound is the same for every value.
        node_size: neighbouring ranks that form a node, for ``node``.
        more_dedups: other values of ``dedup``. Each overlapped variant is also timed with each of them, alone and with
            each of ``formats``.

    Raises:
        ConfigError: the shape, a router, a variant, a format or ``dedup`` is unknown; ``node`` comes without a node
            size; there is no variant for the formats or for ``more_dedups``; or a value is for the other kind of step.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    teacher: bool = False
    routers: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    rounds: int = 3
    steps: int = 3
    accumulation: int = 1
    sets: tuple[str, ...] = ()
    recompute: bool = False
    optimizer: bool = True
    dedup: Dedup = "off"
    node_size: int | None = None
    more_dedups: tuple[Dedup, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "routers", self.routers or (ROUTERS[1:] if self.teacher else ROUTERS))
        object.__setattr__(self, "variants", self.variants or (WITH_TEACHER if self.teacher else _usual()))
        for what, given, known in (
            ("router", self.routers, ROUTERS),
            ("variant", self.variants, (*WITH_TEACHER, BY_HOST) if self.teacher else VARIANTS),
            ("dedup", (self.dedup, *self.more_dedups), DEDUPS),
        ):
            for name in given:
                if name not in known:
                    raise unknown_value(what, name, known)
        if self.teacher and (
            self.recompute or not self.optimizer or self.node_size or (*self.more_dedups, self.dedup) != ("off",)
        ):
            raise ConfigError(
                "--recompute, --no-optimizer, --dedup and --node-size are for steps without --teacher",
                hint="change the recipe: --set train.activation_checkpointing=true, --set parallel.dedup=rank",
            )
        if not self.teacher and (self.sets or self.accumulation > 1):
            raise ConfigError("--set and --accumulation are for steps with --teacher", hint="add --teacher")
        if not self.teacher and self.shape not in SHAPES:
            raise unknown_value("shape", self.shape, SHAPES)
        if self.shape not in SHAPES and not Path(self.shape, "config.json").is_file():
            raise ConfigError(f"{self.shape}: neither a shape ({', '.join(SHAPES)}) nor a checkpoint's directory")
        if TUNED in self.variants and not torch.cuda.is_available():
            raise ConfigError(f"{TUNED} needs GPUs: AutoEP's options for speed are CUDA's", hint=f"--variants {STOCK}")
        if any(BY_HOST in name for name in self.variants) and not torch.cuda.is_available():
            raise ConfigError(f"{BY_HOST} needs GPUs", hint="leave out the variants named by-host")
        if "node" in (self.dedup, *self.more_dedups) and self.node_size is None:
            raise ConfigError("dedup node needs the number of ranks of a node", hint="--node-size")
        for format in self.formats:
            parse_formats(format)
        if self.formats and not self.overlapped:
            raise ConfigError("--quantised needs a variant that overlaps", hint="--variants overlapped,...")
        if self.more_dedups and not self.overlapped:
            raise ConfigError("a second --dedup needs a variant that overlaps", hint="--variants overlapped,...")

    @property
    def config(self) -> PretrainedConfig:
        """The model's config, before it is converted."""
        if self.shape in SHAPES:
            return SHAPES[self.shape](self.layers)
        return AutoConfig.from_pretrained(self.shape, trust_remote_code=False)

    @property
    def overlapped(self) -> tuple[str, ...]:
        """The variants that overlap. Without a teacher, each is compared with its eager-sync schedule."""
        overlaps = (OVERLAPPED, BY_HOST) if self.teacher else OVERLAPS
        return tuple(name for name in self.variants if name.removesuffix(FUSED) in overlaps)

    @property
    def changed(self) -> dict[str, Changed]:
        """The overlapped variants with ``more_dedups`` and ``formats``: ``overlapped-fused+rank+int8``, for example."""
        found = {}
        for dedup, format in itertools.product((None, *self.more_dedups), (None, *self.formats)):
            if dedup or format:
                for name in self.overlapped:
                    found["+".join(filter(None, (name, dedup, format)))] = Changed(name, dedup, format)
        return found

    @property
    def timed(self) -> tuple[str, ...]:
        """All variants that are timed."""
        return (*self.variants, *self.changed)

    @property
    def traced(self) -> tuple[str, ...]:
        """The variants that ``--trace`` traces: the last that overlaps and its last change, or with a teacher all but
        the bound."""
        if self.teacher:
            return tuple(name for name in self.timed if name != BOUND)
        return (*self.overlapped[-1:], *tuple(self.changed)[-1:])


def _usual() -> tuple[str, ...]:
    """The variants of training that are timed if none is named. As in training runs, they fuse on GPUs only."""
    fused, tuned = (FUSED, (TUNED,)) if torch.cuda.is_available() else ("", ())
    return (STOCK, *tuned, *(name + fused for name in (STANDARD, EAGER, OVERLAPPED, BOUND)))
