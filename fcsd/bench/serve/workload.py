"""What ``fcsd bench serve`` times: the model, the wirings, and the prompts, batches and loads of a user."""

from dataclasses import dataclass
from pathlib import Path

from fcsd.bench.shapes import SHAPES
from fcsd.errors import ConfigError, unknown_value
from fcsd.models.wiring_block import NAMES
from fcsd.parallel.all_reduce.backends import is_bound

BUDGET = "--max-num-batched-tokens"
SMALL, LARGE = 2048, 8192  # what vLLM's servers choose for it on GPUs of less than 70 GiB and A100s, and on others
STANDARD, OWN = "standard", "own"  # names beside those of wirings: the original, and the wiring of a converted model


@dataclass(frozen=True)
class Workload:
    """What is timed. Weights are random, because speed does not depend on them.

    Attributes:
        model: a name in ``fcsd.bench.shapes``, or a directory in which config.json is enough.
        layers: decoder layers of a shape; None is the depth of its model.
        wirings: names of wirings, each over all layers; ``own`` is that of a converted model. Empty chooses ``own`` for
            a converted model, ``farskip`` for one with experts, and ``ladder`` for a dense one.
        tp: the tensor-parallel degree.
        dp: data-parallel replicas, each of ``tp`` ranks, behind one address.
        ep: whether ranks hold whole experts.
        prompts: tokens of a prompt, of which ``arrivals`` come at once. The smallest is the prompt of decoding and
            load.
        arrivals: prompts that come at once where the time to the first token is measured.
        answer: tokens of an answer where decoding and load are measured.
        batches: answers that are decoded at once.
        loads: rates of random arrivals, as shares of the requests per second that the original can answer at most.
        rounds: how often each variant is timed.
        minutes: the time that everything may take.
        options: further options of ``vllm serve``, which every variant gets.
        sums: the all-reduce backends with which each wiring is timed, in flight and at once; the first is the one of
            the verdict. Empty stands for ``vllm``.

    Raises:
        ConfigError: a value is unknown or out of range.
    """

    model: str
    layers: int | None = None
    wirings: tuple[str, ...] = ()
    tp: int = 1
    dp: int = 1
    ep: bool = False
    prompts: tuple[int, ...] = (512, 2048, 8192)
    arrivals: int = 16
    answer: int = 64
    batches: tuple[int, ...] = (1, 16, 64)
    loads: tuple[float, ...] = (0.3, 0.6, 0.9)
    rounds: int = 3
    minutes: float = 10.0
    options: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.wirings:
            known = [OWN, *(known for known in NAMES if known not in ("desync", STANDARD))]
            if name not in known:
                raise unknown_value("wiring", name, known)
        if self.model not in SHAPES and not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"{self.model} is neither a shape nor a directory with a config.json",
                f"shapes: {', '.join(SHAPES)}; of a model on the hub, config.json alone is enough",
            )
        if self.model not in SHAPES and self.layers is not None:
            raise ConfigError("--depth is for a SHAPE", f"{self.model} has its own number of layers")
        if (
            not self.prompts
            or not self.batches
            or min((*self.prompts, *self.batches, self.tp, self.dp, self.rounds)) < 1
        ):
            raise ConfigError("prompts, batches, degrees and rounds are at least 1, and there are some")
        if self.answer < 2 or self.arrivals < 1:
            raise ConfigError("an answer has at least 2 tokens, and at least one prompt arrives")
        if any(not 0 < load <= 1 for load in self.loads):
            raise ConfigError("a load is a share of the peak, above 0 and at most 1: 0.3,0.6,0.9")
        if self.minutes <= 0:
            raise ConfigError("--minutes is above 0")
        for backend in self.sums:
            if is_bound(backend, "plugin"):
                raise ConfigError(f"--all-reduce {backend} gives wrong results; the bound is measured in any case")

    @property
    def budget(self) -> int | None:
        """The most tokens of a step of vLLM, if the options say it."""
        words = " ".join(self.options).replace("=", " ").split()
        said = words[words.index(BUDGET) + 1] if BUDGET in words[:-1] else ""
        return int(said) if said.isdecimal() else None  # vLLM also takes 8k

    @property
    def short(self) -> int:
        """Tokens of a prompt where decoding and load are measured."""
        return min(self.prompts)

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its answer."""
        return max(max(self.prompts) + 1, self.short + self.answer)

    @property
    def peak_requests(self) -> int:
        """Requests that come at once where the peak is measured."""
        return 4 * max(self.batches)


def tokens_at_once(load: Workload) -> int:
    """The most tokens whose keys and values are in memory at once, with a tenth to spare for blocks."""
    decoding = (load.short + load.answer) * max(load.peak_requests if load.loads else 0, *load.batches)
    return int(1.1 * max(load.arrivals * (max(load.prompts) + 1), decoding))
