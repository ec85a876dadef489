"""Computes and draws the speed-up at each world size from the files of ``fcsd bench step``, as in FarSkip Figure 5."""

import argparse
import json
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.bench.step.workload import BOUND, FUSED, OVERLAPPED, OVERLAPS, STANDARD, STANDARD_COPIES
from fcsd.errors import BadInputError

# Fields of the workload in step.json that must be equal in all runs that are compared.
_SHARED = ("shape", "layers", "seq", "recompute", "optimizer")


@dataclass(frozen=True)
class Point:
    """Median times of a step at one world size.

    Attributes:
        variant: a variant that overlaps. If it is fused, ``standard`` and ``bound`` are those of fused variants, too.
        world: number of ranks.
        micro_batch: sequences per rank.
        standard: ms of the standard wiring with the fastest transport that was timed.
        overlapped: ms of ``variant``.
        bound: ms of the bound without communication.
    """

    variant: str
    world: int
    micro_batch: int
    standard: float
    overlapped: float
    bound: float

    @property
    def fused(self) -> str:
        """The suffix of the names of the variants that can be compared with this one."""
        return FUSED if self.variant.endswith(FUSED) else ""

    @property
    def speed_up(self) -> float:
        """The speed of the overlapped step relative to the standard one."""
        return self.standard / self.overlapped

    @property
    def most(self) -> float:
        """The speed-up of the bound, which is the most that can be reached."""
        return self.standard / self.bound


def read(paths: list[Path]) -> tuple[dict[str, Any], list[Point]]:
    """Reads several step.json files.

    Returns: the conditions that all runs share, and what the runs measured under their first router, sorted by variant
        and world size.

    Raises:
        BadInputError: a file is not a step.json or lacks a variant, or the runs cannot be compared.
    """
    conditions: dict[str, Any] = {}
    points: list[Point] = []
    for path in paths:
        found, measured = _one(path)
        for name, value in found.items():
            if conditions.setdefault(name, value) != value:
                raise BadInputError(f"{name} is {value} in {path} and {conditions[name]} in {paths[0]}")
        if measured[0].world in {point.world for point in points}:
            raise BadInputError(f"{path}: another file has world size {measured[0].world}, too")
        points += measured
    return conditions, sorted(points, key=lambda point: (point.variant, point.world))


def _one(path: Path) -> tuple[dict[str, Any], list[Point]]:
    try:
        result = json.loads(path.read_text())
        load, world = result["workload"], result["world"]
        router = load["routers"][0]
        steps = {
            name: statistics.median(found["step"]) for name, found in result["routers"][router]["variants"].items()
        }
        conditions = {name: load[name] for name in _SHARED}
        conditions |= {"global batch": world * load["micro_batch"], "router": router}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadInputError(f"{path} is not a step.json of fcsd bench step") from error
    points = []
    for fused in ("", FUSED):
        standard = [steps[name + fused] for name in (STANDARD, STANDARD_COPIES) if name + fused in steps]
        if standard and BOUND + fused in steps:
            timed = [name + fused for name in OVERLAPS if name + fused in steps]
            size, best, bound = load["micro_batch"], min(standard), steps[BOUND + fused]
            points += [Point(name, world, size, best, steps[name], bound) for name in timed]
    if not points:
        hint = f"fcsd bench step --variants {STANDARD},{OVERLAPPED},{BOUND}"
        raise BadInputError(f"{path} has not timed {STANDARD}, {OVERLAPPED} and {BOUND}", hint)
    return conditions, points


def to_text(conditions: dict[str, Any], points: list[Point]) -> str:
    """Formats the conditions that the runs share, and a line for each variant and world size."""
    lines = [
        ", ".join(f"{name} {value}" for name, value in conditions.items()),
        f"{'':20s} {'world':>5s} {'micro-batch':>11s} {STANDARD + ' ms':>12s} {OVERLAPPED + ' ms':>14s} "
        f"{'bound ms':>9s} {'speed-up':>9s} {'at most':>8s}",
    ]
    for point in points:
        times = f"{point.standard:12.1f} {point.overlapped:14.1f} {point.bound:9.1f}"
        speeds = f"{point.speed_up:9.3f} {point.most:8.3f}"
        lines.append(f"{point.variant:20s} {point.world:5d} {point.micro_batch:11d} {times} {speeds}")
    return "\n".join(lines)


def to_json(conditions: dict[str, Any], points: list[Point]) -> dict[str, Any]:
    """The conditions and the points as data that can be written as JSON; times are in ms."""
    rows = [{**vars(point), "speed_up": point.speed_up, "bound_speed_up": point.most} for point in points]
    return {"workload": conditions, "points": rows}


def draw(conditions: dict[str, Any], points: list[Point], path: Path) -> None:
    """Writes a PNG with the speed-up at each world size; the bound's speed-up is a dashed line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = {point.world: point.micro_batch for point in sorted(points, key=lambda point: point.world)}
    places = {world: place for place, world in enumerate(sizes)}
    lines: dict[str, dict[int, float]] = defaultdict(dict)  # name -> place -> speed-up
    for point in points:
        lines[point.variant][places[point.world]] = point.speed_up
    for point in points:
        lines[BOUND + point.fused][places[point.world]] = point.most
    for name, line in lines.items():
        bound = name.removesuffix(FUSED) == BOUND
        axes.plot(list(line), list(line.values()), "o--" if bound else "o-", label=f"bound: {name}" if bound else name)
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.margins(x=0.12)
    axes.set_xticks(list(places.values()), [f"{world}\nmicro-batch {size}" for world, size in sizes.items()])
    axes.set_xlabel("GPUs = expert-parallel ranks")
    axes.set_ylabel("step speed-up over the standard wiring")
    title = "{shape}, {layers} layers, {global batch} sequences of {seq}, {router} router".format_map(conditions)
    axes.set_title(title, loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=len(lines), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Compares the speed-up of several world sizes at one global batch, as FarSkip's Figure 5 does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="step.json files, one of each world size")
    parser.add_argument("--picture", type=Path, help="draw speed-up over world size into this PNG")
    given = parser.parse_args()
    conditions, points = read(given.files)
    print(to_text(conditions, points))
    if given.picture is not None:
        draw(conditions, points, given.picture)


if __name__ == "__main__":
    main()
