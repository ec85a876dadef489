"""What ``fcsd bench serve`` prints: the verdict, then a line for each variant, and what was not run."""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from fcsd.bench import runner
from fcsd.bench.serve import figures
from fcsd.bench.serve.figures import Figure, Rounds
from fcsd.bench.serve.variants import ORIGINAL
from fcsd.disk import write_picture


def rounds_of(found: Mapping[str, Any], role: str) -> dict[str, Rounds]:
    """The times of the variants of a role, by name."""
    return {name: row["rounds"] for name, row in found["variants"].items() if row["role"] == role and row["rounds"]}


def ratios_of(found: Mapping[str, Any]) -> dict[str, dict[Figure, float]]:
    """For each wired variant, its speed over that of the best original; see ``figures.ratios``."""
    originals = rounds_of(found, "original")
    return {name: figures.ratios(rounds, originals) for name, rounds in rounds_of(found, "wired").items()}


def says_nothing(found: Mapping[str, Any]) -> dict[Figure, float]:
    """The figures that the verdict leaves out; see ``figures.says_nothing``.

    The bound is that of the ranks over which the plain original sums. Other originals sum nothing, or over fewer ranks,
    and may well be faster than it: that is a result, and not noise.
    """
    originals = rounds_of(found, "original")
    return figures.says_nothing(
        rounds_of(found, "bound"), {name: originals[name] for name in (ORIGINAL,) if name in originals}
    )


def judged_of(found: Mapping[str, Any]) -> dict[str, dict[Figure, float]]:
    """``ratios_of`` without the figures that say nothing."""
    noise = says_nothing(found)
    return {
        name: {figure: ratio for figure, ratio in own.items() if figure not in noise}
        for name, own in ratios_of(found).items()
    }


def text(found: Mapping[str, Any], heal_hours: float | None = None, gpus: int = 1) -> str:
    """Everything that is printed: the verdict first.

    Args:
        found: ``variants``, ``missing`` and ``notes``; see ``under_vllm.bench``.
        heal_hours: GPU-hours of healing, for the break-even.
        gpus: GPUs that serve.
    """
    lines = []
    originals, ratios = rounds_of(found, "original"), judged_of(found)
    for name, ratio in ratios.items():
        lines.append(figures.verdict(name, ratio))
    if found.get("tables"):
        lines.append(f"by its table: each size in its fastest way, {_chosen_by(found)}")
    if not ratios:
        lines.append("no converted model was measured beside the original")
    if len(originals) > 1:
        winners = {winner for _, winner in figures.best(originals).values()}
        lines.append(f"compared with the fastest original for each figure: {'; '.join(sorted(winners))}")
    if ratios and (absent := not_compared(found)):
        lines.append(f"not compared with (reasons below): {'; '.join(absent)}")
    for name, ratio in ratios.items():
        if heal_hours is not None and (speed := figures.overall(ratio)) is not None:
            lines.append(f"{name}: {figures.break_even(heal_hours, speed, gpus)}")
    lines += [
        f"{title(figure)}: the bound, which sends nothing, is slower than the original here ({ratio:.2f}x): other work "
        "of the host hides the sums, so this figure says nothing; repeat it on a quiet host, with more --rounds"
        for figure, ratio in says_nothing(found).items()
    ]
    lines += [*load_verdicts(found), ""]
    if any(row["rounds"] for row in found["variants"].values()):
        lines += [table(found), ""]
    if loads := load_table(found):
        lines += [loads, ""]
    lines += [f"{name} failed: {row['failed']}" for name, row in found["variants"].items() if "failed" in row]
    lines += [f"not run: {name}: {missing.why}" for name, missing in found["missing"].items()]
    return "\n".join([*lines, *found["notes"]])


def _chosen_by(found: Mapping[str, Any]) -> str:
    """By which rounds a table chose its ways; see ``choice.by_table``."""
    ways = [row["rounds"] for row in found["variants"].values() if row["role"] in ("wired", "way")]
    if max(len(own) for rounds in ways for own in rounds.values()) > 1:
        return "which the other rounds chose for each round"
    return "chosen by the same only round, so that line flatters the table: repeat it with more --rounds"


