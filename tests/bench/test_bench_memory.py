"""The calibration of the planner runs where there is no GPU, and holds like against like."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from benchmarks.distill import memory_settings
from ranks import fcsd
from typer.testing import CliRunner

from fcsd.bench import memory
from fcsd.bench.memory import MOMENTS, predicted, random_corpus, to_text
from fcsd.bench.shapes import SHAPES
from fcsd.cli.bench import app as bench_app
from fcsd.distill.data.rows import Rows
from fcsd.plan import Hardware, plan_setup
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import GIB, Setup


def test_steps_of_a_random_model_on_two_ranks(tmp_path):
    asked = ["bench", "memory", "tiny", "--layers", 2, "--seq", 64, "--steps", 4]
    sets = ["--set", "objective.sft=1.0", "--set", "optim.lr=1e-2"]
    done = fcsd(*asked, *sets, "--out", tmp_path / "found.json", size=2)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not measured") == 8 and "ZeRO-1, fp32, 256 tokens a step" in done.stderr
    written = (tmp_path / "found.json").read_text()
    assert tempfile.gettempdir() not in written, "directories of the machine that are gone"
    found = json.loads(written)
    losses = found["measured"]["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0] and len(found["measured"]["update_seconds"]) == 4
    assert found["recipe"]["parallel"]["ep_size"] == 2 and found["predicted"]["teacher"] > 0


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    SHAPES["tiny"](2).save_pretrained(folder)
    model = MetaModel(str(folder))
    setup = Setup(world=1, micro_batch_size=1, seq_len=64, batch_tokens=64, tokens=64, teacher="replicated")
    return plan_setup("tiny", model, model.numbers, setup, Hardware(1))


def test_every_moment_of_the_plan_is_in_one_part_of_the_step(planned):
    for moment in planned.memory.moments:
        assert [moment.name.startswith(names) for names in MOMENTS.values()].count(True) == 1
    told = predicted(planned)
    assert told["peak"] == max(told[part] for part in MOMENTS) == planned.memory.peak.total


def test_the_table_divides_what_is_predicted_by_what_is_measured(planned):
    told = predicted(planned)
    seen = {name: 2 * value for name, value in told.items()} | {"losses": [2.0, 1.5]}
    recipe = {"train": dict.fromkeys(("dtype", "batch_tokens", "micro_batch_size"), 1)}
    recipe |= {"parallel": {"ep_size": 1, "zero_stage": 1}}
    result = {"shape": "tiny", "layers": 2, "processes": 1, "recipe": recipe | {"data": {"seq_len": 64}}}
    lines = to_text(result | {"predicted": told, "measured": seen}).splitlines()
    assert [line.split()[-1] for line in lines[2:-1]] == ["0.500"] * 9 and lines[-1].endswith("2 1.5")
    assert lines[8].split()[1] == f"{told['peak'] / GIB:.2f}"


def test_rows_hold_several_documents():
    _, positions, counts = Rows(random_corpus(100, 64), 64)[0]
    assert (positions == 0).sum() == 4 and counts.all()


@pytest.mark.nightly
def test_the_three_places_of_the_optimizer_are_compared_in_turns(repo, tmp_path):
    """The script at a tiny size, without a GPU."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "OUT": str(tmp_path), "PATH": path, "PYTHONPATH": str(repo)}
    command = [repo / "benchmarks/distill/memory.sh", "1", "2", "tiny", "64", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "settings.json").read_text())
    assert list(found) == [
        "fp32 moments on the GPU",
        "fp32 moments on the GPU, 75 GiB",
        "bf16 moments on the GPU, 75 GiB",
        "fp32 moments on the host, 75 GiB",
        "bf16 moments on the host, 75 GiB",
        "fp32 moments and AdamW on the host, 75 GiB",
    ]
    assert [one["cap_gib"] for one in found.values()] == [None, *[75] * 5]
    assert all(len(one["seconds"]) == 4 and one["gpu_gib"] is None and one["host_gib"] > 0 for one in found.values())
    assert all(0 < one["update"] < one["median"] for one in found.values())
    names = ("fp32", "host", "moments", "bf16", "bf16-moments")
    losses = [json.loads((tmp_path / f"1-{name}.json").read_text())["measured"]["losses"] for name in names]
    assert losses[0] == losses[1] == losses[2] and losses[3] == losses[4] and done.stderr.count("==== round 1") == 6


def test_settings_are_compared_by_their_medians_and_largest_sizes(tmp_path, capsys):
    def write(name, moments, offload, cap, measured):
        sizes = dict.fromkeys(("peak", "gpu", "host"), 6 * GIB)
        run = {"recipe": {"optim": {"moments": moments, "offload": offload}, "train": {"batch_tokens": 8}}, "cap": cap}
        run |= {"predicted": {**sizes, "tokens_per_second": 2, "update_seconds": 1.5}, "measured": measured}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
        return str(tmp_path / f"{name}.json")

    def steps(seconds, gpu):
        sizes = {"peak": 5 * GIB, "gpu": gpu * GIB, "host": 7 * GIB}
        return {**sizes, "seconds": seconds, "update_seconds": [second / 2 for second in seconds]}

    files = [write("1c", "fp32", "host", 75, steps([9.0, 3.0, 5.0], 3))]
    files += [write("1a", "fp32", "none", None, steps([9.0, 2.0, 2.2], 5))]
    files += [write("2a", "fp32", "none", None, steps([9.0, 2.0, 1.9], 6))]
    files += [write("1b", "fp32", "none", 75, {"out_of_memory": "tried to allocate"})]
    memory_settings.main([*files, "--out", str(tmp_path / "all.json")])
    found = json.loads((tmp_path / "all.json").read_text())
    assert list(found) == [
        "fp32 moments on the GPU",
        "fp32 moments on the GPU, 75 GiB",
        "fp32 moments and AdamW on the host, 75 GiB",
    ]
    here, exhausted, away = found.values()
    assert (here["median"], here["times"], here["gpu_gib"], here["cap_gib"]) == (2.0, 1.0, 6.0, None)
    assert (away["median"], away["times"], away["gpu_predicted_gib"], away["cap_gib"]) == (4.0, 2.0, 6.0, 75)
    assert (away["update"], away["update_predicted"], away["median_predicted"]) == (2.0, 1.5, 4.0)
    assert exhausted["out_of_memory"] and exhausted["median"] is exhausted["times"] is exhausted["gpu_gib"] is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("out of memory")
    assert lines[3].split()[-11:] == ["75", "5", "6", "3", "6", "4000", "4000", "2000", "1500", "2", "1"]


def test_a_run_whose_gpu_memory_is_exhausted_leaves_a_row(monkeypatch, tmp_path):
    def exhaust(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines")

    monkeypatch.setattr(memory, "_measure", exhaust)
    found = CliRunner().invoke(bench_app, ["memory", "tiny", "--layers", "2", "--seq", "64", "--out", f"{tmp_path}/x"])
    assert found.exit_code == 8
    measured = json.loads((tmp_path / "x").read_text())["measured"]
    assert measured == {"out_of_memory": "CUDA out of memory. Tried to allocate 2 GiB."}
