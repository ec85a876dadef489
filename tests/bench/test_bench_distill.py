"""The benchmark of the distillation step runs on CPUs as it does on GPUs; its table says where the time is."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks
from typer.testing import CliRunner

from fcsd.bench.distill.table import table
from fcsd.bench.distill.workload import VARIANTS, Load
from fcsd.cli.main import app
from fcsd.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


LOAD = Load("tiny", 2, 1, 32, rounds=2, steps=1, wires=("int8:g16",))


def timed(out: Path) -> dict[str, Any]:
    from fcsd.bench.distill.measure import bench

    return bench(LOAD, out)


def test_all_variants_are_timed_in_one_group_of_processes(tmp_path: Path) -> None:
    ranks = on_ranks(2, timed, tmp_path)
    assert all(isinstance(rank, dict) for rank in ranks), ranks
    result = json.loads((tmp_path / "distill.json").read_text())
    names = [*VARIANTS, "overlapped+int8:g16"]
    assert list(result["variants"]) == names and result["batch_tokens"] == 2 * 32
    for found in result["variants"].values():
        assert len(found["seconds"]) == len(found["data_wait"]) == 2 and math.isfinite(found["loss"])
        assert all(0 <= share <= 1 for share in found["data_wait"])
    # Loss terms are sums over all ranks, so both have the same.
    assert {name: found["loss"] for name, found in ranks[1]["variants"].items()} == {
        name: found["loss"] for name, found in result["variants"].items()
    }
    assert result["full_speed"] is None and "accounts" not in result  # they need a GPU
    lines = [line.split() for line in table(result).splitlines()[1:]]
    assert [name for name, *_ in lines] == names
    assert all(line[5] == "-" and line[7:] == ["-"] * 3 for line in lines), "no MFU, no trace and no peak memory"


def test_the_table_divides_a_stored_run_as_its_account_does() -> None:
    result = json.loads((RESULTS / "distill_v2lite_8_layers_4xh200.json").read_text())
    titles, *lines = table(result).splitlines()
    assert titles.split() == [
        "step",
        "ms",
        "±",
        "ms",
        "tokens/s",
        "of",
        "bound",
        "MFU",
        "data",
        "comm.",
        "host",
        "peak",
        "GiB",
    ]
    columns = {line.split()[0]: line.split()[1:] for line in lines}
    # benchmarks/results/RESULTS.md: 349.0 ms, 95.2 % of the bound; of the traced 349.8 ms, 29.0 ms were exposed and 12.3 ms idle.
    assert columns["overlapped"] == ["349.0", "1.3", "187,779", "95.2%", "36.3%", "0.0%", "8.3%", "3.5%", "41.1"]
    assert columns["comm-free"][3] == "100.0%" and columns["comm-free"][6:8] == ["-", "-"]  # the bound is not traced


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"variants": ("fast",)}, "unknown variant 'fast'"),
        ({"router": "random"}, "unknown router 'random'"),
        ({"wires": ("int9",)}, "2 to 8 bits"),
        ({"shape": "huge"}, "huge: neither a shape"),
    ],
)
def test_what_it_does_not_know_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**{"shape": "tiny", "layers": 2, "micro_batch": 1, "seq": 16, **changes})


@pytest.mark.parametrize(
    "words, message",
    [
        (["--trace"], "--trace writes its files into the directory --out"),
        (["--against", "trl", "--trace", "--out", "x"], "leave --trace and --wire out"),
    ],
)
def test_options_that_exclude_each_other_are_refused(words: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "distill", "tiny", *words])
    assert result.exit_code == 2 and message in result.stderr
