"""What the benchmark of training steps times, checked before any process starts."""

from dataclasses import dataclass
from typing import Any

from fcsd.errors import ConfigError

STOCK, STANDARD, EAGER, OVERLAPPED, BOUND = "stock", "standard", "eager-sync", "overlapped", "comm-free"
USUAL = (STOCK, STANDARD, EAGER, OVERLAPPED, BOUND)
# Rows copied into the peers' memory: overlapped, and under the standard wiring, awaited where they start.
COPIES, STANDARD_COPIES = "copies", "standard-copies"
# Overlapped by another schedule.
SCHEDULES: dict[str, dict[str, Any]] = {
    "before-attn": {"start": "before_attn"},
    "before-core": {"start": "before_core"},
    "shared-under-dispatch": {"shared_covers": "dispatch"},
    "copies-before-core": {"launch": "before_core"},
}
OVERLAPS = (OVERLAPPED, COPIES, *SCHEDULES)
OURS = (STANDARD, STANDARD_COPIES, EAGER, BOUND, *OVERLAPS)
FUSED = "-fused"  # one kernel for each norm and each move of rows
VARIANTS = (STOCK, *OURS, *(name + FUSED for name in OURS))
ROUTERS = ("initialised", "uniform")


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``.
        micro_batch: sequences of ``seq`` tokens per rank and step.
        routers: ``initialised`` as the random weights have it, ``uniform``: every expert gets as many tokens.
        variants: some of ``VARIANTS``.
        recompute: activation checkpointing of every layer.
        optimizer: the whole step with AdamW under ZeRO-1; else forward and backward alone, without an engine.
        rounds, steps: timed steps of each variant are ``rounds`` times ``steps``, interleaved by round.

    Raises:
        ConfigError: no such shape, router or variant.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    routers: tuple[str, ...] = ROUTERS
    variants: tuple[str, ...] = USUAL
    recompute: bool = False
    optimizer: bool = True
    rounds: int = 5
    steps: int = 3

    def __post_init__(self) -> None:
        from fcsd.bench.shapes import SHAPES

        for what, given, known in (
            ("shape", (self.shape,), tuple(SHAPES)),
            ("router", self.routers, ROUTERS),
            ("variant", self.variants, VARIANTS),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"no {what} {name}", hint=f"known: {', '.join(known)}")

    @property
    def fused(self) -> bool:
        """Whether a fused variant is timed: ceilings are then measured of one."""
        return any(name.endswith(FUSED) for name in self.variants)

    @property
    def overlapped(self) -> tuple[str, ...]:
        """The variants that overlap: each is held against its eager-sync self, and the last is traced."""
        return tuple(name for name in self.variants if name.removesuffix(FUSED) in OVERLAPS)
