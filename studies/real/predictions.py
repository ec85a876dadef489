"""How fast a conversion would be served against what it would lose, by prediction.

    python -m studies.real predictions MODEL [--gpus N] [--machine FILE] [--costs FILE] [--json]

MODEL is a directory or a hub id, of which config.json is read. Speed: the schedule of the wiring
(``fcsd.models.schedule``) says which sums travel and what is computed meanwhile. The time of a part is that of reading
its weights or of its products, whichever is longer, and that of a sum a line in its bytes. What a sum takes beyond its
cover is exposed, and what it hides costs a share. Loss: the law that ``studies/real/law.py`` fitted to the runs of one
small model. ``PREDICTIONS.md`` says how far both can be trusted.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from fcsd.advise.cards import H100
from fcsd.advise.speed import STANDARD, Load, kind_of_numbers, server_of
from fcsd.checkpoint.location import located
from fcsd.errors import ConfigError
from fcsd.foreign_errors import reason_of
from fcsd.markdown import table
from fcsd.models.build import arch_of, without_injected
from fcsd.models.schedule import Kind, reads_of
from fcsd.models.selection import cheapest, layers_text, select_layers
from fcsd.models.wiring_block import DESYNC, Blocks, Wiring
from fcsd.parallel.machine import Line, Machine, read_machine
from fcsd.plan.model import MetaModel
from fcsd.strict_json import finite_number, read_file

WIRINGS = (
    ("farskip", "full"),
    ("ladder", "full"),
    ("parallel", "full"),
    ("ladder", "attn-only"),
    ("ladder", "mlp-only"),
    ("desync-2x", "full"),
    ("desync-4x", "full"),
)
SHARES = ("25%", "50%", "75%", "100%")
PROMPTS, CONTEXT = 16, 1024  # the workload: 16 prompts of 1024 tokens, and then a step of 16 answers
TOKENS = 100  # millions, of the healing
_ROUNDING = 1e-6  # nats; a divergence of 0 may be measured as less

# Without a machine file: two H100s without peer access between them, fitted to infer_slow_16_layers_2xh100.json in
# benchmarks/results (tests/studies/test_predictions.py), as the rates of ``fcsd.advise.speed`` were. Bytes are those
# that a GPU sends.
SLOW = Line(alpha=38e-6, beta=1 / 30e9)


@dataclass(frozen=True)
class Row:
    """A conversion and its prediction.

    Attributes:
        layers: the layers that are converted.
        decode, prefill: the speed as a multiple of the original's.
        cost: the sum of the costs of the converted layers alone in nats, the lowest and the highest; None if unknown.
        kl: nats per token after healing, the ends of an interval of 90 %.
        points: points lost, likewise.
        fitted: whether the law was fitted to runs of such a wiring, on such a share of the layers, and of such costs.
    """

    wiring: str
    layers: str
    decode: float
    prefill: float
    cost: tuple[float, float] | None = None
    kl: tuple[float, float] | None = None
    points: tuple[float, float] | None = None
    fitted: bool = True


def frontier(model: MetaModel, ranks: int, machine: Machine | None = None, costs: Path | None = None) -> list[Row]:
    """The rows of all wirings that the model has, over the last 25, 50, 75 and 100 % of its layers.

    Args:
        machine: measured links; None for two H100s without peer access.
        costs: what ``fcsd convert --layers auto --costs`` or ``python -m studies.real layers`` wrote about this model.
            With it, the choices of ``auto:N``, of as many layers as the shares, are rows, too, and the law
            takes these costs in place of those of the models that were measured.

    Raises:
        ConfigError: ``ranks`` is 1, where nothing is sent, or does not divide the attention heads; or ``costs`` does
            not fit the model.
    """
    if ranks < 2:
        raise ConfigError("this is about tensor parallelism: one GPU sends nothing", "Give --gpus 2 or more.")
    config, numbers = model.config, model.numbers
    if (heads := getattr(config.get_text_config(), "num_attention_heads", None) or ranks) % ranks:
        hint = "One head cannot be divided." if heads == 1 else f"Give one that does: {usual_ranks(model)}."
        raise ConfigError(f"--gpus {ranks} does not divide the {heads} attention heads", hint)
    arch, depth = arch_of(config), len(numbers.layers)
    kinds: list[Kind] = [kind_of_numbers(layer) for layer in numbers.layers]
    speed = speed_of(model, ranks, machine)
    given = None if costs is None else read_costs(costs, depth)
    profiles = list(law()["costs"].values())
    if given is not None:
        profiles = [{name: [cost or 0.0 for cost in alone] for name, alone in given.items()}]
    found = []
    for name, variant in WIRINGS:
        if name not in arch.wirings:
            continue
        degree = ranks if name in DESYNC else 1
        whole = Wiring(name, tuple(range(depth)), variant, tp_degree=degree)
        label = name if variant == "full" else f"{name} {variant}"
        alike = measured_alike(whole, kinds, arch.blocks) or label
        first = min(without_injected(config, whole).layers, default=depth)
        choices = {share: tuple(n for n in select_layers(share, depth) if n >= first) for share in SHARES}
        if given is not None and alike in given:
            alone = {layer: cost for layer, cost in enumerate(given[alike]) if cost is not None}
            counts = [count for share in SHARES[:-1] if (count := len(choices[share])) <= len(alone)]
            choices |= {f"auto:{count}": cheapest(alone, count) for count in counts}
        for share, layers in choices.items():
            decode, prefill = speed(replace(whole, layers=layers))
            lost: dict[str, Any] = {}
            if all(alike in profile for profile in profiles):
                sums = sorted(sum_over(profile[alike], layers, depth) for profile in profiles)
                wholes = sorted(sum(profile[alike]) for profile in profiles)
                lost = losses(len(layers) / depth, (wholes[0], wholes[-1])) | {"cost": (sums[0], sums[-1])}
                lost["fitted"] &= alike in law()["wirings"]
            found.append(Row(label, f"{share} ({layers_text(layers)})", decode, prefill, **lost))
    return found


def usual_ranks(model: MetaModel) -> int:
    """The fewest GPUs, from two on, over which the attention heads can be divided; two where one head cannot be."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None) or 2
    return next((ranks for ranks in range(2, heads + 1) if heads % ranks == 0), 2)


