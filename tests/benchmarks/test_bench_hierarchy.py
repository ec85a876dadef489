"""The benchmark of hierarchical dispatch runs on two nodes of two ranks over gloo, and checks what it times."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from benchmarks.comm.hierarchy import tables, ways
from benchmarks.comm.hierarchy.__main__ import SMALL, benches, run
from benchmarks.comm.hierarchy.block import exact_factors, exact_rows, exact_scores, without_moving
from benchmarks.comm.hierarchy.measure import by_step
from benchmarks.comm.hierarchy.model import Model, Point
from benchmarks.comm.hierarchy.placements import Searcher
from benchmarks.comm.hierarchy.routing import Routing
from ranks import in_group
from torch import Tensor

from fcsd.errors import ConfigError, FcsdError
from fcsd.launch.world import World
from fcsd.parallel.cost import Dedup, Line, Links, Rows, Sent
from fcsd.parallel.expert.choice import options
from fcsd.parallel.machine import read_machine
from fcsd.parallel.placement.placement import Placement
from fcsd.parallel.placement.search import Level, Objective, greedy

pytestmark = pytest.mark.lab

ROUTING = Routing(8, 3, topical=True)
SIZES = replace(
    SMALL, table=(Routing(8, 3),), sweep=(ROUTING,), sweep_tokens=(8,), lines=(8, 32), placed=(ROUTING,), repeats=1
)


@pytest.mark.parametrize(("ranks", "node_size"), [(1, 2), (2, 2), (6, 4), (4, 0)])
def test_ranks_that_are_not_several_nodes_are_refused(ranks: int, node_size: int) -> None:
    world = World(0, ranks, torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=f"{ranks} ranks are not two or more nodes of {node_size}"):
        run(world, node_size, SIZES, ["table"], print)


class Asked(Routing):
    """Routing that notes the steps for which it was asked."""

    steps: ClassVar[list[int]] = []

    def choose(self, tokens: int, rank: int, step: int, device: torch.device) -> Tensor:
        self.steps.append(step)
        return super().choose(tokens, rank, step, device)


def _rank(rank: int, machine: Path) -> tuple[dict[str, Any], int]:
    written: list[Any] = []
    world = World(rank, 4, torch.device("cpu"))
    found = run(world, 2, SIZES, ["table", "sweep", "moves", "placement"], written.append, machine)

    bench, asked, goal = benches(world, 2, SIZES)["near"], Asked(8, 3), Objective((Level(4, 1.0),))
    placements = Searcher(bench, world, asked).placements(goal, period=1)
    before = torch.cat([asked.choose(SIZES.tokens, sender, 0, world.device) for sender in range(4)])
    assert placements[1] == greedy([before], [Placement(8, 4)], goal)[0][0], "step 1 has what step 0 has shown"
    asked.steps.clear()
    by_step(bench, asked, placements, ("HD1",))
    assert asked.steps == list(placements) == [1, 2], "the routing of step 0 is never timed"
    return found, len(written)


def test_every_part_is_measured_and_all_ranks_agree(tmp_path: Path) -> None:
    ranks = in_group(4, _rank, tmp_path / "machine.json")
    found, written = ranks[0]
    for other, _ in ranks[1:]:
        assert {**other, "environment": None} == {**found, "environment": None}
    assert written > 4 + len(found["placement"]["period"])
    point = found["table"][0]
    assert set(point["predicted"]) == {"flat", "2DH", "HD1", "HD2"} < set(point["seconds"])
    rows = point["rows"]
    assert rows["flat"]["far"] >= rows["HD1"]["far"] > rows["HD2"]["far"] and rows["2DH"]["far"] > rows["HD2"]["far"]
    assert point["chosen"] in ways.DEDUP_OF and found["models"]["slow"]["fixed"].keys() == rows.keys()
    links, line = read_machine(tmp_path / "machine.json").links, found["models"]["slow"]["lines"]["direct"]
    assert links.per_node == 2 and links.direct is not None and links.fixed.keys() == {"off", "rank", "node"}
    assert links.direct.seconds(1e6) == pytest.approx(line["alpha"] + 1e6 * line["beta"])
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


STORED = Path(__file__).parents[2] / "benchmarks/results/hierarchy_4xh200.json"


def stored_points() -> Iterator[tuple[Model, dict[str, Any]]]:
    """The swept points that were measured on four H200s, with the model that was measured in the same run."""
    found = json.loads(STORED.read_text())
    for part, name in (("sweep", "slow"), ("near-sweep", "near")):
        told = found["models"][name]
        near, far, direct = (Line(**told["lines"][line]) for line in ("near", "far", "direct"))
        links = Links(2, near, far, 0.0, told["copy"], 1.0, direct)
        for point in found[part]:
            yield Model(links, told["fixed"], {}, told["one_link"]), point


def test_the_model_chooses_what_was_fastest_on_four_gpus() -> None:
    count = good = 0
    for model, point in stored_points():
        known = Point(point["tokens"], point["top_k"], 2048, point["rows"])
        assert {way: model.predict(way, known) for way in point["rows"]} == pytest.approx(point["predicted"])
        count += 1
        good += point["seconds"][model.chosen(known)] <= 1.03 * point["seconds"][point["best"]]
    assert count >= 60 and good == count


def test_parallel_cost_chooses_what_was_fastest_on_four_gpus() -> None:
    """The rule of ``parallel.dedup: auto``, without any cover, on the same points."""
    way_of: dict[Dedup, str] = {dedup: way for way, dedup in ways.DEDUP_OF.items()}
    missed = []
    for model, point in stored_points():
        fixed: dict[Dedup, float] = {dedup: model.fixed[way] / 2 for dedup, way in way_of.items()}
        offered: tuple[Dedup, ...] = ("off", "rank", "node")
        links = replace(model.links, fixed=fixed)
        sent = {}
        for dedup in offered:
            near, far = (point["rows"][way_of[dedup]][kind] * 4096 for kind in ("near", "far"))
            sent[dedup] = Sent(near + far, 0) if model.one_link else Sent(near, far)
        if model.one_link:  # one node: there is no second level
            del sent["node"]
        rows = Rows(point["tokens"], point["top_k"], point["experts"], 4, 2048)
        chosen = options(sent, rows, links, covers=(0.0, 0.0))[0].dedup
        if point["seconds"][way_of[chosen]] > 1.03 * point["seconds"][point["best"]]:
            missed.append((point["tokens"], point["top_k"], chosen))
    assert not missed
