"""The ablations of placement by counted rows: rows of each way, and placements that only earlier steps have shown."""

import pytest
from scripts.placement_ablation import HIERMOE, Cluster, searched, study, to_text

from fcsd.bench.hierarchy.placements import objectives
from fcsd.bench.hierarchy.routing import Routing
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.placing.search import greedy

CLUSTER = Cluster(2, 2, 16, tokens=32, timed=64, lines=HIERMOE)


def test_a_step_has_the_placement_that_earlier_steps_have_shown() -> None:
    routing, unmoved, goal = Routing(16, 6, topical=True), Placement(16, 4), objectives(CLUSTER.links, 4)["max"]
    steps = [CLUSTER.choose(routing, step) for step in range(4)]
    [first], count = greedy([steps[0].flatten(0, 1)], [unmoved], goal)
    [second], more = greedy([steps[2].flatten(0, 1)], [first], goal)
    assert count and searched(steps, unmoved, goal, period=2) == ([unmoved, first, first, second], [count, more])


def test_rows_and_times_of_the_ways() -> None:
    found = study(CLUSTER, steps=2)
    ways = {(row["top_k"], row["way"]): row for row in found["top_k"]}
    for top_k in (6, 8, 10):
        flat, two, rank, node = (ways[top_k, way] for way in ("flat", "2DH", "HD1", "HD2"))
        assert flat["far"] > rank["far"] > node["far"] <= 1 and flat["near"] + flat["far"] <= top_k
        assert two["wire_ms"] > node["wire_ms"]
        rows = round(flat["far"] * CLUSTER.tokens) / CLUSTER.tokens * CLUSTER.timed
        assert flat["wire_ms"] == pytest.approx(2e3 * HIERMOE["direct"].seconds(rows * 2 * 2048))
    assert [row["period"] for row in found["placed"] if row["top_k"] == 8] == [1, 2, 4, 8, 1, 1, 1]
    assert "pairs (SmartMoE)" in to_text(found)
