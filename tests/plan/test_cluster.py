"""Predictions of training steps on clusters, held against the stored runs on one node, by NVLink and by a slow link."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import fcsd
from test_measured_runs import LISTED, RESULTS, from_file, meta, read

from fcsd.bench.links import groups_of
from fcsd.errors import ConfigError
from fcsd.parallel.cost import Line, Links, Rows, expected_bytes, fit
from fcsd.parallel.machine import read_machine
from fcsd.plan.cluster import NODES, Choice, covers_of, draw, predict, predicted, to_text
from fcsd.plan.setup import Setup

STANDARD, FARSKIP = Choice("standard", "standard"), Choice("farskip", "farskip")
HIDDEN_COST = {"overlapped-fused": 0.37, "copies-fused": 0.27}  # NCCL's and copies', fitted to these runs


def copies() -> Line:
    """Rows that are copied between four H200s, from `benchmarks.comm.transports`."""
    found = json.loads((RESULTS / "transports_4xh200.json").read_text())
    sizes = {"32 MiB": 32 * 2**20 * 3 / 4, "384 MiB": 384 * 2**20 * 3 / 4}  # a quarter of the rows stays on the rank
    return fit([(bytes_, found["ms"][name]["copies"]["alone"] / 1e3) for name, bytes_ in sizes.items()])


def nccl(name: str) -> Line:
    """The wire of the exchanges of a run, sent alone."""
    found = read(name)
    load = found["workload"]
    numbers = meta(load["shape"], load["layers"]).numbers
    sent = load["micro_batch"] * load["seq"] * numbers.top_k * numbers.hidden * 2 * (1 - 1 / found["world"])
    windows = next(iter(found["routers"].values()))["windows"]
    return Line(0.0, statistics.median(window["wire"] for window in windows) / 1e3 / sent)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("train_v2lite_4xh200", "overlapped-fused"),
        ("train_v2lite_copies_4xh200", "copies-fused"),
        ("train_qwen3_4xh200", "copies-fused"),
        ("train_qwen3_4xh200", "overlapped-fused"),
        ("train_v2lite_27_layers_4xh200", "copies-fused"),
        ("train_v2lite_slow_4xh200", "overlapped-fused"),
    ],
)
def test_measured_steps_are_predicted(name: str, variant: str) -> None:
    """Within 8 % from the bound that was measured, and within 10 % from the planned computation."""
    found = read(name)
    times = next(iter(found["routers"].values()))["variants"]
    setup = setup_of_run(name)
    model = meta(found["workload"]["shape"], found["workload"]["layers"])
    near = copies() if variant == "copies-fused" else nccl(name)
    links = Links(found["world"], near, None, HIDDEN_COST[variant], 4.26e12, 0.54)
    bound = statistics.median(times["comm-free-fused"]["step"]) / 1e3
    for choice, measured in ((STANDARD, "standard-fused"), (FARSKIP, variant)):
        told = predicted(model.numbers, setup, links, choice, 1)
        taken = statistics.median(times[measured]["step"]) / 1e3
        assert bound + told.exposed == pytest.approx(taken, rel=0.08), measured
        assert told.step == pytest.approx(taken, rel=0.10), measured


@pytest.mark.parametrize(
    ("choice", "variant"),
    [
        (STANDARD, "standard"),
        (FARSKIP, "overlapped"),
        (Choice("farskip + int8", "farskip", formats=("int8",)), "overlapped+int8"),
    ],
)
def test_a_quantised_wire_over_a_measured_link_is_predicted(choice: Choice, variant: str) -> None:
    """The run and `fcsd bench links` were on one machine: from the measured bound within 3 %, planned within 8 %."""
    links = read_machine(RESULTS / "links_slow_2xh200.json").links
    times = read("train_v2lite_slow_wires_2xh200")["routers"]["uniform"]["variants"]
    setup = replace(from_file("train_v2lite_copies_4xh200").setup, world=2, ep_size=2, batch_tokens=2 * 4 * 4096)
    told = predicted(meta("deepseek-v2-lite", 8).numbers, setup, links, choice, 1)
    taken, bound = (statistics.median(times[name]["step"]) / 1e3 for name in (variant, "comm-free"))
    assert bound + told.exposed == pytest.approx(taken, rel=0.03)
    assert told.step == pytest.approx(taken, rel=0.08)


def test_unfused_deduplication_takes_longer_than_is_predicted() -> None:
    """In this run torch sums the rows of deduplication, not one kernel, and a prediction does not count that."""
    links = read_machine(RESULTS / "links_slow_2xh200.json").links
    times = read("train_v2lite_slow_dedup_2xh200")["routers"]["uniform"]["variants"]
    setup = replace(from_file("train_v2lite_copies_4xh200").setup, world=2, ep_size=2, batch_tokens=2 * 4 * 4096)
    ways = {"standard": STANDARD, "overlapped": FARSKIP, "overlapped+int8": replace(FARSKIP, formats=("int8",))}
    for name, choice in ways.items():
        told = predicted(meta("deepseek-v2-lite", 8).numbers, setup, links, replace(choice, dedups=("rank",)), 1)
        taken, bound = (statistics.median(times[one]["step"]) / 1e3 for one in (name, "comm-free"))
        assert 0.85 < (bound + told.exposed) / taken < 0.87


def setup_of_run(name: str) -> Setup:
    """The setup of a stored run. Those that the plan is not fitted to have the workload of the one by copies."""
    listed = {entry["file"] for entry in LISTED["runs"]}
    return from_file(name if name in listed else "train_v2lite_copies_4xh200").setup


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


def test_farskip_dedup_and_a_short_wire_never_lose_and_win_between_nodes(cluster: Links) -> None:
    setup = replace(from_file("train_v2lite_copies_4xh200").setup, ep_size=64)
    told = predict(meta("deepseek-v2-lite", 8).numbers, setup, cluster)
    by_nodes = {nodes: {one.choice.name: one for one in told if one.nodes == nodes} for nodes in (1, 2, 16, 128)}
    for nodes, rows in by_nodes.items():
        assert len({one.computation for one in rows.values()}) == 1
        for wiring in ("standard", "farskip"):
            steps = [rows[name].step for name in (wiring, f"{wiring} + dedup", f"{wiring} + dedup + int8")]
            assert steps == sorted(steps, reverse=True)
            if nodes > 1:
                assert steps[0] > steps[2] and rows[f"{wiring} + dedup + int8"].taken[1] == "int8"
        assert rows["farskip"].exposed < rows["standard"].exposed
    assert by_nodes[1]["farskip + dedup + int8"].taken == ("off", None), "what is hidden already is left alone"
    int8, bf16 = (expected_bytes(Rows(64, 6, 64, 8, 2048, bits), cluster, "node") for bits in (8.25, 16))
    assert int8.near == bf16.near and int8.far < bf16.far, "rows inside of a node are sent as they are"
    assert by_nodes[2]["standard + dedup"].taken == ("node", None)
    assert by_nodes[128]["standard"].ep_size == 64 and by_nodes[2]["standard"].ep_size == 8
    lines = to_text(told, "An assumption.").splitlines()
    assert lines[0] == "Converting pays:" and lines[4].startswith("Predicted, not measured")
    # Converting is compared with the standard wiring that sends the same: deduplication and wires are no gain of it.
    steps = {(one.choice.name, one.nodes): one.step for one in told}
    rest = " + dedup + int8"
    speeds = [steps[f"standard{rest}", nodes] / steps[f"farskip{rest}", nodes] for nodes in NODES]
    assert f"is {min(speeds):.2f}x (" in lines[2] and f" to {max(speeds):.2f}x (" in lines[2]
    assert lines[6:8] == ["Sent: int8 8.25 bits per value, where bf16 has 16.", "An assumption."]
    assert len(lines) == 9 + 2 + 8 * 6


def test_slower_gpus_hide_more_and_a_fast_link_leaves_nothing_to_gain(cluster: Links) -> None:
    model = meta("deepseek-v2-lite", 8).numbers
    setup = replace(from_file("train_v2lite_copies_4xh200").setup, ep_size=8)
    fast, slow = (predicted(model, setup, replace(cluster, speed=speed), FARSKIP, 2) for speed in (1.0, 0.25))
    assert slow.computation > 3 * fast.computation and slow.exposed < fast.exposed
    told = predict(model, setup, Links(4, Line(0.0, 1e-13), None, 0.0, 4.26e12, 0.54))
    assert to_text(told).splitlines()[:2] == [
        "Converting gains less than 2%:",
        "  farskip is 1.00x as fast as standard",
    ]


def test_bad_input_of_a_prediction(cluster: Links, tmp_path: Path) -> None:
    model, setup = meta("deepseek-v2-lite", 8).numbers, from_file("train_v2lite_copies_4xh200").setup
    with pytest.raises(ConfigError, match="2 to 8 bits"):
        predict(model, setup, cluster, "int9")
    with pytest.raises(ConfigError, match="a dense model"):
        predict(replace(model, experts=0), setup, cluster)
    path = tmp_path / "cluster.png"
    draw(predict(model, setup, cluster), path, "V2-Lite")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_links_are_measured_and_the_plan_reads_them(tmp_path: Path) -> None:
    """Two imitated nodes of one process each: only the link between nodes exists."""
    path = tmp_path / "machine.json"
    done = fcsd("bench", "links", "--node-size", 1, "--out", path, size=2)
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())
    assert found["gpus_per_node"] == 1 and found["far"]["gb_per_s"] > 0 and found["measured"]["far"]["chosen"] == "gloo"
    asked = ["plan", "qwen3-30b-a3b", "--machine", path, "--json"]
    told = json.loads(fcsd(*asked).stdout)["cluster"]
    assert [one["nodes"] for one in told][::6] == [1, 2, 4, 8, 16, 32, 64, 128]
    with pytest.raises(ConfigError, match="--node-size 3 does not divide 2 GPUs"):
        groups_of(2, 3)
