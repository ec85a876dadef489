"""Shows results: a table in the layout of Table 1, a table with standard errors, a table of differences, and bars."""

import json
from collections.abc import Sequence
from pathlib import Path

from fcsd import markdown
from fcsd.disk import write_picture, write_text
from fcsd.eval.compare import Comparison, Difference, not_above_chance
from fcsd.eval.results import COMPARISON, Result, in_mean, is_accuracy, shown, shown_answers


def report(results: Sequence[Result], out: Path, comparisons: Sequence[Comparison], *, margin: float = 1.0) -> None:
    """Write ``comparison.json``, ``table.md`` and ``bars.png`` into ``out``."""
    verdicts = [comparison.sentence(margin) for comparison in comparisons]
    out.mkdir(parents=True, exist_ok=True)
    data = json.dumps([comparison.to_json(margin) for comparison in comparisons], indent=2)
    write_text(out / COMPARISON, data + "\n")
    parts = [table_1(results), plain_table(results), answer_table(results), difference_table(comparisons, margin)]
    parts += verdicts
    write_text(out / "table.md", "\n\n".join(filter(None, parts)) + "\n")
    draw_bars(results, out / "bars.png")


def table_1(results: Sequence[Result]) -> str:
    """Markdown in the layout of FarSkip Table 1: a row per model, a column per benchmark, points.

    Benchmarks on which the baseline is not above chance are marked by a star and left out of the average. What is no
    part of the average in any case stands behind it.
    """
    columns, models = _axes(results)
    unknown = {result["column"] for result in results if result["baseline"] and not_above_chance(result)}
    cells = {(result["model"], result["column"]): shown(result)[0] for result in results}
    counted = [column for column in columns if any(in_mean(r) for r in results if r["column"] == column)]
    beside = columns[len(counted) :]
    head = ["Model", *(f"{column}*" if column in unknown else column for column in counted), "Avg", *beside]
    body = []
    for model in models:
        own = [result for result in results if result["model"] == model and in_mean(result)]
        own = [result for result in own if result["column"] not in unknown]
        average = f"{100 * sum(result['value'] for result in own) / len(own):.1f}" if own else "-"
        body.append([model, *(cells[model, c] for c in counted), average, *(cells[model, c] for c in beside)])
    return markdown.table(head, body)


def plain_table(results: Sequence[Result]) -> str:
    """Markdown with a row per benchmark and a column per model, each value with its standard error."""
    columns, models = _axes(results)
    by_cell = {(result["model"], result["column"]): result for result in results}
    body = []
    for column in columns:
        cells = [by_cell[model, column] for model in models]
        values = [" ± ".join(shown(result)) for result in cells]
        body.append([column, cells[0]["metric"], str(cells[0]["n"]), *values])
    return markdown.table(["Task", "Metric", "n", *models], body)


def answer_table(results: Sequence[Result]) -> str:
    """Markdown with a row per benchmark whose answers are generated and a column per model: how long its answers are,
    and how many do not end. Empty without such a benchmark.

    A model may keep its score and yet ramble.
    """
    generated = [result for result in results if shown_answers(result)]
    if not generated:
        return ""
    columns, models = _axes(generated)
    by_cell = {(result["model"], result["column"]): shown_answers(result) for result in generated}
    body = [[column, *(by_cell.get((model, column), "-") for model in models)] for column in columns]
    return markdown.table(["Answers", *models], body)


def difference_table(comparisons: Sequence[Comparison], margin: float) -> str:
    """Markdown with a row per benchmark and a column per model: its difference; with an untrained conversion, also its
    recovery ("won back").

    The difference is in points from the baseline, with its paired standard error and the verdict against ``margin``;
    that of a perplexity or a loss is in nats, without a verdict. The recovery is 0 at the floor (chance or the
    untrained conversion) and 1 at the baseline. Benchmarks beside the mean come after it.
    """
    first = comparisons[0]
    names = [task.column for task in _points(first)] + [f"{loss.column}, nats per {loss.unit}" for loss in first.losses]
    head, columns = [f"Minus {first.baseline}"], [names]
    for comparison in comparisons:
        points, losses = _points(comparison), comparison.losses
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
            columns.append(["-" if one is None else f"{100 * one[0]:.1f} ± {100 * one[1]:.1f} %" for one in recoveries])
    return markdown.table(head, list(zip(*columns, strict=True)))


def _points(comparison: Comparison) -> list[Difference]:
    """The differences in points: the benchmarks, their mean, and those that stand beside it."""
    counted = [task for task in comparison.tasks if not task.beside]
    mean = [] if comparison.overall is None else [comparison.overall]
    return [*counted, *mean, *(task for task in comparison.tasks if task.beside)]


def _verdict(task: Difference, margin: float) -> str:
    return "at chance, not counted" if task.at_chance else task.verdict(margin)


def draw_bars(results: Sequence[Result], path: Path) -> None:
    """A PNG of bars grouped by benchmark, standard errors as whiskers, chance as a short line."""
    from matplotlib.figure import Figure

    results = [result for result in results if is_accuracy(result)]
    columns, models = _axes(results)
    figure = Figure(figsize=(max(6.0, 1.2 * len(columns)), 3.6), layout="constrained")
    axes = figure.add_subplot()
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
    write_picture(path, figure)


def _axes(results: Sequence[Result]) -> tuple[list[str], list[str]]:
    """The columns, those that no mean counts last, and the models, in order of appearance."""
    columns = dict.fromkeys(r["column"] for r in sorted(results, key=in_mean, reverse=True))
    return list(columns), list(dict.fromkeys(result["model"] for result in results))
