"""Tables of ways to sum: which way a step has, and what is not a table for this engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from fcsd.errors import BadInputError, ConfigError
from fcsd.parallel.all_reduce.ways import Way, Ways, read_ways

TABLE: dict[str, Any] = {
    "version": 1, "user": "plugin", "tp": 2, "wiring": "ladder", "model": "llama3-8b", "command": "fcsd bench serve",
    "decode": [{"from": 4, "reduce": "vllm", "travels": True}, {"from": 16, "reduce": "symmetric", "travels": False}],
    "prefill": [{"from": 8192, "reduce": "quantised:int8", "travels": True}],
}  # fmt: skip


def write(folder: Path, table: Any) -> str:
    path = folder / "table.json"
    path.write_text(table if isinstance(table, str) else json.dumps(table))
    return str(path)


def test_a_way_holds_from_its_size_to_the_next_one(tmp_path: Path) -> None:
    ways = read_ways(write(tmp_path, TABLE), 2)
    assert [ways.of("decode", n) for n in (3, 4, 15, 16, 999)] == [
        Way("vllm", False), Way("vllm"), Way("vllm"), Way("symmetric", False), Way("symmetric", False),
    ]  # fmt: skip
    assert [ways.of("prefill", n).reduce for n in (4, 8191, 8192)] == ["vllm", "vllm", "quantised:int8"]
    assert ways.backends == ("vllm", "symmetric", "quantised:int8")
    assert ways.to_rows() == {step: TABLE[step] for step in ("decode", "prefill")}
    assert read_ways("symmetric") == Ways(Way("symmetric")) and Ways(Way("vllm")).of("decode", 1).travels
    ways = read_ways(write(tmp_path, TABLE | {"decode": []}))
    assert ways.of("decode", 1) == Way("vllm", False), "what a table does not know sums at once"


def row(**changes: Any) -> dict[str, Any]:
    return TABLE | {"decode": [{"from": 1, "reduce": "vllm", "travels": True} | changes]}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("{", "Expecting property name"),
        ([], "has not the keys of a table of version 1"),
        (TABLE | {"version": 2}, "has not the keys of a table of version 1"),
        (TABLE | {"news": 1}, "has not the keys of a table of version 1"),
        ({key: TABLE[key] for key in TABLE if key != "prefill"}, "prefill is missing"),
        (TABLE | {"user": "engine"}, "it was measured for the engine, and this is the plugin"),
        (TABLE | {"tp": 4}, "it was measured with --gpus 4, and there are 2 ranks"),
        (TABLE | {"decode": {}}, "decode is not a list"),
        (TABLE | {"decode": [[1, "vllm"]]}, 'a row of decode has not the keys "from", "reduce" and "travels"'),
        (TABLE | {"decode": TABLE["decode"][::-1]}, "the rows of decode do not ascend at 4 tokens"),
        (row(**{"from": 0}), "a row of decode has a value of another type"),
        (row(travels=1), "a row of decode has a value of another type"),
        (row(reduce="fast"), "unknown all-reduce backend 'fast'"),
        (row(reduce="nccl"), "unknown all-reduce backend 'nccl'"),
        (row(reduce="none"), "none gives wrong results"),
    ],
)
def test_what_is_no_table_for_this_is_refused_in_one_line(tmp_path: Path, table: Any, said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        read_ways(write(tmp_path, table), 2)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value.hint) == "Measure one: fcsd bench serve MODEL --gpus 2 --table FILE.json"


def test_a_file_that_is_missing_and_a_backend_that_is_unknown(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        read_ways(str(tmp_path / "no.json"))
    with pytest.raises(ConfigError, match="unknown all-reduce backend"):
        read_ways("table.txt")
