"""Writes a study as tables like those of FlashCommunication V2, with the bits on the wire, and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.formats import bandwidths
from studies.formats.bandwidths import Speeds
from studies.formats.plan import TABLE_7, TABLE_7_WITHOUT, TABLES, Row, Table

from fcsd import markdown

_METHODS = {
    "rtn": "tab:blue",
    "rtn, int scales": "tab:cyan",
    "sr": "tab:red",
    "hadamard": "tab:green",
    "logfmt": "gray",
}


def to_text(found: dict[str, Any], all_reduce: Speeds | None = None, exchange: Speeds | None = None) -> str:
    """All tables of a study, in Markdown, in the order of the paper's numbers.

    Args:
        found: a stored study, such as ``wires_quality.json``.
        all_reduce, exchange: what fcsd's collectives reached, for the tables 9 and 10; see ``bandwidths``.
    """
    parts = [
        f"Without quantised communication the perplexity of `{found['model']}` is {found['perplexity']:.3f}, on "
        f"{found['tokens']} tokens of {found['documents']} documents. The all-reduce has {found['tp_degree']} ranks."
    ]
    sections = {table.number: [f"Table {table.number}: {table.title}", _perplexities(found, table)] for table in TABLES}
    if found["scores"]:
        sections[7] = ["Table 7: All-reduce, scores of tasks", _scores(found)]
    sections[9] = ["Table 9: All-reduce, speed over bf16", bandwidths.to_text(bandwidths.TABLE_9, all_reduce or {})]
    sections[10] = ["Table 10: All-to-all, speed over bf16", bandwidths.to_text(bandwidths.TABLE_10, exchange or {})]
    for number in sorted(sections):
        title, table = sections[number]
        parts += [f"### {title}", table]
    for direction in dict.fromkeys(piece["direction"] for piece in found["losses"]):
        parts += [f"### Best formats by size: {direction}", _best(found, direction)]
    return "\n\n".join(parts)


def pareto(pieces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pieces of one direction that no other piece beats: no other is as small and loses less. Largest first."""
    best: list[dict[str, Any]] = []
    for piece in sorted(pieces, key=lambda piece: (piece["bits_on_the_wire"], piece["nats"])):
        if not best or piece["nats"] < best[-1]["nats"]:
            best.append(piece)
    return best[::-1]


def _perplexities(found: dict[str, Any], table: Table) -> str:
    measured = {piece["format"]: piece for piece in found["losses"] if piece["direction"] == table.direction}
    head = ["Method", "Format", "Bits as sent", "Perplexity", "Nats per token", f"Paper: {table.model}"]
    body = [[row.label, f"`{row.format}`", *_loss(measured[row.format]), _paper(row)] for row in table.rows]
    return markdown.table(head, body, left=2)


def _loss(piece: dict[str, Any]) -> list[str]:
    change = f"{piece['nats']:+.4f} ± {piece['stderr']:.4f}"
    return [f"{piece['bits_on_the_wire']:g}", f"{piece['perplexity']:.3f}", change]


def _paper(row: Row) -> str:
    if row.paper is None:
        return "-"
    return f"{row.paper:.0e}".replace("e+0", "e") if row.paper >= 1000 else f"{row.paper:g}"


def _scores(found: dict[str, Any]) -> str:
    columns = list(found["scores"][0]["scores"])
    rows = [Row("No wire", "-", TABLE_7_WITHOUT), *TABLE_7]
    body = []
    for row, measured in zip(rows, found["scores"], strict=True):
        scores = measured["scores"]
        values = [f"{100 * scores[column]['value']:.1f}" for column in columns]
        change = " ± ".join(f"{100 * part:.1f}" for part in scores["Avg"]["change"]) if measured["format"] else "-"
        bits = f"{measured['bits_on_the_wire']:g}" if measured["format"] else "16"
        body.append([row.label, f"`{row.format}`", bits, *values, change, f"{row.paper:.2f}"])
    head = ["Method", "Format", "Bits as sent", *columns, "Avg minus no wire", "Paper's Avg: Llama-3-8B"]
    return markdown.table(head, body, left=2)


def _best(found: dict[str, Any], direction: str) -> str:
    best = pareto([piece for piece in found["losses"] if piece["direction"] == direction])
    return markdown.table(
        ["Format", "Bits as sent", "Perplexity", "Nats per token"],
        [[f"`{piece['format']}`", *_loss(piece)] for piece in best],
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """A PNG with a panel for each direction: nats per token over bits on the wire, and a line through the best formats.

    The vertical axis is linear below 0.01 nats and logarithmic above. Whiskers are paired standard errors.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(piece["direction"] for piece in found["losses"]))
    figure = Figure(figsize=(4.4 * len(directions), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for place, direction in enumerate(directions, 1):
        axes = figure.add_subplot(1, len(directions), place)
        pieces = [piece for piece in found["losses"] if piece["direction"] == direction]
        for method, colour in _METHODS.items():
            own = [piece for piece in pieces if _method(piece["format"]) == method]
            bits, nats = ([piece[key] for piece in own] for key in ("bits_on_the_wire", "nats"))
            errors = [piece["stderr"] for piece in own]
            axes.errorbar(bits, nats, errors, color=colour, marker="o", markersize=4, linestyle="none", label=method)
        best = pareto(pieces)
        axes.plot([p["bits_on_the_wire"] for p in best], [p["nats"] for p in best], color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.axhline(0, color="black", linestyle="dotted", linewidth=0.8)
        axes.set_title(direction)
        axes.set_xlabel("bits on the wire per value")
        axes.set_ylabel("nats per token above no wire")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def _method(format: str) -> str:
    baseline = next((name for name in ("hadamard", "logfmt") if format.startswith(name)), None)
    if baseline is not None:
        return baseline
    if ":sr" in format:
        return "sr"
    return "rtn, int scales" if format.endswith(":int") else "rtn"
