"""Which way each step of a served model sums: in flight or at once, and by which backend.

A converted model can always sum at once, and computes the same function. So it need never be slower than its original:
a table of ways, which ``fcsd bench serve --table`` measures and writes, says for each number of tokens in a step what
was fastest. The plugin for vLLM reads it.

A way is chosen once for a whole step, by the tokens of the step. A CUDA graph covers steps of one number of tokens, so
no graph has two ways.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fcsd.errors import BadInputError, FcsdError
from fcsd.foreign_errors import reason_of
from fcsd.parallel.all_reduce.backends import backend_of, is_bound
from fcsd.strict_json import read_file

Step = Literal["decode", "prefill"]  # one token of each answer, as a graph covers it; or anything else
SUFFIX = ".json"  # of tables; no backend ends in it
VERSION = 1
USER, PLAIN = "plugin", "vllm"  # who reads tables, and what sums where one says nothing
_KEYS = {"version", "user", "tp", "wiring", "model", "command", "decode", "prefill"}


class Way(NamedTuple):
    """How the sums of a step are made.

    Attributes:
        reduce: the name of a backend, see ``backends``.
        travels: whether a sum is awaited where it is read; otherwise it is awaited where it starts. The bits are the
            same.
    """

    reduce: str
    travels: bool = True


Rows = tuple[tuple[int, Way], ...]  # the fewest tokens of a step, ascending, and its way


@dataclass(frozen=True)
class Ways:
    """The ways of all steps.

    Attributes:
        rest: the way of a step with fewer tokens than the first row has.
        decode: the ways of decoding steps. Each holds from its number of tokens to the next one.
        prefill: the ways of other steps.
    """

    rest: Way
    decode: Rows = ()
    prefill: Rows = ()

    def of(self, step: Step, tokens: int) -> Way:
        """The way of a step with so many tokens, those of padding among them."""
        found = self.rest
        for least, way in self.decode if step == "decode" else self.prefill:
            found = way if least <= tokens else found
        return found

    @property
    def backends(self) -> tuple[str, ...]:
        """The backends of all ways, each once."""
        ways = (self.rest, *(way for _, way in (*self.decode, *self.prefill)))
        return tuple(dict.fromkeys(way.reduce for way in ways))

    def to_rows(self) -> dict[str, list[dict[str, Any]]]:
        """The rows as a table has them."""
        lists: dict[str, Rows] = {"decode": self.decode, "prefill": self.prefill}
        return {step: [{"from": least, **way._asdict()} for least, way in rows] for step, rows in lists.items()}


def is_table(reduce: str) -> bool:
    """Whether a user has named a table of ways and not a backend."""
    return reduce.endswith(SUFFIX)


def read_ways(reduce: str, degree: int | None = None) -> Ways:
    """The ways that a user has named: a backend for all steps, or the file of a table.

    Args:
        reduce: the name of a backend, whose sums travel in every step; or a file that ends in ``.json``.
        degree: the number of ranks; None if it is not known yet.

    Raises:
        ConfigError: the backend is unknown.
        BadInputError: the file is no table, or one of another number of ranks.
    """
    if not is_table(reduce):
        backend_of(reduce, USER)
        return Ways(Way(reduce))
    try:
        table = read_file(Path(reduce))
        known = isinstance(table, dict) and type(table.get("version")) is int and not table.keys() - _KEYS
        if not known or table["version"] != VERSION:
            raise ValueError(f"it has not the keys of a table of version {VERSION}")
        if (made := table["user"]) != USER:
            raise ValueError(f"it was measured for the {made}, and this is the {USER}")
        if type(table["tp"]) is not int:
            raise ValueError("tp is not a number of ranks")
        if degree not in (None, table["tp"]):
            raise ValueError(f"it was measured with --gpus {table['tp']}, and there are {degree} ranks")
        rows = {step: _rows(table[step], step) for step in get_args(Step)}
    except (OSError, ValueError, KeyError, FcsdError) as error:
        why = f"{error.args[0]} is missing" if isinstance(error, KeyError) else reason_of(error)
        raise BadInputError(f"{reduce} is not a table of sums for this: {why}", _again(degree)) from None
    return Ways(Way(PLAIN, False), **rows)


def _again(degree: int | None) -> str:
    return f"Measure one: fcsd bench serve MODEL --gpus {degree or 'N'} --table FILE{SUFFIX}"


def _rows(given: Any, step: str) -> Rows:
    if not isinstance(given, list):
        raise ValueError(f"{step} is not a list")
    rows: list[tuple[int, Way]] = []
    for row in given:
        if not isinstance(row, dict) or row.keys() != {"from", "reduce", "travels"}:
            raise ValueError(f'a row of {step} has not the keys "from", "reduce" and "travels"')
        least, way = row["from"], Way(row["reduce"], row["travels"])
        if type(least) is not int or least < 1 or type(way.travels) is not bool or not isinstance(way.reduce, str):
            raise ValueError(f"a row of {step} has a value of another type: {json.dumps(row)}")
        if rows and least <= rows[-1][0]:
            raise ValueError(f"the rows of {step} do not ascend at {least} tokens")
        if is_bound(way.reduce, USER):
            raise ValueError(f"{way.reduce} gives wrong results")
        rows.append((least, way))
    return tuple(rows)
