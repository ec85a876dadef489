"""The benchmark of rows on their way to the experts: it runs over gloo, and both ways bring the right rows."""

import sys
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from benchmarks.comm import expert_rows, transports
from ranks import in_group

from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.launch.world import World
from fcsd.parallel.transports.transport import all_to_all

TOKENS, FORMATS = 16, ("int8", "int4")


def _rank(rank: int) -> dict[str, Any]:
    world = World(rank, 2, torch.device("cpu"))
    routed = expert_rows.route(world, TOKENS, "experts elsewhere")
    every: list[Any] = [None, None]
    dist.all_gather_object(every, routed.tokens)
    ways = expert_rows.ways(routed, all_to_all, FORMATS)
    return {
        "tokens": every,
        "received": {name: run() for name, run in ways.items() if "wire" not in name},
        "splits": routed.splits,
        "timed": expert_rows.bench(world, {"gloo": all_to_all}, FORMATS, TOKENS, repeats=2),
    }


def test_rows_arrive_and_every_way_is_timed() -> None:
    for rank, found in enumerate(in_group(2, _rank)):
        count = TOKENS * expert_rows.TOP_K
        assert found["splits"].sends[rank] == 0 and sum(found["splits"].receives) == count
        # Every token of the other rank arrives once for each of its experts.
        sent = found["tokens"][1 - rank]
        for name, rows in found["received"].items():
            expected = sent
            if name != "bf16":
                format = Format.parse(name.partition(",")[0])
                expected = decode(encode(sent, format), format, expert_rows.WIDTH, sent.dtype)
            copies = torch.cat([expected] * expert_rows.TOP_K)
            assert sorted(rows.float().sum(1).tolist()) == sorted(copies.float().sum(1).tolist())
        timed = found["timed"]
        assert list(timed) == list(expert_rows.SCENARIOS)
        assert list(timed["any expert"]["gloo"]) == ["bf16", "bf16, wire"] + [
            f"{text}, {way}" for text in FORMATS for way in ("steps", "fused", "wire")
        ]
        assert expert_rows.to_text(timed, FORMATS).count("\n") == 7


def test_the_program_times_rows_in_the_formats_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def note(*given: Any) -> NoReturn:
        asked.append(given)
        raise SystemExit(0)

    monkeypatch.setattr(transports, "time_rows_to_experts", note)
    monkeypatch.setattr(sys, "argv", ["transports", "--quantised", "int8", "int4", "--tokens", "8"])
    with pytest.raises(SystemExit):
        transports.main()
    assert asked == [(["int8", "int4"], 8, 20, None)]
