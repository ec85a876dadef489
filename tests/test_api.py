"""The Python API: every name of fcsd does its work, on a tiny model from inspection to the hub, without torchrun."""

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hub_server
import pytest
import ranks
import runs
import texts
import tiny
import torch
from reached import NOT_IMPORTED
from reloads import fork_reloads

import fcsd
from fcsd.eval.harness import Loaded
from fcsd.models.build import decoder_layers
from fcsd.models.wiring import WiredLayer
from fcsd.plan import Hardware


@pytest.fixture(scope="module", autouse=True)
def every_module_imported() -> None:
    """An imported module becomes an attribute of its package, so a room of a function's name would hide it."""
    for module in pkgutil.walk_packages(fcsd.__path__, "fcsd."):
        if module.name not in NOT_IMPORTED:
            importlib.import_module(module.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``teacher``, its conversion ``student``, texts, and ``recipe.yaml``, a run of four steps in ``run``."""
    folder = tmp_path_factory.mktemp("api")
    teacher = tiny.model("deepseek_v2", initializer_range=0.1, max_position_embeddings=1024)
    teacher.save_pretrained(folder / "teacher")
    texts.tokenizer().save_pretrained(folder / "teacher")
    report = fcsd.convert_checkpoint(folder / "teacher", folder / "student", wiring="ladder", layers="1-3")
    assert (report.parity, report.wiring["layers"]) == (4, [1, 2, 3])
    runs.resolved(folder)
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A finished run of two steps."""
    assert ranks.exit_code(distil_twice, folder) == 0
    return folder / "run"


def distil_twice(folder: Path) -> None:
    """In a process of its own, since a process stays in the group of its run."""
    for name in ("run", "again"):
        recipe = fcsd.load_recipe(folder / "recipe.yaml", ["train.steps=2", f"output_dir={folder / name}"])
        assert fcsd.distill_model(recipe) == folder / name


def test_import_loads_nothing_heavy() -> None:
    code = "import sys, fcsd; print(*sys.modules); fcsd.load_recipe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert not before & {"torch", "transformers", "pydantic", "numpy", "huggingface_hub", "typer"}
    assert "pydantic" in after and "torch" not in after  # a name costs what its own room needs


def test_a_type_checker_sees_the_same_names_as_python(repo: Path) -> None:
    tree = ast.parse((repo / "fcsd/__init__.py").read_text())
    (branch,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in branch.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    (table,) = (node.value for node in branch.orelse if isinstance(node, ast.Assign))
    assert seen == ast.literal_eval(table)
    assert sorted(seen) == fcsd.__all__ == [name for name in dir(fcsd) if not name.startswith("_")]


@pytest.mark.parametrize("name", fcsd.__all__)
def test_a_name_is_documented_and_hides_no_room(name: str) -> None:
    found = getattr(fcsd, name)
    assert found.__name__ == name and inspect.getdoc(found)
    assert name not in {module.name for module in pkgutil.iter_modules(fcsd.__path__)}
    assert not [p for p in inspect.signature(found).parameters.values() if p.annotation is inspect.Parameter.empty]


def test_the_command_line_calls_the_same_functions(repo: Path) -> None:
    commands = "".join(path.read_text() for path in (repo / "fcsd/cli").glob("*.py"))
    functions = set(fcsd.__all__) - {"Wiring", "load_model", "wire"}  # of a model in memory: no command has one
    assert {name for name in functions if re.search(rf"\b{name}\(", commands)} == functions


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError, match="module 'fcsd' has no attribute 'convert_model'"):
        _ = fcsd.convert_model  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ImportError):
        exec("from fcsd import convert_model")


def test_inspect_checkpoint(folder: Path) -> None:
    found = fcsd.inspect_checkpoint(folder / "student")
    assert (found.layers, found.experts, found.problems) == (4, 8, [])
    assert found.rewired is not None and found.rewired["wiring"] == "ladder"


def test_load_model_and_wire(folder: Path) -> None:
    ids, wiring = tiny.tokens(), fcsd.Wiring("ladder", (1, 2, 3))
    teacher, student = fcsd.load_model(folder / "teacher"), fcsd.load_model(folder / "student")
    with torch.no_grad():
        plain = teacher(ids).logits
        assert torch.equal(fcsd.wire(teacher, wiring)(ids).logits, student(ids).logits)
        assert not torch.equal(teacher(ids).logits, plain)
        assert torch.equal(fcsd.wire(teacher, fcsd.Wiring("standard", ()))(ids).logits, plain)
    assert [isinstance(layer, WiredLayer) for layer in decoder_layers(student)] == [True] * 4  # 0 hands on two streams


def test_plan_run(folder: Path) -> None:
    planned = fcsd.plan_run(fcsd.load_recipe(folder / "recipe.yaml").recipe, Hardware(gpus=2))
    planned.check()
    assert 0 < planned.memory.total < planned.memory.usable


def test_distill_model_twice_in_one_process_without_torchrun(folder: Path, run: Path) -> None:
    assert runs.outcome(run) == runs.outcome(folder / "again")
    assert len(runs.outcome(run)[0]) == 2


def test_evaluate_and_compare_models(folder: Path, run: Path, repo: Path) -> None:
    student = Loaded("in memory", fcsd.load_model(run / "final"), texts.tokenizer())
    options: dict[str, Any] = {"tasks": ["PIQA"], "data_mirror": repo / "assets/mirror", "limit": 4}
    models = [folder / "student", run / "final", student]
    rows = fcsd.evaluate_models(models, baseline=folder / "teacher", **options)
    assert [row["model"] for row in rows] == ["teacher", "student", "final", "in memory"]
    assert rows[2]["items"] == rows[3]["items"] and rows[0]["n"] == 4
    comparisons = fcsd.compare_models(rows[:3], untrained="student")
    assert [(found.model, found.baseline) for found in comparisons] == [("student", "teacher"), ("final", "teacher")]
    assert comparisons[1].sentence(1.0).startswith("final: teacher is not above chance")  # with four questions


def test_export_and_push_model(folder: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fork_reloads(monkeypatch)
    assert fcsd.export_model(run, tmp_path / "final") == tmp_path / "final"
    ids = tiny.tokens()
    with torch.no_grad():
        exported, trained = (fcsd.load_model(path)(ids).logits for path in (tmp_path / "final", run / "final"))
    assert torch.equal(exported, trained)
    with hub_server.running() as hub:
        hub_server.connect(hub, monkeypatch, tmp_path / "cache")
        hub.token = "hf_canary0123456789"
        assert fcsd.push_model(tmp_path / "final", "org/mine", token=hub.token) == f"{hub.url}/org/mine"
        repository = hub.repos["org/mine"]
        assert "model.safetensors" in repository.commits[repository.refs["main"]]
