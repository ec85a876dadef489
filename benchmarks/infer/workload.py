"""What ``python -m benchmarks.infer`` times, and the row of results for each variant."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.bench.serve.model import prompts_of
from fcsd.bench.serve.workload import OWN, STANDARD
from fcsd.bench.shapes import SHAPES
from fcsd.errors import ConfigError, unknown_value
from fcsd.models.wiring_block import NAMES
from fcsd.parallel.all_reduce.backends import backend_of, is_bound

Times = dict[str, list[float]]  # milliseconds in each round: of the ``prefill``, and of one step of ``decode``


@dataclass(frozen=True)
class Workload:
    """What is timed.

    Attributes:
        model: a name in ``fcsd.bench.shapes``, or the directory of a checkpoint.
        layers: decoder layers of a shape; a checkpoint has its own number.
        degrees: tensor-parallel degrees.
        batches: numbers of prompts.
        prompt: tokens of a prompt.
        new: tokens that are decoded after each prompt, the first of which comes from the prefill.
        wirings: names of wirings, each applied to every layer; ``own`` is the wiring of the checkpoint.
        reduce: all-reduce backends, see ``parallel.all_reduce.backends``.
        bounds: the wirings that are also timed by the kinds with wrong results; None for all of them.
        dtype: ``float32`` or ``bfloat16``.
        graphs: whether decoding is captured as CUDA graphs; on CPUs nothing is captured.
        rounds: how often each variant is timed.

    Raises:
        ConfigError: a value is unknown or out of range.
    """

    model: str
    layers: int = 8
    degrees: tuple[int, ...] = (1,)
    batches: tuple[int, ...] = (1,)
    prompt: int = 1024
    new: int = 512
    wirings: tuple[str, ...] = (STANDARD, "ladder")
    reduce: tuple[str, ...] = ("nccl", "none")
    dtype: str = "bfloat16"
    graphs: bool = True
    rounds: int = 3
    bounds: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in self.wirings:
            known = [OWN, *(known for known in NAMES if known != "desync")]
            if name not in known:
                raise unknown_value("wiring", name, known)
        for name in self.bounds or ():
            if name not in self.wirings:
                raise unknown_value("wiring for a bound", name, self.wirings)
        for kind in self.reduce:
            backend_of(kind, "engine")
        if self.dtype not in ("float32", "bfloat16"):
            raise unknown_value("dtype", self.dtype, ("float32", "bfloat16"))
        if self.new < 2 or min((*self.degrees, *self.batches, self.prompt, self.rounds)) < 1:
            raise ConfigError("degrees, batches, prompts and rounds are at least 1, and new tokens at least 2")
        if self.model not in SHAPES and not (Path(self.model) / "config.json").is_file():
            raise ConfigError(f"{self.model} is neither a shape nor a checkpoint", hint=f"shapes: {', '.join(SHAPES)}")

    def times(self, name: str, kind: str) -> bool:
        """Whether a wiring is timed with an all-reduce backend; ``bounds`` says which wirings have a bound."""
        return not is_bound(kind) or self.bounds is None or name in self.bounds

    def prompts(self, batch: int, vocabulary: int) -> list[list[int]]:
        """The token ids of the prompts of a batch. They are the same for all variants."""
        return prompts_of(batch, self.prompt, vocabulary, seed=batch)


def row(load: Workload, degree: int, batch: int, wiring: str, kind: str, times: Times | None) -> dict[str, Any]:
    """One row; ``times`` is None if the variant does not fit into memory."""
    prefill = decode = speed = drift = None
    if times is not None:
        prefill, decode = (statistics.median(times[name]) for name in ("prefill", "decode"))
        speed = batch * load.new / (prefill + decode * (load.new - 1)) * 1e3
        drift = times["decode"][-1] / times["decode"][0]
    return {
        "tp": degree,
        "batch": batch,
        "wiring": wiring,
        "reduce": kind,
        "exact": not is_bound(kind),
        "out_of_memory": times is None,
        "prefill_ms": prefill,
        "decode_ms": decode,
        "tokens_per_s": speed,
        "drift": drift,
        "rounds": times,
    }


def compare(row: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add to a row its speed relative to the standard wiring and to its bound.

    Args:
        row: the row.
        rows: all rows of the same degree and batch.
    """
    timed = [other for other in rows if not other["out_of_memory"]]
    for phase in ("prefill", "decode"):
        key = f"{phase}_ms"
        standard = [other[key] for other in timed if other["wiring"] == STANDARD and other["exact"]]
        bound = [other[key] for other in timed if other["wiring"] == row["wiring"] and not other["exact"]]
        own = row[key]
        row[f"{phase}_times_standard"] = min(standard) / own if standard and own is not None else None
        row[f"{phase}_of_bound"] = min(bound) / own if bound and own is not None else None
