"""Shows results: a table in the layout of Table 1, a table with standard errors, a table of differences, and bars."""

import json
from collections.abc import Sequence
from pathlib import Path

from fcsd import markdown
from fcsd.disk import write_text
from fcsd.eval.compare import Comparison, Difference, not_above_chance
from fcsd.eval.perplexity import HELD_OUT
from fcsd.eval.results import COMPARISON, Result, is_accuracy, shown


def report(results: Sequence[Result], out: Path, comparisons: Sequence[Comparison], *, margin: float = 1.0) -> None:
    """Write ``comparison.json``, ``table.md`` and ``bars.png`` into ``out``."""
    verdicts = [comparison.sentence(margin) for comparison in comparisons]
    out.mkdir(parents=True, exist_ok=True)
    data = json.dumps([comparison.to_json(margin) for comparison in comparisons], indent=2)
    write_text(out / COMPARISON, data + "\n")
    parts = [table_1(results), plain_table(results, comparisons), difference_table(comparisons, margin), *verdicts]
    write_text(out / "table.md", "\n\n".join(filter(None, parts)) + "\n")
    draw_bars(results, out / "bars.png")


def table_1(results: Sequence[Result]) -> str:
    """Markdown in the layout of FarSkip Table 1: a row per model, a column per benchmark, points.

    Benchmarks on which the baseline is not above chance are marked by a star and left out of the average.
    """
    columns, models = _axes(results)
    unknown = {result["column"] for result in results if result["baseline"] and not_above_chance(result)}
    cells = {(result["model"], result["column"]): shown(result)[0] for result in results}
    benchmarks = [column for column in columns if column != HELD_OUT]
    named = [f"{column}*" if column in unknown else column for column in benchmarks]
    head = ["Model", *named, "Avg", *columns[len(benchmarks) :]]
    body = []
    for model in models:
        own = [result for result in results if result["model"] == model and is_accuracy(result)]
        own = [result for result in own if result["column"] not in unknown]
        average = f"{100 * sum(result['value'] for result in own) / len(own):.1f}" if own else "-"
        scores = [cells[model, column] for column in benchmarks]
        body.append([model, *scores, average, *(cells[model, c] for c in columns[len(benchmarks) :])])
    return markdown.table(head, body)


def plain_table(results: Sequence[Result], comparisons: Sequence[Comparison] = ()) -> str:
    """Markdown with a row per benchmark and a column per model, each value with its standard error.

    If models were scored under quantised communication, a row says how many bits per value each direction took. The
    last row is the share of the untrained conversion's increase in held-out loss that training removed.
    """
    columns, models = _axes(results)
    by_cell = {(result["model"], result["column"]): result for result in results}
    body = []
    for column in columns:
        cells = [by_cell[model, column] for model in models]
        values = [" ± ".join(shown(result)) for result in cells]
        body.append([column, cells[0]["metric"], str(cells[0]["n"]), *values])
    if any(result.get("wire") is not None for result in results):
        body.append(["Bits as sent", "", "", *(_bits(by_cell[model, columns[0]]) for model in models)])
    won = {c.model: c.loss.recovery for c in comparisons if c.loss is not None and c.loss.recovery is not None}
    if won:
        shares = [_percent(*won[model]) if model in won else "-" for model in models]
        body.append(["Lost loss won back", "", "", *shares])
    return markdown.table(["Task", "Metric", "n", *models], body)


def difference_table(comparisons: Sequence[Comparison], margin: float) -> str:
    """Markdown with a row per benchmark and a column per model: its difference; with an untrained conversion, also its
    recovery ("won back").

    The difference is in points from the baseline, with its paired standard error and the verdict against ``margin``;
    a perplexity's is in nats, without a verdict. The recovery is 0 at the floor (chance or the untrained conversion)
    and 1 at the baseline. The text is empty if there are no benchmarks.
    """
    first = comparisons[0]
    names = [*(task.column for task in first.tasks), *(["Avg"] if first.overall else [])]
    names += [f"{loss.column}, nats per {loss.unit}" for loss in first.perplexities]
    if not names:
        return ""
    head, columns = [f"Minus {first.baseline}"], [names]
    for comparison in comparisons:
        points = [*comparison.tasks, *([comparison.overall] if comparison.overall else [])]
        losses = comparison.perplexities
        head.append(comparison.model)
        columns.append(
            [
                *(f"{task.points:+.1f} ± {task.stderr:.1f}: {_verdict(task, margin)}" for task in points),
                *(f"{loss.nats:+.4f} ± {loss.stderr:.4f}" for loss in losses),
            ]
        )
        recoveries = [found.recovery for found in (*points, *losses)]
        if any(recovery is not None for recovery in recoveries):
            head.append("won back")
            columns.append(["-" if recovery is None else _percent(*recovery) for recovery in recoveries])
    return markdown.table(head, list(zip(*columns, strict=True)))


def _verdict(task: Difference, margin: float) -> str:
    return "at chance, not counted" if task.at_chance else task.verdict(margin)


def draw_bars(results: Sequence[Result], path: Path) -> None:
    """A PNG of bars grouped by benchmark, standard errors as whiskers, chance as a short line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = [result for result in results if is_accuracy(result)]
    columns, models = _axes(results)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 * len(columns)), 3.6), layout="constrained")
    width = 0.8 / max(1, len(models))
    for number, model in enumerate(models):
        own = {result["column"]: result for result in results if result["model"] == model}
        places = [index + (number - (len(models) - 1) / 2) * width for index in range(len(columns))]
        values = [100 * own[column]["value"] for column in columns]
        errors = [100 * own[column]["stderr"] for column in columns]
        axes.bar(places, values, width, yerr=errors, label=model, error_kw={"linewidth": 0.8})
    chances = {result["column"]: result["chance"] for result in results if result["chance"] is not None}
    for index, column in enumerate(columns):
        if column in chances:
            axes.hlines(chances[column], index - 0.45, index + 0.45, colors="black", linestyles="dotted")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylabel("points")
    figure.legend(loc="outside upper center", fontsize="small", ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _bits(result: Result) -> str:
    """The bits on the wire per value in each direction, or ``-``."""
    if result.get("wire") is None:
        return "-"
    return ", ".join(f"{direction} {bits:g}" for direction, bits in result["wire"]["bits_on_the_wire"].items())


def _percent(share: float, stderr: float) -> str:
    return f"{100 * share:.1f} ± {100 * stderr:.1f} %"


def _axes(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """The columns, held-out loss last, and the models, in order of appearance."""
    columns = list(dict.fromkeys(result["column"] for result in results))
    return sorted(columns, key=lambda c: c == HELD_OUT), list(dict.fromkeys(result["model"] for result in results))