def not_compared(found: Mapping[str, Any]) -> list[str]:
    """What a user could serve instead of converting elsewhere, and did not run here: the ratios say less without it."""
    return [
        name.removeprefix(f"{ORIGINAL}, ") for name, missing in found["missing"].items() if not missing.needless
    ] + [
        name.removeprefix(f"{ORIGINAL}, ")
        for name, row in found["variants"].items()
        if row["role"] == "original" and "failed" in row
    ]


def table(found: Mapping[str, Any]) -> str:
    """Median milliseconds of each figure, and for all but the best original the speed over it in brackets."""
    against = figures.best(rounds_of(found, "original"))
    rows: dict[str, dict[str, str | None]] = {}
    for name, row in found["variants"].items():
        cells: dict[str, str | None] = {}
        for figure, time in figures.medians(row["rounds"]).items():
            cells[title(figure)] = f"{time:.4g}"
            if figure in against and against[figure][1] != name:
                cells[title(figure)] = f"{time:.4g} ({against[figure][0] / time:.2f}x)"
        if cells:
            rows[name if row["role"] != "bound" else f"{name} (wrong results)"] = cells
    return runner.table(rows, "ms")


def title(figure: Figure) -> str:
    """The title of a column."""
    kind, size = figure
    return {"decode": f"step, batch {size}", "prefill": f"first token, {size}", "peak": "request at peak"}[kind]


def load_table(found: Mapping[str, Any]) -> str:
    """A line for each load and variant; empty if no load was measured."""
    rows: dict[str, dict[str, str | None]] = {}
    for share, originals in _originals_under(found).items():
        for name, row in found["variants"].items():
            if own := row.get("loads", {}).get(share):
                faster = figures.load_ratios(own, originals)
                cells = {figures.LOAD[key]: f"{own[key]:.4g} ({ratio:.2f}x)" for key, ratio in faster.items()}
                rows[f"{share}, {name}"] = {**cells, "requests": str(own["requests"])}
    return runner.table(rows, "load, ms") if rows else ""


def load_verdicts(found: Mapping[str, Any]) -> list[str]:
    """A sentence for each load and wired variant, beside the fastest original of each time."""
    told = []
    for share, originals in _originals_under(found).items():
        for name, row in found["variants"].items():
            own = row.get("loads", {}).get(share)
            if row["role"] == "wired" and own:
                told.append(
                    figures.load_verdict(
                        f"{name} under load {share}", own, figures.load_ratios(own, originals), originals
                    )
                )
    return [line for line in told if line is not None]


def _originals_under(found: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What the originals have under each load, by its share of the peak."""
    rows = [row.get("loads", {}) for row in found["variants"].values() if row["role"] == "original"]
    return {share: [own[share] for own in rows if share in own] for share in dict.fromkeys(chain(*rows))}


def draw(found: Mapping[str, Any], title_: str, path: Path) -> None:
    """A PNG with a group of bars for each figure: the speed of every variant over the best original."""
    from matplotlib.figure import Figure as Picture

    originals = rounds_of(found, "original")
    shown = {name: row for name, row in found["variants"].items() if row["rounds"]}
    columns = list(figures.best(originals))
    picture = Picture(figsize=(max(6.4, 1.1 * len(columns) + 2), 4.2), layout="constrained")
    axes = picture.add_subplot()
    width = 0.8 / max(1, len(shown))
    for number, (name, row) in enumerate(shown.items()):
        ratios = figures.ratios(row["rounds"], originals)
        places = [n + (number - (len(shown) - 1) / 2) * width for n, figure in enumerate(columns) if figure in ratios]
        heights = [ratios[figure] for figure in columns if figure in ratios]
        axes.bar(places, heights, width, label=name, hatch="//" if row["role"] == "bound" else None)
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.set_xticks(range(len(columns)), [title(figure).replace(", ", "\n") for figure in columns], fontsize=8)
    axes.set_ylabel("x the best original")
    picture.suptitle(title_, fontsize=10)
    picture.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    write_picture(path, picture)
