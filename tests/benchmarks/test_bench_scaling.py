"""Runs at several world sizes are compared if all but their world sizes and micro-batches is the same."""

import json
from pathlib import Path

import pytest
from benchmarks.train import scaling

from fcsd.errors import BadInputError

# A run of four GPUs, micro-batch 4, from which the tests make the others.
MEASURED = json.loads((Path(__file__).parents[2] / "benchmarks/results/train_v2lite_world_4_h200.json").read_text())


def write(path, world, micro_batch, times, **workload):
    """A step.json with these steps in ms by variant."""
    result = MEASURED | {"world": world, "workload": MEASURED["workload"] | {"micro_batch": micro_batch} | workload}
    variants = {name: {"forward_backward": steps, "step": steps, "peak_gib": 1.0} for name, steps in times.items()}
    result["routers"] = {"initialised": MEASURED["routers"]["initialised"] | {"variants": variants}}
    path.write_text(json.dumps(result))
    return path


PLAIN = {"standard": [290.0, 300.0, 320.0], "overlapped": [250.0], "comm-free": [200.0]}
FUSED = {"standard-fused": [240.0], "overlapped-fused": [200.0], "comm-free-fused": [160.0]}


@pytest.fixture
def runs(tmp_path):
    """World size 8 comes first, and has timed fused variants beside the plain ones, and copies beside NCCL."""
    others = {"stock": [1.0], "standard-copies": [280.0], "copies": [200.0]}
    eight = write(tmp_path / "8.json", 8, 2, {**PLAIN, **FUSED, **others})
    return [eight, write(tmp_path / "4.json", 4, 4, PLAIN)]


def test_stored_runs_of_gpus_are_read(repo):
    conditions, points = scaling.read(sorted((repo / "benchmarks/results").glob("train_v2lite_world_*_h200.json")))
    assert conditions["global batch"] == 16 and conditions["router"] == "initialised"
    shown = [(point.variant, point.world, point.micro_batch, round(point.standard, 1)) for point in points]
    assert shown == [
        ("copies-fused", 2, 8, 410.3),
        ("copies-fused", 4, 4, 219.5),
    ]  # as benchmarks/results/RESULTS.md has them
    assert [round(point.overlapped, 1) for point in points] == [400.8, 212.2]


def test_medians_and_speed_ups_by_world_size(runs):
    conditions, points = scaling.read(runs)
    assert conditions["global batch"] == 16
    assert [(point.variant, point.world, point.standard, point.speed_up, point.most) for point in points] == [
        ("copies", 8, 280.0, 1.4, 1.4),
        ("overlapped", 4, 300.0, 1.2, 1.5),
        ("overlapped", 8, 280.0, 1.12, 1.4),  # over the faster of the two standard ones
        ("overlapped-fused", 8, 240.0, 1.2, 1.5),
    ]


def test_the_program_prints_a_table_and_draws(runs, tmp_path, monkeypatch, capsys):
    picture = tmp_path / "pictures" / "sizes.png"
    monkeypatch.setattr("sys.argv", ["scaling", *map(str, runs), "--picture", str(picture)])
    scaling.main()
    shown = capsys.readouterr().out.splitlines()
    assert "deepseek-v2-lite" in shown[0] and len(shown) == 6
    assert " ".join(shown[-1].split()) == "overlapped-fused 8 2 240.0 200.0 160.0 1.200 1.500"
    assert picture.read_bytes().startswith(b"\x89PNG")
    as_json = scaling.to_json(*scaling.read(runs))
    assert [row["bound_speed_up"] for row in as_json["points"]] == [1.4, 1.5, 1.4, 1.5]


@pytest.mark.parametrize(
    "world, micro_batch, workload, message",
    [
        (2, 8, {"shape": "tiny"}, "shape is tiny in .* and deepseek-v2-lite in .*8.json"),
        (2, 8, {"layers": 4}, "layers is 4"),
        (2, 8, {"seq": 2048}, "seq is 2048"),
        (2, 8, {"optimizer": False}, "optimizer is False"),
        (2, 4, {}, "global batch is 8 in .* and 16"),
        (4, 4, {}, "another file has world size 4"),
    ],
)
def test_runs_that_differ_are_refused(runs, tmp_path, world, micro_batch, workload, message):
    other = write(tmp_path / "other.json", world, micro_batch, PLAIN, **workload)
    with pytest.raises(BadInputError, match=message):
        scaling.read([*runs, other])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"workload": {"routers": []}, "world": 2}'])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "step.json").write_text(content)
    with pytest.raises(BadInputError, match=r"is not a step.json"):
        scaling.read([tmp_path / "step.json"])


def test_a_run_without_its_bound_is_refused(tmp_path):
    path = write(tmp_path / "t.json", 4, 4, {"standard": [1.0], "overlapped": [1.0], "comm-free-fused": [1.0]})
    with pytest.raises(BadInputError, match="has not timed standard, overlapped and comm-free"):
        scaling.read([path])