def speed_of(model: MetaModel, ranks: int, machine: Machine | None = None) -> Callable[[Wiring], tuple[float, float]]:
    """What tells of a wiring its speed in decoding and to the first tokens, as multiples of the original's."""

    def times(wiring: Wiring) -> tuple[float, float]:
        step, first = (
            seconds_of(model, ranks, machine, STANDARD, prefill) / seconds_of(model, ranks, machine, wiring, prefill)
            for prefill in (False, True)
        )
        return step, first

    return times


def seconds_of(model: MetaModel, ranks: int, machine: Machine | None, wiring: Wiring, prefill: bool) -> float:
    """The seconds of a pass through all prompts (``prefill``), or of a step of one token each."""
    line, server = SLOW if machine is None else machine.near.line, server_of(model, H100, Load(CONTEXT, PROMPTS))

    def ring(size: float) -> float:  # every value is sent to the next GPU while it is summed, and again as a sum
        return line.seconds(2 * (ranks - 1) / ranks * size)

    return server.seconds(ranks, wiring, ring, PROMPTS * CONTEXT if prefill else PROMPTS, prefill)


@cache
def law() -> dict[str, Any]:
    """What ``studies/real/law.py`` fitted."""
    return json.loads(Path(__file__).with_name("healing_law.json").read_text(encoding="utf-8"))


def read_costs(path: Path, depth: int) -> dict[str, list[float | None]]:
    """The costs of single layers by wiring, from a file of ``fcsd convert`` or ``python -m studies.real layers``.

    A layer that cannot be converted has None.

    Raises:
        ConfigError: the file cannot be read, has no costs, or has those of another number of layers.
    """
    try:
        content = read_file(path)
        parts = {name: part["alone"] for name, part in content.items() if isinstance(part, dict) and "alone" in part}
        found = {name: _costs_of(name, alone) for name, alone in parts.items()}
    except FileNotFoundError:
        raise ConfigError(f"--costs {path}: there is no such file") from None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no costs of layers: {reason_of(error)}",
            "fcsd convert --layers auto --costs FILE writes such a file",
        ) from error
    if not found or any(len(alone) != depth for alone in found.values()):
        raise ConfigError(f"{path} has no costs of a model of {depth} layers", "Measure this model's own.")
    return found


def _costs_of(name: str, alone: Any) -> list[float | None]:
    """The costs of a wiring, which begin with None for the first layers if these cannot be converted."""
    if not isinstance(alone, list):
        raise ValueError(f"those of {name} are not a list")
    first = next((number for number, cost in enumerate(alone) if cost is not None), len(alone))
    costs = [finite_number(cost) for cost in alone[first:]]
    if min(costs, default=0.0) < -_ROUNDING or max(costs, default=0.0) <= _ROUNDING:
        raise ValueError(f"those of {name} are negative, or none is above 0")
    return [None] * first + costs


def sum_over(alone: Sequence[float], layers: Sequence[int], depth: int) -> float:
    """The cost of ``layers`` of ``depth``, if cost depends on the place in the depth as in a model of other depth."""
    scale = len(alone) / depth
    total = 0.0
    for layer in layers:
        low, high = layer * scale, (layer + 1) * scale
        for number in range(int(low), min(math.ceil(high), len(alone))):
            total += alone[number] * max(0.0, min(high, number + 1) - max(low, number))
    return total


