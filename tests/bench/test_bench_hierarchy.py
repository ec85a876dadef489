"""The benchmark of hierarchical dispatch runs on two nodes of two ranks over gloo, and checks what it times."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import in_group

from fcsd.bench.hierarchy import tables, ways
from fcsd.bench.hierarchy.__main__ import SMALL, run
from fcsd.bench.hierarchy.block import exact_factors, exact_rows, exact_scores, without_moving
from fcsd.bench.hierarchy.model import Model, Point
from fcsd.bench.hierarchy.routing import Routing
from fcsd.errors import FcsdError
from fcsd.launch.world import World
from fcsd.parallel.cost import Line, Links

ROUTING = Routing(8, 3, topical=True)
SIZES = replace(
    SMALL, table=(Routing(8, 3),), sweep=(ROUTING,), sweep_tokens=(8,), lines=(8, 32), placed=(ROUTING,), repeats=1
)


def _rank(rank: int) -> tuple[dict[str, Any], int]:
    written: list[Any] = []
    found = run(World(rank, 4, torch.device("cpu")), 2, SIZES, ["table", "sweep", "moves", "placement"], written.append)
    return found, len(written)


def test_every_part_is_measured_and_all_ranks_agree() -> None:
    ranks = in_group(4, _rank)
    found, written = ranks[0]
    for other, _ in ranks[1:]:
        assert {**other, "environment": None} == {**found, "environment": None}
    assert written > 4 + len(found["placement"]["period"])
    point = found["table"][0]
    assert set(point["predicted"]) == {"flat", "2DH", "HD1", "HD2"} < set(point["seconds"])
    rows = point["rows"]
    assert rows["flat"]["far"] >= rows["HD1"]["far"] > rows["HD2"]["far"] and rows["2DH"]["far"] > rows["HD2"]["far"]
    assert point["chosen"] in ways.DEDUP_OF and found["models"]["slow"]["fixed"].keys() == rows.keys()
    study = found["placement"]
    assert len(study["top_k"]) == 1 and [row["period"] for row in study["period"]] == ["1", "2", "4", "8"]
    assert len(study["period"][0]["swaps"]) == 2 and len(study["period"][1]["swaps"]) == 1
    assert "near, 1" in found["moves"]["seconds"]
    assert "1 points" in tables.of_sweep(found["sweep"]) and "3 of 8" in tables.of_table(found["table"])
    assert "pairs (SmartMoE)" in tables.of_study(study)


def test_a_wrong_value_is_seen() -> None:
    chosen = ROUTING.choose(16, rank=0, step=0, device=torch.device("cpu"))
    x, factors = exact_rows(16, 4, 0, torch.device("cpu")), exact_factors(8, torch.device("cpu"))
    expected = without_moving(x, chosen, factors)
    literal = torch.zeros_like(x[0], dtype=torch.float64)
    for token, experts in enumerate(chosen.tolist()):
        for expert, score in zip(experts, exact_scores(chosen)[token].tolist(), strict=True):
            literal[token] += score * factors[expert].item() * x[0, token].double()
    assert torch.equal(expected[0].double(), literal)
    ways.check(expected.clone(), expected, "HD2")
    changed = expected.clone()
    changed[0, 3, 1] += 1
    with pytest.raises(FcsdError, match="HD2: 1 of 64 values are wrong"):
        ways.check(changed, expected, "HD2")


def test_the_model_adds_levels_and_takes_the_slower_of_links_that_are_busy_at_once() -> None:
    near, far, direct = Line(1e-6, 1e-11), Line(2e-6, 1e-9), Line(3e-6, 2e-9)
    links = Links(2, near, far, 0.0, 4e12, 1.0, direct)
    rows = {way: {"near": 100, "far": 200, "handled": 400} for way in ("flat", "2DH", "HD1", "HD2")}
    model = Model(links, dict.fromkeys(rows, 1e-3), {})
    point = Point(tokens=64, top_k=3, width=64, rows=rows)
    size = 2 * 64
    assert model.wire("flat", point) == pytest.approx(2 * direct.seconds(200 * size))
    record = 192  # a row of 128 bytes and a tail, which end at a multiple of 64
    twice = [one.seconds(rows * size) for size in (record, 128) for one, rows in ((near, 100), (far, 200))]
    assert model.wire("HD2", point) == pytest.approx(sum(twice))
    assert model.predict("flat", point) > 1e-3 + model.wire("flat", point)
    alone = replace(model, one_link=True)
    assert alone.wire("flat", point) == pytest.approx(2 * direct.seconds(300 * size))
    assert model.chosen(point) == "HD2"
