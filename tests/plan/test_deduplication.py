"""Which deduplication is chosen under random routing, from covers that are near those that were measured."""

import statistics
from dataclasses import replace

import pytest
from test_measured_runs import from_file, meta, read

from fcsd.config import Parallel
from fcsd.errors import ConfigError
from fcsd.parallel.cost import Line, Links, Rows, expected_bytes
from fcsd.plan.deduplication import covers_of, expected_options, to_text


def test_covers_are_near_those_that_were_measured() -> None:
    for name in ("train_v2lite_copies_4xh200", "train_qwen3_4xh200", "train_v3_4xh200"):
        found = read(name)
        model, setup = meta(found["workload"]["shape"], found["workload"]["layers"]), from_file(name).setup
        layer = next(layer for layer in model.numbers.layers if layer.routed)
        windows = found["routers"]["uniform"]["windows"]
        kinds = dict.fromkeys((window["kind"], window["passes"]) for window in windows)
        measured = [
            statistics.median(window["cover"] / 1e3 for window in windows if (window["kind"], window["passes"]) == kind)
            for kind in kinds
        ]
        told = covers_of(model.numbers, layer, setup)
        assert sum(told) == pytest.approx(sum(measured), rel=0.25)
        for one, seen in zip(told, measured, strict=True):
            assert one == pytest.approx(seen, rel=0.45)


@pytest.fixture(scope="module")
def cluster() -> Links:
    """Nodes of four GPUs, whose links to other nodes are 24 times slower."""
    return Links(4, Line(80e-6, 1 / 290e9), Line(30e-6, 1 / 12e9), 0.27, 4.26e12, 0.54)


def test_rows_inside_of_a_node_are_sent_as_they_are(cluster: Links) -> None:
    int8, bf16 = (expected_bytes(Rows(64, 6, 64, 8, 2048, bits), cluster, "node") for bits in (8.25, 16))
    assert int8.near == bf16.near and int8.far < bf16.far


def test_the_plan_says_which_deduplication_is_chosen_and_why(cluster: Links) -> None:
    model = meta("deepseek-v2-lite", 8).numbers
    auto = Parallel(ep_size=8, dedup="auto", machine="machine.json")
    setup = replace(from_file("train_v2lite_copies_4xh200").setup, ep_size=8, world=8)
    found = expected_options(model, setup, cluster, auto)
    assert [option.dedup for option in found] == ["node", "rank", "off"]
    text = to_text(found)
    assert f"it chooses node, which exposes {1e3 * found[0].exposed:.2f} ms" in text and "Predicted" in text
    inside = expected_options(model, replace(setup, ep_size=4, world=4), cluster, auto)
    assert [option.dedup for option in inside] == ["off", "rank"], "one node has no second level, and hides the wire"
    assert not expected_options(model, replace(setup, ep_size=1), cluster, auto)
    with pytest.raises(ConfigError, match="describes one node of 4 GPUs"):
        expected_options(model, setup, replace(cluster, far=None), auto)
