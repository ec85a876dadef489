"""The ablations of placement by counted rows: rows of each way, and placements that only earlier steps have shown."""

import pytest
import torch
from benchmarks.comm.hierarchy.placements import objectives
from benchmarks.comm.hierarchy.routing import Routing
from studies.placement.ablation import HIERMOE, Cluster, searched, study, study_of_paper, text_of_paper, to_text

from fcsd.parallel.placement.placement import Placement
from fcsd.parallel.placement.search import greedy

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


def test_the_paper_pads_messages_and_swaps_one_pair_a_step() -> None:
    routing, unmoved, goal = Routing(16, 6, topical=True), Placement(16, 4), objectives(CLUSTER.links, 4)["max"]
    steps = [CLUSTER.choose(routing, step) for step in range(3)]
    assert max(searched(steps, unmoved, goal, period=1, most=1)[1]) == 1 < max(searched(steps, unmoved, goal, 1)[1])
    # Everyone's tokens choose the experts 0 and 1 of rank 0: a message is as long as if every rank received as much.
    full = torch.tensor([0, 1]).expand(4, CLUSTER.tokens, 2)
    flat, one, two = CLUSTER.paper_seconds_of([full, full], [unmoved, unmoved])
    row = CLUSTER.timed * 2 * 2048
    assert flat == pytest.approx(2 * HIERMOE["direct"].seconds(2 * 4 * row))
    assert one == pytest.approx(2 * HIERMOE["direct"].seconds(4 * row))
    assert two == pytest.approx(2 * (HIERMOE["far"].seconds(2 * row) + HIERMOE["near"].seconds(4 * row)))
    found = study_of_paper(CLUSTER, steps=2)
    assert all(row["flat_ms"] > row["HD1_ms"] for row in found["top_k"]) and "speed-up" in text_of_paper(found)
