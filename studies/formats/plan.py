"""The paper's tables of quality: for each a direction, the formats of its rows, and the paper's values.

Source: FlashCommunication V2. Tables 1 and 3 are about the all-reduce, and tables 2 and 8 about dispatch, all in
perplexity. Table 7 is about the all-reduce in the scores of tasks.
"""

from typing import Literal, NamedTuple

Direction = Literal["dispatch", "dispatch+combine", "all-reduce"]


class Row(NamedTuple):
    """One format in a table.

    Attributes:
        label: the method and width as the paper writes them.
        format: its name for ``Format.parse``, or that of a baseline of another work, such as ``hadamard4:g32``.
        paper: the paper's value for the table's model; None where the paper has none.
    """

    label: str
    format: str
    paper: float | None = None


class Table(NamedTuple):
    """One table of the paper.

    Attributes:
        number: its number in the paper.
        title: what it shows.
        direction: what travels over the quantised communication.
        model: the model of the paper's values.
        rows: the formats.
    """

    number: int
    title: str
    direction: Direction
    model: str
    rows: tuple[Row, ...]


_RTN_128 = ("int8", "int6", "int5", "int4:g128", "int3:g128", "int2:g128")
_SR_128 = tuple(f"int{bits}:g128:sr" for bits in (8, 6, 5, 4, 3, 2))


def _rows(method: str, formats: tuple[str, ...], paper: tuple[float, ...]) -> tuple[Row, ...]:
    widths = [format.partition(":")[0][-1] for format in formats]
    return tuple(Row(f"{method} INT{w}", f, p) for w, f, p in zip(widths, formats, paper, strict=True))


def _group_32(options: str = "", name: str = "int") -> tuple[str, ...]:
    return tuple(f"{name}{bits}:g32{options}" for bits in (4, 3, 2))


TABLES = (
    Table(
        1,
        "All-reduce, groups of 128, rounding to nearest",
        "all-reduce",
        "Llama-3-8B",
        _rows("RTN", _RTN_128, (8.89, 8.94, 9.07, 9.67, 13.72, 7e5)),
    ),
    Table(
        2,
        "Dispatch, groups of 128, rounding to nearest",
        "dispatch",
        "Qwen3-30B-A3B",
        _rows("RTN", _RTN_128, (9.65, 9.66, 9.7, 9.88, 10.61, 19.71)),
    ),
    Table(
        3,
        "All-reduce, groups of 32",
        "all-reduce",
        "Llama-3-8B",
        _rows("RTN", _group_32(), (9.2, 10.54, 40.59))
        + _rows("Hadamard", _group_32(name="hadamard"), (9.18, 10.47, 91.23))
        + _rows("LogFMT", _group_32(name="logfmt"), (9.3, 11.53, 1e3))
        + _rows("SR", _group_32(":sr"), (9.01, 9.57, 14.39)),
    ),
    Table(
        8,
        "Dispatch, groups of 128, and of 32 for the rows gs32",
        "dispatch",
        "Qwen3-30B-A3B",
        _rows("RTN", _RTN_128, (9.65, 9.66, 9.7, 9.88, 10.61, 19.71))
        + _rows("SR", _SR_128, (9.65, 9.65, 9.66, 9.71, 9.92, 11.55))
        + _rows("RTN gs32", _group_32(), (9.72, 9.99, 11.67))
        + _rows("SR gs32", _group_32(":sr"), (9.67, 9.75, 10.3)),
    ),
)

# Table 7: the scores of tasks with a quantised all-reduce. The paper's average over its five tasks is for Llama-3-8B.
TABLE_7 = (
    Row("RTN INT8", "int8", 72.53),
    Row("RTN INT6", "int6", 72.18),
    Row("RTN INT5", "int5", 71.80),
    Row("RTN INT4", "int4:g128", 71.11),
    Row("RTN INT3", "int3:g32", 62.56),
    Row("SR INT3", "int3:g32:sr", 67.72),
    Row("RTN INT2", "int2:g32", 47.30),
    Row("SR INT2", "int2:g32:sr", 61.80),
)
TABLE_7_WITHOUT = 72.76  # the paper's FP16
