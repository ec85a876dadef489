"""The calibration of the planner runs where there is no GPU, and holds like against like."""

import json
import tempfile

import pytest
import torch
from benchmarks.train import memory
from benchmarks.train.memory import MOMENTS, predicted, random_corpus, to_text
from ranks import fcsd
from typer.testing import CliRunner

from fcsd.bench.shapes import SHAPES
from fcsd.distill.data.rows import Rows
from fcsd.plan import Hardware, plan_setup
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import GIB, Setup

pytestmark = pytest.mark.lab


def test_steps_of_a_random_model_on_two_ranks(tmp_path):
    asked = ["tiny", "--layers", 2, "--seq", 64, "--steps", 4]
    sets = ["--set", "objective.sft=1.0", "--set", "optim.lr=1e-2"]
    done = fcsd(*asked, *sets, "--out", tmp_path / "found.json", size=2, module="benchmarks.train.memory")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not measured") == 8 and "ZeRO-1, fp32, 256 tokens a step" in done.stdout
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


def test_a_run_whose_gpu_memory_is_exhausted_leaves_a_row(monkeypatch, tmp_path):
    def exhaust(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore lines")

    monkeypatch.setattr(memory, "_measure", exhaust)
    found = CliRunner().invoke(memory.app, ["tiny", "--layers", "2", "--seq", "64", "--out", f"{tmp_path}/x"])
    assert found.exit_code == 8
    stored = json.loads((tmp_path / "x").read_text())
    assert {"fcsd", "commit", "packages"} <= stored["environment"].keys()
    assert stored["measured"] == {"out_of_memory": "CUDA out of memory. Tried to allocate 2 GiB. More lines"}
    again = CliRunner().invoke(memory.app, ["tiny", "--out", f"{tmp_path}/x"])
    assert again.exit_code == 2 and "x exists" in again.stderr
