"""Reports the results of a sweep: a table of its trials, and a figure of the metric over the tokens seen."""

from pathlib import Path
from typing import Any

from fcsd import markdown
from fcsd.disk import write_picture, write_text
from fcsd.distill.run.report import read_metrics

TABLE = "table.md"
PICTURE = "sweep.png"


def write_report(out: Path, record: dict[str, Any]) -> None:
    """Writes ``table.md`` and ``sweep.png`` into ``out``, beside ``sweep.json``."""
    rows = table(record)
    text = markdown.table(rows[0], rows[1:], left=len(rows[0]))
    write_text(out / TABLE, f"{text}\n\n![loss over tokens]({PICTURE})\n")
    draw(out, record)


def to_text(record: dict[str, Any]) -> str:
    """The table in aligned columns, and the directory of the full run if there is one."""
    rows = table(record)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, *([f"full run: {record['run']}"] if record["run"] else [])])


def table(record: dict[str, Any]) -> list[list[str]]:
    """A heading, and a row for each trial that ran: its values, stages, steps, tokens, metric and outcome."""
    entries = {name: record["trials"][name] for name in _order(record)}
    keys = list(next(iter(entries.values()))["values"]) if entries else []
    metric = f"{record['metric']}, mean of the last {record['window']} steps"
    rows = [[*keys, "stage", "steps", "tokens", metric, ""]]
    for name, entry in entries.items():
        stages = [number for number, stage in enumerate(record["stages"], 1) if name in stage["trials"]]
        wins = [str(number) for number in stages if record["stages"][number - 1]["chosen"] == name]
        outcome = f"best of stage {', '.join(wins)}" if wins else ""
        if entry["status"] == "done":
            length = [f"{entry['step']:,}", f"{entry['tokens']:,}", f"{entry['value']:.5g}"]
        else:
            length, outcome = ["", "", ""], ": ".join(filter(None, [entry["status"], entry.get("error")]))
        rows.append([*map(str, entry["values"].values()), ", ".join(map(str, stages)), *length, outcome])
    return rows


def draw(out: Path, record: dict[str, Any]) -> Path:
    """Draws ``sweep.png``: the metric of every trial over the tokens seen, with bold lines for the chosen trials.

    Returns: the path of the figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    chosen = {stage["chosen"] for stage in record["stages"]}
    for name in _order(record):
        run = Path(record["trials"][name]["run"])
        records = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        shown = [r for r in records if r["step"] <= record["steps"] and record["metric"] in r]
        tokens, values = [r["tokens"] for r in shown], [r[record["metric"]] for r in shown]
        marker = "." if len(shown) < 30 else None
        axes.plot(tokens, values, marker=marker, linewidth=2.5 if name in chosen else 1.0, label=name)
    axes.set_xlabel("tokens")
    axes.set_ylabel(record["metric"])
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")
    write_picture(out / PICTURE, figure)
    return out / PICTURE


def _order(record: dict[str, Any]) -> list[str]:
    """The names of the trials that ran, in the order of the stages."""
    names = dict.fromkeys(name for stage in record["stages"] for name in stage["trials"])
    return [name for name in names if name in record["trials"]]
