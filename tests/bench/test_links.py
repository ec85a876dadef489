"""`fcsd bench links`: the links that ranks have, and sums of a node, as a file that is read again."""

import json
import os
import random
from pathlib import Path

import pytest
from ranks import fcsd

from fcsd.bench.links import SUMS, fit, groups_of, worst_error
from fcsd.bench.serve import host_ways
from fcsd.bench.serve.variants import HOST_SUMS
from fcsd.errors import ConfigError
from fcsd.parallel.all_reduce import host_table
from fcsd.parallel.machine import Line, read_machine


def test_the_link_between_imitated_nodes_is_measured(tmp_path: Path) -> None:
    """Two nodes of one process each: only the link between nodes exists, and nothing is summed in a node."""
    path = tmp_path / "machine.json"
    done = fcsd("bench", "links", "--node-size", 1, "--out", path, size=2)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["gpus_per_node"] == 1 and found["far"]["gb_per_s"] > 0 and found["measured"]["far"]["chosen"] == "gloo"
    assert found["all_reduce_us"] == {}
    with pytest.raises(ConfigError, match="--node-size 3 does not divide 2 GPUs"):
        groups_of(2, 3)


def test_a_line_is_found_again_through_noise() -> None:
    noise = random.Random(0)
    line = Line(80e-6, 1 / 300e9)
    sizes = [2.0**power for power in range(12, 30)]
    points = [(size, line.seconds(size) * noise.uniform(0.97, 1.03)) for size in sizes]
    found = fit(points)
    assert found.alpha == pytest.approx(line.alpha, rel=0.03) and found.beta == pytest.approx(line.beta, rel=0.03)
    assert worst_error(found, points) < 0.05
    assert fit([(1e6, 1e-3), (2e6, 1.9e-3), (4e6, 4.4e-3)]).alpha >= 0


def test_sums_are_measured_by_ranks_and_bytes_and_printed_as_the_result(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    done = fcsd("bench", "links", "--node-size", 3, "--out", path, size=3)
    assert done.returncode == 0, done.stderr
    sums = read_machine(path).all_reduce_us
    assert {ranks: tuple(times) for ranks, times in sums.items()} == dict.fromkeys((2, 3), SUMS["cpu"])
    assert all(time > 0 for times in sums.values() for time in times.values())
    near, *told, written = done.stdout.splitlines()
    assert near.startswith("near: ") and written == f"written: {path}"
    assert [line.split(":")[0] for line in told] == ["all-reduce of 2 GPUs", "all-reduce of 3 GPUs"]
    advice = fcsd("advise", Path(__file__).parents[2] / "assets/teacher", "--machine", path)
    assert advice.returncode == 0 and f"Sums are those of {path}." in advice.stdout, advice.stderr


def test_the_ways_through_the_host_are_those_that_servers_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.delenv(host_ways.COPIES, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "L40S")
    gathers = {"8192": {"stock": 9.0}}

    def keep(row: dict[str, float]) -> None:
        file = host_table.file_for(tmp_path, "L40S", 2, "host:int8")
        others = {name: gathers for name in host_table.HostTables._fields}
        file.write_text(json.dumps({**others, "sums": {"8192": row}}))

    assert host_ways.microseconds([2]) == {}, "nothing was measured"
    keep({"stock": 50.0, "one_shot": 20.0, "in_blocks": 30.0, "exchange:int8": 10.0})
    with host_ways._copies():
        keep({"stock": 40.0, "one_shot": 20.0})
    assert host_ways.microseconds([2, 4]) == {
        "host": {2: {8192: 20.0}},
        "host:int8": {2: {8192: 10.0}},
        "NCCL_SHM_USE_CUDA_MEMCPY=1": {2: {8192: 40.0}},
    }
    assert host_ways.COPIES not in os.environ


def test_one_pass_measures_all_tables_of_a_server() -> None:
    sums = host_table.of_times({8192: {"stock": 50.0, "one_shot": 20.0, "exchange:int8": 10.0}})
    gathers = host_table.of_times({8192: {"stock": 9.0}})
    assert sums.ways == ("exchange:int8",)
    found = host_table.exact(host_table.HostTables(sums, sums, gathers, gathers))
    assert found.sums.ways == ("one_shot",) and found.sums.microseconds == {8192: {"stock": 50.0, "one_shot": 20.0}}
    assert found.gathers == found.scatters == gathers and found.eager == found.sums
    assert {asked for one in HOST_SUMS.values() for asked in one.values()} == {"host", host_ways._MOST_WAYS}
