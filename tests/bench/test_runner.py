"""The runner of benchmarks: figures become a table and a file."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from benchmarks.turns import ratio

from fcsd.bench.runner import set_aside, table, write
from fcsd.cli.bench import require_new_in
from fcsd.errors import ConfigError


def test_a_table_leaves_out_columns_without_a_cell() -> None:
    rows = {"fast": {"ms": "1.0", "GiB": None}, "slow": {"ms": "20.0", "x": ratio(1, 2, ".2f"), "GiB": None}}
    assert table(rows, "way").splitlines() == ["way     ms     x", "fast   1.0     -", "slow  20.0  0.50"]
    assert ratio(1, None) is ratio(1, 0) is None


def test_only_the_first_rank_writes_and_makes_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "new" / "found.json"
    write({"ms": 1}, path, rank=1)
    write({"ms": 1}, None)
    assert not path.parent.exists()
    write({"ms": 1}, path)
    assert json.loads(path.read_text()) == {"ms": 1}


def test_no_folder_of_a_user_stands_in_a_result(tmp_path: Path) -> None:
    """Also not one in an error of a server, or behind an option."""
    error = "[Errno 2] no file (/home/me/models/a.json), see https://docs.example/of/it or org/name"
    write({"command": ["--model=/home/me/models/b", "/scratch/c"], "missing": {"way": error}}, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["command"] == ["--model=b", "c"]
    assert found["missing"]["way"] == "[Errno 2] no file (a.json), see https://docs.example/of/it or org/name"


def test_what_an_interrupted_run_left_is_kept_under_one_number(tmp_path: Path) -> None:
    result = tmp_path / "step.json"
    for text, complete in (("{}", True), ('{"complete": true}', True), ('{"complete": false}', False)):
        result.write_text(text)
        (tmp_path / "overlapped").mkdir(exist_ok=True)
        with pytest.raises(ConfigError, match="exists") if complete else nullcontext():
            require_new_in(tmp_path, "step.json", "overlapped")
    (tmp_path / "step.1.json").touch()
    set_aside(result, "overlapped", "absent", rank=1)
    assert result.exists(), "another rank renames nothing"
    set_aside(result, "overlapped", "absent")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["overlapped.2", "step.1.json", "step.2.json"]
