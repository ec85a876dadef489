"""Results for people: Table 1's layout, a plain table with standard errors, a picture of bars."""

import json
from collections.abc import Sequence
from pathlib import Path

from fcsd.disk import write_text
from fcsd.eval.compare import Comparison, compare
from fcsd.eval.perplexity import HELD_OUT
from fcsd.eval.results import Result, is_accuracy, shown


def report(rows: Sequence[Result], out: Path, *, untrained: str | None = None, margin: float = 1.0) -> list[Comparison]:
    """Write ``comparison.json``, ``table.md`` and ``bars.png`` into ``out`` and return the comparisons.

    Raises:
        ConfigError: see ``compare``.
    """
    comparisons = compare(rows, untrained=untrained)
    verdicts = [comparison.sentence(margin) for comparison in comparisons]
    out.mkdir(parents=True, exist_ok=True)
    data = json.dumps([comparison.to_json(margin) for comparison in comparisons], indent=2)
    write_text(out / "comparison.json", data + "\n")
    parts = [table_1(rows), plain_table(rows, comparisons), difference_table(comparisons, margin), *verdicts]
    write_text(out / "table.md", "\n\n".join(filter(None, parts)) + "\n")
    draw_bars(rows, out / "bars.png")
    return comparisons


def table_1(rows: Sequence[Result]) -> str:
    """Markdown in the layout of FarSkip Table 1: a row per model, a column per benchmark, points."""
    columns, models = _axes(rows)
    cells = {(row["model"], row["column"]): shown(row)[0] for row in rows}
    benchmarks = [column for column in columns if column != HELD_OUT]
    head = ["Model", *benchmarks, "Avg", *columns[len(benchmarks) :]]
    body = []
    for model in models:
        own = [row for row in rows if row["model"] == model and is_accuracy(row)]
        average = f"{100 * sum(row['value'] for row in own) / len(own):.1f}" if own else "-"
        scores = [cells[model, column] for column in benchmarks]
        body.append([model, *scores, average, *(cells[model, c] for c in columns[len(benchmarks) :])])
    return markdown(head, body)


def plain_table(rows: Sequence[Result], comparisons: Sequence[Comparison] = ()) -> str:
    """Markdown with a row per benchmark and a column per model, each value with its standard error.

    The last row says which share of the held-out loss that the untrained conversion lost was won back.
    """
    columns, models = _axes(rows)
    by_cell = {(row["model"], row["column"]): row for row in rows}
    body = []
    for column in columns:
        cells = [by_cell[model, column] for model in models]
        values = [" ± ".join(shown(row)) for row in cells]
        body.append([column, cells[0]["metric"], str(cells[0]["n"]), *values])
    won = {c.model: c.loss.recovery for c in comparisons if c.loss is not None and c.loss.recovery is not None}
    if won:
        shares = [_percent(*won[model]) if model in won else "-" for model in models]
        body.append(["Lost loss won back", "", "", *shares])
    return markdown(["Task", "Metric", "n", *models], body)


def difference_table(comparisons: Sequence[Comparison], margin: float) -> str:
    """Markdown with a row per benchmark and two columns per model: its difference and what it won back.

    The difference is in points from the baseline, with its paired standard error and the verdict against ``margin``;
    won back is the share of the way from chance, or the untrained conversion, to the baseline. Empty without
    benchmarks.
    """
    head = [f"Minus {comparisons[0].baseline}"]
    columns = [[*(task.column for task in comparisons[0].tasks), "Avg"]]
    for comparison in comparisons:
        if comparison.overall is None:
            return ""
        tasks = [*comparison.tasks, comparison.overall]
        head += [comparison.model, "won back"]
        columns += [
            [f"{task.points:+.1f} ± {task.stderr:.1f}: {task.verdict(margin)}" for task in tasks],
            ["-" if task.recovery is None else _percent(*task.recovery) for task in tasks],
        ]
    return markdown(head, list(zip(*columns, strict=True)))


def draw_bars(rows: Sequence[Result], path: Path) -> None:
    """A PNG of bars grouped by benchmark, standard errors as whiskers, chance as a short line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if is_accuracy(row)]
    columns, models = _axes(rows)
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 * len(columns)), 3.6), layout="constrained")
    width = 0.8 / max(1, len(models))
    for number, model in enumerate(models):
        own = {row["column"]: row for row in rows if row["model"] == model}
        places = [index + (number - (len(models) - 1) / 2) * width for index in range(len(columns))]
        values = [100 * own[column]["value"] for column in columns]
        errors = [100 * own[column]["stderr"] for column in columns]
        axes.bar(places, values, width, yerr=errors, label=model, error_kw={"linewidth": 0.8})
    chances = {row["column"]: row["chance"] for row in rows if row["chance"] is not None}
    for index, column in enumerate(columns):
        if column in chances:
            axes.hlines(chances[column], index - 0.45, index + 0.45, colors="black", linestyles="dotted")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylabel("points")
    figure.legend(loc="outside upper center", fontsize="small", ncols=4, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _percent(share: float, stderr: float) -> str:
    return f"{100 * share:.1f} ± {100 * stderr:.1f} %"


def _axes(rows: Sequence[Result]) -> tuple[list[str], list[str]]:
    """Columns (held-out loss last) and models, in order of appearance."""
    columns = list(dict.fromkeys(row["column"] for row in rows))
    return sorted(columns, key=lambda c: c == HELD_OUT), list(dict.fromkeys(row["model"] for row in rows))


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose source lines up as well."""
    widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
    rule = [f"{'-' * (width - 1)}{'-' if i == 0 else ':'}" for i, width in enumerate(widths)]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, rule, *body]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