def losses(
    share: float, whole: tuple[float, float], tokens: float = TOKENS, fitted: dict[str, Any] | None = None
) -> dict[str, Any]:
    """``kl``, ``points`` and ``fitted`` of a ``Row``.

    Args:
        share: that of the converted layers.
        whole: the sum of what all layers of the model cost alone, in nats, the lowest and the highest.
        tokens: millions, of the healing.
        fitted: another law than ``law()``.
    """
    told = fitted or law()
    kl, points = told["kl"], told["points"]
    ends = [_line(kl, [1.0, math.log(share), math.log(max(cost, 1e-9)), -math.log(tokens)]) for cost in whole]
    divergences = [(middle - kl["t"] * error, middle + kl["t"] * error) for middle, error in ends]
    slope = points["coefficients"][1]
    lost = []
    for middle, error in ends:
        value, own = _line(points, [1.0, middle])
        spread = points["t"] * math.hypot(own, slope * error)
        lost.append((value - spread, value + spread))
    (least, most), (low, high) = told["shares"], told["wholes"]
    return {
        "kl": (math.exp(divergences[0][0]), math.exp(divergences[1][1])),
        "points": (math.exp(lost[0][0]), math.exp(lost[1][1])),
        "fitted": least <= share <= most and low <= whole[0] and whole[1] <= high,
    }


def _line(fit: dict[str, Any], at: list[float]) -> tuple[float, float]:
    """A new value of a fitted line and its standard error, which has the residual and the coefficients' own in it."""
    middle = sum(c * x for c, x in zip(fit["coefficients"], at, strict=True))
    spread = sum(a * v * b for a, row in zip(at, fit["inverse"], strict=True) for v, b in zip(row, at, strict=True))
    return middle, fit["residual"] * math.sqrt(1 + spread)


def measured_alike(wiring: Wiring, kinds: Sequence[Kind], blocks: Blocks) -> str | None:
    """The measured wiring all of whose reads are those of ``wiring``: in a dense model parallel's are farskip's."""
    if wiring.name in DESYNC:
        return None
    reads = reads_of(wiring, kinds, blocks)
    same = (name for name in ("ladder", "farskip") if reads_of(Wiring(name, wiring.layers), kinds, blocks) == reads)
    return next(same, None)


def to_text(rows: list[Row], ranks: int, machine: Machine | None, costs: Path | None) -> str:
    """The table, labelled as a prediction, with what it assumes."""
    lines = [
        [
            row.wiring,
            row.layers,
            f"{row.decode:.2f}x",
            f"{row.prefill:.2f}x",
            *(("-", "-", "-") if row.cost is None else map(_range, (row.cost, row.kl, row.points))),
        ]
        for row in rows
    ]
    for line, row in zip(lines, rows, strict=True):
        line[-1] += "" if row.fitted else "*"
    head = ["wiring", "layers", "decoding", "first tokens", "sum of costs", f"KL after {TOKENS} M", "points lost"]
    told, profiles = law(), " or ".join(law()["costs"])
    links = "Links and rates are assumed: those of two H100s without peer access (--machine FILE takes measured links)."
    if machine is not None:
        links = "Links are those of the machine file, an all-reduce counted as a ring; GPUs are H100s."
    place = f"Costs of layers are those in {costs}."
    if costs is None:
        place = f"Costs of layers are assumed to depend on the place in the depth, as in {profiles} (--costs FILE)."
    said = [
        "Predicted, not measured.",
        f"Speed: over the original, both with TP {ranks}, of a step of {PROMPTS} answers after {CONTEXT} tokens and of",
        f"the first tokens of {PROMPTS} prompts of {CONTEXT} tokens.",
        links,
        f"Loss: a law of {told['kl']['runs']} runs of {told['model']} alone, which trained the converted layers alone,",
        "on its own text or on own and other text; intervals of 90 % for a new run of that kind. Points are those of",
        "tasks on which that model is above chance. The law takes how many layers are converted, not which.",
        place,
        "- : no costs of this wiring were measured. * : a wiring, a share of the layers or costs to which the law was",
        "not fitted. That a model is larger or has experts has no star.",
    ]
    return "\n".join([*said, "", table(head, lines, left=2)])


def _range(ends: tuple[float, float] | None) -> str:
    assert ends is not None
    low, high = (f"{value:.2g}" for value in ends)
    return low if low == high else f"{low} to {high}"


ARGUMENTS = {
    "model": dict(help="a directory or a hub id, of which config.json is read"),
    "--gpus": dict(type=int, help="ranks of the server; 2, or the fewest that divide the heads"),
    "--machine": dict(type=Path, help="links that fcsd bench links has measured"),
    "--costs": dict(type=Path, help="the costs of the model's layers, from convert --layers auto --costs"),
    "--json": dict(action="store_true", help="print the rows as JSON"),
}


def main(given: argparse.Namespace) -> None:
    """Prints the table of a model, or the rows as JSON.

    Raises:
        ConfigError: as in ``frontier``, or the machine file cannot be read.
    """
    described = None if given.machine is None else read_machine(given.machine)
    known = MetaModel(located(given.model))
    gpus = given.gpus or usual_ranks(known)
    rows = frontier(known, gpus, described, given.costs)
    data = json.dumps([vars(row) for row in rows], indent=2)
    print(data if given.json else to_text(rows, gpus, described, given.costs))
