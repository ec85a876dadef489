"""The calibration of the planner runs where there is no GPU, and holds like against like."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ranks import fcsd

from fcsd.bench import memory_settings
from fcsd.bench.memory import MOMENTS, predicted, random_corpus, to_text
from fcsd.bench.shapes import SHAPES
from fcsd.distill.data.rows import Rows
from fcsd.plan import Hardware, plan_setup
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import GIB, Setup


def test_steps_of_a_random_model_on_two_ranks(tmp_path):
    asked = ["bench", "memory", "tiny", "--layers", 2, "--seq", 64, "--gpus", 2, "--steps", 4]
    sets = ["--set", "objective.sft=1.0", "--set", "optim.lr=1e-2"]
    done = fcsd(*asked, *sets, "--out", tmp_path / "found.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not measured") == 8 and "ZeRO-1, fp32, 256 tokens a step" in done.stderr
    written = (tmp_path / "found.json").read_text()
    assert tempfile.gettempdir() not in written, "directories of the machine that are gone"
    found = json.loads(written)
    losses = found["measured"]["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
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
    command = [repo / "scripts/h200_memory.sh", "1", "2", "tiny", "64", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "settings.json").read_text())
    assert list(found) == ["fp32 moments, on the GPU", "bf16 moments, on the GPU", "fp32 moments, on the host"]
    assert [one["cap_gib"] for one in found.values()] == [None, 75, 75]
    assert all(len(one["seconds"]) == 3 and one["gpu_gib"] is None and one["host_gib"] > 0 for one in found.values())
    losses = [json.loads((tmp_path / f"1-{name}.json").read_text())["measured"]["losses"] for name in ("fp32", "host")]
    assert losses[0] == losses[1] and done.stderr.count("==== round 1") == 3


def test_settings_are_compared_by_their_medians_and_largest_sizes(tmp_path, capsys):
    def write(name, moments, offload, seconds, gpu):
        sizes = {"peak": 5 * GIB, "gpu": gpu * GIB, "host": 7 * GIB}
        run = {"recipe": {"optim": {"moments": moments, "offload": offload}}, "cap": None if name[1] == "a" else 75}
        run |= {"predicted": {name: 6 * GIB for name in sizes}, "measured": {**sizes, "seconds": seconds}}
        (tmp_path / f"{name}.json").write_text(json.dumps(run))
        return str(tmp_path / f"{name}.json")

    files = [write("1a", "fp32", "none", [9.0, 2.0, 2.2], 5), write("2a", "fp32", "none", [9.0, 2.0, 1.9], 6)]
    files += [write("1b", "fp32", "host", [9.0, 3.0, 5.0], 3)]
    memory_settings.main([*files, "--out", str(tmp_path / "all.json")])
    found = json.loads((tmp_path / "all.json").read_text())
    here, away = found["fp32 moments, on the GPU"], found["fp32 moments, on the host"]
    assert (here["median"], here["times"], here["gpu_gib"], here["cap_gib"]) == (2.0, 1.0, 6.0, None)
    assert (away["median"], away["times"], away["gpu_predicted_gib"], away["cap_gib"]) == (4.0, 2.0, 6.0, 75)
    assert capsys.readouterr().out.splitlines()[2].split()[-5:] == ["75", "3", "6", "4", "2"]
