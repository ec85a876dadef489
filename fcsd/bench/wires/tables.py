"""Writes a study as tables like those of FlashCommunication V2, each row with its bits on the wire, and as a picture.

The tables 9 and 10 of the paper are bandwidths on GPUs. The study does not measure any. In their place stands what
follows from the formats: how many times fewer bytes travel than in bf16, beside the gains that the paper measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcsd import markdown
from fcsd.bench.wires.formats import studied
from fcsd.bench.wires.plan import TABLE_7, TABLE_7_WITHOUT, TABLES, Row, Table

# The formats of the paper's tables 9 and 10, and its bandwidths in GB/s: of NCCL in bf16, then in these formats.
_SENT = ("int8", "int6", "int5", "int4:g32", "int3:g32", "int2:g32:sr")
_TABLE_9 = {
    "L40, two steps": (10.43, 9.17, 12.05, 14.28, 15.00, 16.13, 16.19),
    "L40, by nodes": (10.43, 14.95, 19.53, 23.05, 24.22, 28.80, 27.01),
    "L40, by nodes, in chunks": (10.43, 19.44, 25.24, 29.75, 30.84, 30.24, 33.39),
    "A100": (89.15, 123.32, 137.72, 147.68, 148.61, 153.38, 122.46),
    "H800": (94.18, 128.78, 150.21, 173.38, 185.27, 187.31, 151.97),
    "H20": (209.14, 214.32, 225.55, 240.59, 263.62, 260.35, 202.11),
}
_TABLE_10 = {
    "A100": (165.41, 183.99, 208.77, 212.15, 218.10, 206.22, 177.02),
    "H800": (169.76, 230.51, 276.82, 300.20, 341.87, 290.50, 259.61),
    "H20": (349.34, 323.52, 276.73, 289.06, 339.00, 290.33, 249.53),
}
_METHODS = {
    "rtn": "tab:blue",
    "rtn, int scales": "tab:cyan",
    "sr": "tab:red",
    "hadamard": "tab:green",
    "logfmt": "gray",
}


def to_text(found: dict[str, Any]) -> str:
    """All tables of a study, in Markdown.

    Args:
        found: the content of ``wires.json``.
    """
    parts = [
        f"Without a quantised wire the perplexity of `{found['model']}` is {found['perplexity']:.3f}, on "
        f"{found['tokens']} tokens of {found['documents']} documents. The all-reduce has {found['tp_degree']} ranks."
    ]
    for table in TABLES:
        parts += [f"### Table {table.number}: {table.title}", _perplexities(found, table)]
    if found["scores"]:
        parts += ["### Table 7: All-reduce, scores of tasks", _scores(found)]
    parts += ["### Table 9: All-reduce, bytes instead of bandwidth", _bytes(_TABLE_9)]
    parts += ["### Table 10: All-to-all, bytes instead of bandwidth", _bytes(_TABLE_10)]
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
    head = ["Method", "Format", "Bits on the wire", "Perplexity", "Nats per token", f"Paper: {table.model}"]
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
    head = ["Method", "Format", "Bits on the wire", *columns, "Avg minus no wire", "Paper's Avg: Llama-3-8B"]
    return markdown.table(head, body, left=2)


def _bytes(measured: dict[str, tuple[float, ...]]) -> str:
    bits = [studied(format).bits for format in _SENT]
    head = ["", *(f"`{format}`" for format in _SENT)]
    body = [
        ["Bits on the wire", *(f"{one:g}" for one in bits)],
        ["bf16 bytes / its bytes", *(f"{16 / one:.2f}" for one in bits)],
    ]
    body += [
        [f"Paper: {name}", *(f"{one / plain:.2f}" for one in others)] for name, (plain, *others) in measured.items()
    ]
    return markdown.table(head, body)


def _best(found: dict[str, Any], direction: str) -> str:
    best = pareto([piece for piece in found["losses"] if piece["direction"] == direction])
    return markdown.table(
        ["Format", "Bits on the wire", "Perplexity", "Nats per token"],
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
