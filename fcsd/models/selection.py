"""Reads a user's choice of layers: ``all``, ``none``, ``last:24``, ``first:8``, ``50%``, ``12-27`` or a list."""

import re
from collections.abc import Sequence

from ..errors import ConfigError

# Of the layers, converted where nobody says how many. In the papers and in our own runs the other half costs as much
# again or more: FarSkip's Table 2 lost 1.3 points with half of the layers and 7.7 with all, SmolLM2-135M with ladder
# 0.9 and 3.4, Gemma-3-270m 2.7 with half and 5.0 with five sixths (fcsd/advise/losses.json).
ADVISED = 0.5


def advised_count(count: int) -> int:
    """How many of ``count`` layers to convert: half, those that cost least if that was measured, else the last."""
    return int(ADVISED * count + 0.5)


def select_layers(spec: str, count: int) -> tuple[int, ...]:
    """The 0-based layers, ascending, that ``spec`` names in a model of ``count`` decoder layers.

    ``50%`` means the last half of the layers, as in FarSkip Table 2, rounded to the nearest layer; dense layers count
    too. Ranges are inclusive. A list may mix numbers and ranges: ``0,4-7,11``.

    Raises:
        ConfigError: the text has none of these forms or names a layer that does not exist.
    """
    spec = spec.strip()
    if spec == "all":
        return tuple(range(count))
    if spec == "none":
        return ()
    if match := re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)%", spec):
        share = float(match[1])
        if share > 100:
            raise ConfigError(f"layers {spec}: a share is at most 100 % of the layers")
        return _last(int(count * share / 100 + 0.5), count)
    if match := re.fullmatch(r"(first|last):([0-9]+)", spec):
        number = int(match[2])
        return _last(number, count) if match[1] == "last" else _last(count, count)[: _bounded(number, count)]
    if re.fullmatch(r"[0-9]+(-[0-9]+)?(\s*,\s*[0-9]+(-[0-9]+)?)*", spec):
        chosen: set[int] = set()
        for item in spec.split(","):
            start, _, end = item.strip().partition("-")
            if int(end or start) < int(start):
                raise ConfigError(f"layers {spec}: the range {item.strip()} ends before it begins")
            _bounded(int(end or start) + 1, count)
            chosen.update(range(int(start), int(end or start) + 1))
        return tuple(sorted(chosen))
    raise ConfigError(f"layers {spec!r} is not understood", hint="use all, last:24, first:8, 50%, 12-27 or 0,2,5-7")


def is_auto(spec: str) -> bool:
    """Whether the layers are to be measured, by ``fcsd.layer_costs``: ``auto``, or ``auto:N`` for the N cheapest."""
    return re.fullmatch(r"auto(:[0-9]+)?", spec.strip()) is not None


def cheapest(alone: dict[int, float], count: int | None = None) -> tuple[int, ...]:
    """The layers to convert, ascending: the ``count`` that cost least.

    Args:
        alone: layer -> KL(original || original with this layer converted), in nats per token.
        count: None is ``advised_count``.
    """
    by_cost = sorted(alone, key=lambda layer: alone[layer])
    return tuple(sorted(by_cost[: advised_count(len(alone)) if count is None else count]))


def layers_text(layers: Sequence[int]) -> str:
    """The text from which ``select_layers`` reads these ascending layers: ``0,2,5-7``, or ``none``."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"


def _bounded(number: int, count: int) -> int:
    if number > count:
        raise ConfigError(
            f"layers: the choice needs {number} layers, and the model has {count}, numbered 0 to {count - 1}",
            f"A number is that of one layer. For several: all, first:{count // 2}, last:{count // 2} or 50%.",
        )
    return number


def _last(number: int, count: int) -> tuple[int, ...]:
    return tuple(range(count - _bounded(number, count), count))
