"""The workload of the distillation-step benchmark, whose values are checked before any process starts."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from fcsd.bench.shapes import SHAPES
from fcsd.errors import ConfigError, unknown_value
from fcsd.parallel.quantised.rows import WireFormats

OVERLAPPED, APART, MASKED, BLOCKING, BOUND = "overlapped", "apart", "masked", "blocking", "comm-free"
VARIANTS = (OVERLAPPED, APART, MASKED, BLOCKING, BOUND)


@dataclass(frozen=True)
class Load:
    """The workload that is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``, or the directory of a checkpoint, of which only the config is read.
        layers: decoder layers of a shape; for a checkpoint, its config gives the number.
        micro_batch: rows of ``seq`` tokens in a forward pass of each process.
        seq: tokens of a row.
        accumulation: micro-batches in a step of each process.
        router: ``initialised`` keeps the random router; ``uniform`` sends equally many tokens to every expert.
        variants: which variants are timed:
            ``overlapped`` is the step of ``fcsd distill``;
            ``apart`` runs the teacher's pass before the student's instead of in turns with it;
            ``masked`` is ``apart`` with a mask instead of packed attention;
            ``blocking`` awaits every collective where it starts;
            ``comm-free`` sends no rows and is the bound.
        wires: formats of the student's rows, as ``WireFormats.parse`` reads them. Each of them is timed as a variant
            ``overlapped+FORMAT``.
        sets: ``--set`` assignments to the recipe. By default the recipe has KL from a teacher, ZeRO-1, and experts
            spread over all processes.
        rounds: how often each variant is timed; in a round, each variant runs once.
        steps: timed steps of a variant in each round, which follow one another without a pause.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    accumulation: int = 1
    router: str = "initialised"
    variants: tuple[str, ...] = VARIANTS
    sets: tuple[str, ...] = ()
    rounds: int = 3
    steps: int = 3
    wires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for wire in self.wires:
            WireFormats.parse(wire)
        known = {"router": ("initialised", "uniform"), "variant": VARIANTS}
        for what, given in (("router", (self.router,)), ("variant", self.variants)):
            for name in given:
                if name not in known[what]:
                    raise unknown_value(what, name, known[what])
        if self.shape not in SHAPES and not Path(self.shape, "config.json").is_file():
            raise ConfigError(f"{self.shape}: neither a shape ({', '.join(SHAPES)}) nor a checkpoint's directory")

    @property
    def timed(self) -> tuple[str, ...]:
        """All variants that are timed."""
        return (*self.variants, *(f"{OVERLAPPED}+{wire}" for wire in self.wires))

    @property
    def config(self) -> PretrainedConfig:
        """The teacher's config."""
        if self.shape in SHAPES:
            return SHAPES[self.shape](self.layers)
        return AutoConfig.from_pretrained(self.shape, trust_remote_code=False)
