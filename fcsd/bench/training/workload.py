"""The workload of the training-step benchmark, whose values are checked before any process starts."""

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

from fcsd.errors import ConfigError, unknown_value
from fcsd.parallel.cost import Dedup
from fcsd.parallel.quantised.rows import WireFormats

STOCK, STANDARD, EAGER, OVERLAPPED, BOUND = "stock", "standard", "eager-sync", "overlapped", "comm-free"
# Variants that copy rows into the peers' memory: overlapped, and under the standard wiring with blocking collectives.
COPIES, STANDARD_COPIES = "copies", "standard-copies"
# Overlapped variants with another schedule: name -> changed fields of the schedule.
SCHEDULES: dict[str, dict[str, Any]] = {
    "before-attn": {"start": "before_attn"},
    "before-core": {"start": "before_core"},
    "shared-under-dispatch": {"shared_covers": "dispatch"},
    "copies-before-core": {"launch": "before_core"},
}
OVERLAPS = (OVERLAPPED, COPIES, *SCHEDULES)
OURS = (STANDARD, STANDARD_COPIES, EAGER, BOUND, *OVERLAPS)
FUSED = "-fused"  # suffix of the variants that run one kernel for each norm and each permutation of rows
VARIANTS = (STOCK, *OURS, *(name + FUSED for name in OURS))
ROUTERS = ("initialised", "uniform")
DEDUPS: tuple[Dedup, ...] = get_args(Dedup)


class Changed(NamedTuple):
    """An overlapped variant with another deduplication, on a quantised wire, or both; None changes nothing."""

    base: str
    dedup: Dedup | None
    wire: str | None


def usual_variants() -> tuple[str, ...]:
    """The variants that are timed if none is named: those of a training run, which fuses on GPUs but not on CPUs."""
    import torch

    fused = FUSED if torch.cuda.is_available() else ""
    return (STOCK, *(name + fused for name in (STANDARD, EAGER, OVERLAPPED, BOUND)))


@dataclass(frozen=True)
class Workload:
    """The workload that is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``.
        layers: decoder layers of the model.
        micro_batch: sequences of ``seq`` tokens per rank and step.
        seq: tokens of a sequence.
        routers: ``initialised`` keeps the random router; ``uniform`` sends equally many tokens to every expert.
        variants: names from ``VARIANTS``.
        recompute: whether activation checkpointing recomputes every layer.
        optimizer: whether the step includes AdamW under ZeRO-1; otherwise it is only forward and backward, without an
            engine.
        rounds: how often each variant is timed; the variants take turns.
        steps: timed steps of a variant in each round.
        dedup: ``off``, ``rank`` or ``node``; see ``parallel.dedup`` in the recipe. It holds for all variants except
            ``stock`` and the bound, which need no deduplication: the bound is the same for every value.
        node_size: neighbouring ranks that form a node, for ``node``. With it, the variants named copies copy rows only
            inside a node, and NCCL sends rows between nodes. If ``NCCL_P2P_DISABLE`` makes NCCL slow, the nodes of one
            host are imitations of real ones.
        wires: formats of the wire, as ``WireFormats.parse`` reads them. Each overlapped variant is also timed with each
            of them.
        more_dedups: other values of ``dedup``. Each overlapped variant is also timed with each of them, alone and with
            each of ``wires``.

    Raises:
        ConfigError: the shape, a router, a variant, a format or ``dedup`` is unknown; ``node`` comes without a node
            size; or there is no variant for the formats or for ``more_dedups``.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    routers: tuple[str, ...] = ROUTERS
    variants: tuple[str, ...] = (STOCK, STANDARD, EAGER, OVERLAPPED, BOUND)
    recompute: bool = False
    optimizer: bool = True
    rounds: int = 5
    steps: int = 3
    dedup: Dedup = "off"
    node_size: int | None = None
    wires: tuple[str, ...] = ()
    more_dedups: tuple[Dedup, ...] = ()

    def __post_init__(self) -> None:
        from fcsd.bench.shapes import SHAPES

        for what, given, known in (
            ("shape", (self.shape,), tuple(SHAPES)),
            ("router", self.routers, ROUTERS),
            ("variant", self.variants, VARIANTS),
            ("dedup", (self.dedup, *self.more_dedups), DEDUPS),
        ):
            for name in given:
                if name not in known:
                    raise unknown_value(what, name, known)
        if "node" in (self.dedup, *self.more_dedups) and self.node_size is None:
            raise ConfigError("dedup node needs the number of ranks of a node", hint="--node-size")
        for wire in self.wires:
            WireFormats.parse(wire)
        if self.wires and not self.overlapped:
            raise ConfigError("--wire needs a variant that overlaps", hint="--variants overlapped,...")
        if self.more_dedups and not self.overlapped:
            raise ConfigError("a second --dedup needs a variant that overlaps", hint="--variants overlapped,...")

    @property
    def changed(self) -> dict[str, Changed]:
        """The overlapped variants with ``more_dedups`` and ``wires``: ``overlapped-fused+rank+int8``, for example."""
        found = {}
        for dedup, wire in itertools.product((None, *self.more_dedups), (None, *self.wires)):
            if dedup or wire:
                for name in self.overlapped:
                    found["+".join(filter(None, (name, dedup, wire)))] = Changed(name, dedup, wire)
        return found

    @property
    def fused(self) -> bool:
        """Whether a fused variant is timed; the ceilings are then measured with fused kernels."""
        return any(name.endswith(FUSED) for name in self.variants)

    @property
    def overlapped(self) -> tuple[str, ...]:
        """The variants that overlap. Each is compared with its eager-sync schedule, and the last one is traced."""
        return tuple(name for name in self.variants if name.removesuffix(FUSED) in OVERLAPS)
