"""The table of ways through the host: the fastest of each size, kept in a file, measured by one server at a time."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_group

from fcsd.errors import ConfigError
from fcsd.parallel.all_reduce import host_table
from fcsd.parallel.all_reduce.host_table import HostTables, file_for, kept, of_times

TIMES = {8192: {"stock": 16.0, "one_shot": 5.0}, 1 << 20: {"stock": 60.0, "exchange": 80.0}}


def test_a_tensor_takes_the_way_that_is_fastest_at_its_size() -> None:
    table = of_times(TIMES)
    assert [table.way(size) for size in (16, 8192, 8193, 1 << 20, 1 << 30)] == ["one_shot"] * 2 + ["stock"] * 3
    # Between two sizes times lie on a line: the lines of these two cross three eighths of the way.
    table = of_times(
        {1 << 20: {"stock": 100.0, "exchange": 103.0, "in_blocks": 1.0}, 2 << 20: {"stock": 200.0, "exchange": 195.0}}
    )
    eighths = [table.way((1 << 20) + part * (1 << 17)) for part in range(9)]
    assert eighths == ["in_blocks"] + ["stock"] * 3 + ["exchange"] * 5
    assert str(table) == "to 1024 KiB in_blocks, to 1408 KiB stock, to 2048 KiB exchange"


OTHER = '{"8": {"stock": 5}}'
TABLES = HostTables(of_times(TIMES), *[of_times({8192: {"stock": 9.0, "exchange": 8.0}})] * 3)


def keeps(rank: int, file: Path) -> tuple[HostTables, HostTables, int]:
    calls: list[int] = []

    def measure() -> HostTables:
        calls.append(rank)
        return TABLES

    first = kept(file, measure, dist.group.WORLD)
    return first, kept(file, measure, dist.group.WORLD), len(calls)


def test_a_table_is_measured_once_and_read_by_all_ranks(tmp_path: Path) -> None:
    for first, second, calls in in_group(2, keeps, tmp_path / "caches" / "table.json"):
        assert first == second == TABLES and calls == 1


ROWS = ('{"stock": NaN}', '{"one_shot": 5}', '{"stock": -1}')


@pytest.mark.parametrize(
    "content",
    [
        *(
            "",
            "[]",
            '{"sums": {"8192": {"stock": 5}}}',
            '{"sums": {}, "eager": {}, "gathers": {}, "scatters": {}}',
            '{"sums": {"a": {}}, "eager": 1, "gathers": 1, "scatters": 1}',
            '{"sums": {"8192": {"stock": 5}}, "gathers": {"8192": {"stock": 5}}}',
        ),
        *(f'{{"sums": {{"8192": {row}}}, "eager": {OTHER}, "gathers": {OTHER}, "scatters": {OTHER}}}' for row in ROWS),
    ],
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, content: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(content)
    for first, _, calls in in_group(1, keeps, file):
        assert first == TABLES and calls == 1
    assert json.loads(file.read_text())["sums"]["8192"]["stock"] == 16.0


def test_servers_measure_one_after_the_other(tmp_path: Path) -> None:
    from fcsd.parallel.all_reduce.host_table import _alone

    inside, most = 0, 0

    def one(number: int) -> None:
        nonlocal inside, most
        with _alone(tmp_path / f"table{number}.json"):
            inside += 1
            most = max(most, inside)
            time.sleep(0.02)
            inside -= 1

    threads = [threading.Thread(target=one, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_nothing_is_chosen_on_gpus_that_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of vLLM's own and three ways: sums, gathers, sums of one's rows, and the host's part of the first two.
    times = iter((9.0, 2000.0, 5.0, 2000.0, 9.0, 9.0, 7.0, 8.0, 9.0, 9.0, 9.0, 4.0))
    host = iter((1.0, 1.0, 6.0, 1.0, 1.0, 1.0, 9.0, 1.0))
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(host_table, "_microseconds", lambda run, x, group: next(times, 2000.0))
    monkeypatch.setattr(host_table, "_host_microseconds", lambda run, x, group: next(host, 0.0))
    sums: Any = SimpleNamespace(size=2)
    stock = host_table.Stock(*[lambda x: x] * 3)
    tables = host_table.measured(sums, stock, None, sizes=(8192,))
    assert [table.ways for table in tables] == [("in_blocks",), ("stock",), ("exchange",), ("exchange",)]
    with pytest.raises(ConfigError, match="another process works on the GPUs"):
        host_table.measured(sums, stock, None, sizes=(8192, 16384))


def test_the_file_is_of_this_machine_and_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    names = {
        str(file_for(Path("c"), gpu, ranks, what))
        for gpu in ("H200", "L4")
        for ranks in (2, 4)
        for what in ("host", "host:int8")
    }
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    names.add(str(file_for(Path("c"), "H200", 2, "host")))
    assert len(names) == 9
