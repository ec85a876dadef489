"""The command line: what each command calls, what it prints where, and how it fails."""

import errno
import importlib
import importlib.machinery
import importlib.metadata
import inspect
import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import create_autospec

import huggingface_hub.errors
import psutil
import pytest
import ranks
import safetensors
import torch
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from fcsd import __version__, errors
from fcsd.cli import command
from fcsd.cli.main import app
from fcsd.cli.panels import ALL, MANY, PANELS, REST, panels
from fcsd.foreign_errors import _TABLE, translate
from fcsd.plan import Change

ROOT = Path(__file__).parents[2]
COMMANDS = ["inspect", "convert", "distill", "eval", "export", "push", "env"]
RECIPES = [["recipes", "list"], ["recipes", "show"], ["recipes", "copy"]]


def run(*args: str) -> Result:
    return CliRunner().invoke(app, list(args), prog_name="fcsd")


@pytest.fixture
def library(monkeypatch):
    """Replaces a library function by one that records its call, with the real one's signature."""

    def replace(module: str, name: str, returns: object = None, raises: BaseException | None = None):
        loaded = importlib.import_module(module)
        fake = create_autospec(getattr(loaded, name), return_value=returns, side_effect=raises)
        monkeypatch.setattr(loaded, name, fake)
        return fake

    return replace


@pytest.fixture
def models_exist(library) -> None:
    """A command whose library function is replaced takes any names of models."""
    library("fcsd.checkpoint.location", "directory_of")


class Shown:
    def to_json(self) -> str:
        return '{"a": 1}'

    def to_text(self) -> str:
        return "a 1"


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"{__version__}\n")


@pytest.mark.parametrize("args", [[], *[[name] for name in COMMANDS], *RECIPES], ids=" ".join)
def test_help_loads_no_heavy_library(args: list[str]) -> None:
    """A subprocess, since this one has torch loaded already."""
    code = (
        "import sys; from fcsd.cli.main import app\n"
        f"try: app({[*args, '--help']!r})\n"
        "finally: print('LOADED', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Usage:" in done.stdout
    assert done.stdout.endswith("LOADED []\n")


def test_what_needs_no_torch_is_refused_without_it(tmp_path: Path) -> None:
    """Paths, config.json, recipes and options, in one subprocess: torch would stay imported from one to the next."""
    empty, full, unknown = tmp_path / "empty", tmp_path / "full", tmp_path / "unknown"
    for folder in (empty, full, unknown):
        folder.mkdir()
    (full / "a").write_text("")
    (unknown / "config.json").write_text('{"model_type": "nosuch"}')
    (unknown / "model.safetensors").write_text("")
    teacher, out = "bundled:teacher", tmp_path / "out"
    refused = [
        *([name, empty] for name in ("inspect", "eval", "chat", "serve", "advise")),
        *(["convert", model, out] for model in (empty, unknown)),
        ["convert", teacher, full],
        ["convert", teacher, out, "--wiring", "nosuch"],
        ["convert", teacher, out, "--layers", "last:99"],
        ["convert", teacher, out, "--gpus", "2"],
        ["convert", empty, out, "--layers", "auto"],
        ["export", empty, out],
        ["write", empty, "--out", out],
        ["write", teacher, "--out", out, "--form", "nosuch"],
        ["distill", "nosuch"],
        ["distill", "tiny", "--set", "parallel.quantised.dispatch=nosuch"],
        ["plan", "tiny", "--gpu-mem", "nosuch"],
        ["eval", teacher, "--backend", "nosuch"],
        ["eval", teacher, "--tasks", "nosuch"],
        ["eval", teacher, "--suite", "nosuch.yaml"],
        ["eval", teacher, "--baseline", teacher, "--require", "nosuch"],
        ["serve", teacher, "--gpus", "2", "--all-reduce", "host:nosuch"],
        ["bench", "serve", "nosuch"],
        ["bench", "serve", "llama3-8b", "--wirings", "nosuch"],
    ]
    code = (
        "import json, sys; from typer.testing import CliRunner; from fcsd.cli.main import app\n"
        "for args in json.loads(sys.argv[1]):\n"
        "    code = CliRunner().invoke(app, args).exit_code\n"
        "    print(json.dumps([args, code, sorted({'torch', 'transformers', 'datasets'} & set(sys.modules))]))"
    )
    asked = [[str(word) for word in args] for args in refused]
    command = [sys.executable, "-c", code, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [args for args, *_ in found] == asked, done.stderr
    assert not [row for row in found if row[1] not in (2, 3) or row[2]]


def test_the_shell_completes_commands_and_options_without_a_heavy_library() -> None:
    assert {"--install-completion", "--show-completion"} <= set(run("--help").stdout.split())
    code = (
        "import sys; import fcsd.cli.main as cli\n"
        "sys.argv[0], cli.leave = 'fcsd', lambda end: None\n"
        "cli.main(); print('LOADED', sorted({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )

    def completed(line: str) -> list[str]:
        env = {**os.environ, "_FCSD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
        *found, loaded = done.stdout.splitlines()
        assert loaded == "LOADED []", done.stderr
        return found

    assert completed("fcsd ex") == ["export"] and completed("fcsd recipes s")[0] == "show"
    assert completed("fcsd plan --gpu") == ["--gpus", "--gpu-mem"]


def test_a_command_with_many_options_groups_them() -> None:
    named: set[str] = set()
    for name, known in leaves(typer.main.get_command(app)):
        groups = panels(known.params)
        options = [option.name for option in known.params if option.param_type_name == "option"]
        assert sorted(option.name for group in groups.values() for option in group) == sorted(options)
        assert (list(groups) == [ALL]) == (len(options) < MANY), name
        named |= set(options) if list(groups) != [ALL] else set()
        rest = {option.name for option in groups.get(REST, [])}
        assert len(rest) <= 7, f"{name}: name its options in PANELS"
    assert {word for words in PANELS.values() for word in words.split()} <= named
    text = run("eval", "--help").stdout
    headings = ["Arguments:", "Questions:", "Comparison:", "Machine:", "Output:", "Other options:"]
    assert [text.count(f"\n{heading}\n") for heading in headings] == [1] * 6
    assert text.index("Comparison:") < text.index("--untrained") < text.index("Machine:") < text.index("--gpus")
    assert "\nOptions:\n" in run("inspect", "--help").stdout
    assert text.startswith("Usage: fcsd eval [OPTIONS] MODEL...\n") and "--limit N" in text and "<" not in text
    assert " --gpus INTEGER " in text and run("eval", "-h").stdout == text


@dataclass(frozen=True)
class Chosen:
    """Options of a command of a test."""

    count: Annotated[int, typer.Option(min=1)]
    words: Annotated[list[str], typer.Option("--word")] = field(default_factory=lambda: ["one"])


def test_the_fields_of_a_dataclass_are_options_of_a_command() -> None:
    group = typer.Typer()

    @command.command(group, "told")
    def told(name: str, chosen: Chosen, loud: bool = False) -> None:
        command.emit(f"{name} {chosen.count} {chosen.words} {loud}")

    runner = CliRunner()
    assert runner.invoke(group, ["a", "--count", "2"]).stdout == "a 2 ['one'] False\n"
    assert runner.invoke(group, ["a", "--count", "2", "--word", "x", "--word", "y"]).stdout == "a 2 ['x', 'y'] False\n"
    assert runner.invoke(group, ["a", "--count", "0"]).exit_code == runner.invoke(group, ["a"]).exit_code == 2


def test_commands_are_listed_with_whole_sentences_and_found_by_what_they_do() -> None:
    for group, least in (((), 9), (("bench",), 2), (("recipes",), 4)):
        shown = run(*group, "--help").stdout.partition("Commands:")[2].partition("Examples:")[0]
        assert "..." not in shown and shown.count(".\n") >= least
    assert "Did you mean 'distill'?" in run("heal", "recipe.yaml").stderr
    assert "Did you mean 'convert'?" in run("convrt").stderr


def test_help_has_examples_and_exit_codes() -> None:
    text = run("--help").stdout
    assert "fcsd convert org/model model-farskip --wiring farskip --layers all" in text
    for cls in [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.FcsdError)]:
        assert f" {cls.exit_code} " in text.partition("Exit codes:")[2]


def test_inspect(library) -> None:
    fake = library("fcsd.checkpoint", "inspect_checkpoint", Shown())
    assert run("inspect", "some/model").stdout == "a 1\n"
    fake.assert_called_with("some/model", trust_remote_code=False)
    assert json.loads(run("inspect", "some/model", "--json", "--trust-remote-code").stdout) == {"a": 1}
    fake.assert_called_with("some/model", trust_remote_code=True)


def test_convert(library) -> None:
    fake = library("fcsd.convert", "convert_checkpoint", Shown())
    assert run("convert", "m", "out").stdout == "a 1\n"
    defaults = {"wiring": "farskip", "layers": "all", "variant": "full", "tp_degree": 1, "distance": 1, "check": True}
    defaults |= {"border": None, "reduce": None, "dry_run": False, "force": False, "trust_remote_code": False}
    fake.assert_called_with("m", Path("out"), **defaults)
    run("convert", "m", "out", "--wiring", "desync-2x", "--gpus", "4", "--layers", "50%", "--no-check", "--dry-run")
    changed = {"wiring": "desync-2x", "tp_degree": 4, "layers": "50%", "check": False, "dry_run": True}
    fake.assert_called_with("m", Path("out"), **(defaults | changed))
    run("convert", "m", "out", "--wiring", "desync", "--tp-degree", "2", "--reduce", "-,m", "--border", "full")
    changed = {"wiring": "desync", "tp_degree": 2, "reduce": "-,m", "border": "full"}
    fake.assert_called_with("m", Path("out"), **(defaults | changed))


def test_distill(library) -> None:
    world = library("fcsd.launch.world", "ensure_world")
    loop = library("fcsd.distill.loop", "distill_model", Path("runs/x"))
    inputs = library("fcsd.distill.inputs", "require_inputs")
    done = run("distill", "--recipe", "tiny", "--set", "optim.lr=1e-3", "--set", "name=x", "--seed", "7", "--gpus", "2")
    assert (done.exit_code, done.stdout) == (0, "runs/x\n"), done.stderr
    world.assert_called_once_with(2, grace_seconds=30)
    resolved = loop.call_args.args[0]
    assert inputs.call_args.args[0] is resolved.recipe and inputs.call_args.args[1].startswith("fcsd convert ")
    assert (resolved.recipe.optim.lr, resolved.recipe.name, resolved.recipe.seed) == (1e-3, "x", 7)
    assert (resolved.origins["optim.lr"], resolved.origins["seed"]) == ("--set", "flag")
    told = {"resume": "auto", "dry_run": False, "processes": 2, "scorer": None, "join_timeout": 300}
    assert loop.call_args.kwargs == told


def test_distill_prints_its_directory_once_over_all_processes(library, monkeypatch) -> None:
    library("fcsd.launch.world", "ensure_world")
    library("fcsd.distill.loop", "distill_model", Path("runs/x"))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run("distill", "tiny").stdout == ""


def test_distill_checks_the_recipe_before_it_starts_processes(library) -> None:
    world = library("fcsd.launch.world", "ensure_world")
    done = run("distill", "tiny", "--gpus", "2", "--set", "optim.lrr=1")
    assert done.exit_code == 2
    assert "did you mean 'optim.lr'?" in done.stderr
    world.assert_not_called()


def test_distill_checks_the_batch_before_it_starts_processes(library) -> None:
    world = library("fcsd.launch.world", "ensure_world")
    library("fcsd.distill.inputs", "require_inputs")
    done = run("distill", "tiny", "--gpus", "3")
    assert done.exit_code == 2 and "processes = 3072" in done.stderr
    world.assert_not_called()


@pytest.mark.parametrize("args", [["distill"], ["distill", "tiny", "--recipe", "tiny"], ["distill", "no-such-recipe"]])
def test_distill_wants_one_recipe(args: list[str]) -> None:
    assert run(*args).exit_code == 2


def test_plan_takes_the_gpus_that_the_recipe_needs(library) -> None:
    planned = library("fcsd.plan", "plan_run", raises=errors.DoesNotFitError("too large"))
    asked = {
        ("qwen3-30b-a3b",): 8,
        ("--recipe", "qwen3-30b-a3b", "--nodes", "4"): 2,
        ("qwen3-30b-a3b", "--gpus", "4"): 4,
        ("llama3.1-8b-ladder",): 1,
        ("llama3.1-8b-ladder", "--set", "parallel.tp_size=4"): 4,
    }
    for args, gpus in asked.items():
        assert run("plan", *args).exit_code == 8
        assert planned.call_args.args[1].gpus == gpus


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The commands of a command line with their names, those of groups included."""
    for name, found in group.commands.items():
        if hasattr(found, "commands"):
            yield from leaves(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


def test_an_option_means_the_same_in_every_command() -> None:
    """Each has one help text; every command prints JSON on request."""
    shared = {
        "--json",
        "--set",
        "--dtype",
        "--suite",
        "--tasks",
        "--limit",
        "--batch-size",
        "--recipe",
        "--data-mirror",
    }
    texts: dict[str, set[str]] = {name: set() for name in shared}
    for name, found in leaves(typer.main.get_command(app)):
        own = {option: parameter for parameter in found.params for option in parameter.opts}
        assert "--json" in own, name
        measures = name.startswith("bench")  # a measurement has defaults of its own
        for option in (shared & {"--json", "--set"} if measures else shared) & own.keys():
            texts[option].add(own[option].help)
    assert {option: len(found) for option, found in texts.items()} == dict.fromkeys(shared, 1)


def test_eval(library, models_exist) -> None:
    row = {"model": "m", "suite": "paper", "column": "PIQA", "task": "piqa", "metric": "acc_norm", "filter": "none"}
    row |= {"value": 0.5, "stderr": 0.02, "n": 100, "items": [1], "seconds": 1.0, "baseline": False, "chance": 50.0}
    fake = library("fcsd.eval.harness", "evaluate_models", [row])
    done = run("eval", "m", "n", "--tasks", "piqa,arc_easy", "--data-mirror", "d", "--limit", "3", "--json")
    assert done.exit_code == 0, done.output
    nothing = run("eval", "m", "--tasks", "")  # as an empty variable of a shell gives it
    assert nothing.exit_code == 2 and "--tasks must name at least one task" in nothing.output
    (shown,) = json.loads(done.stdout)["rows"]
    assert shown == {key: value for key, value in row.items() if key != "items"}
    assert fake.call_args.args == (["m", "n"],)
    wanted = {"tasks": ["piqa", "arc_easy"], "data_mirror": Path("d"), "limit": 3, "baseline": None, "suite": "paper"}
    assert wanted.items() <= fake.call_args.kwargs.items()
    assert fake.call_args.kwargs["accept_unsafe_exec"] is False
    run("eval", "m", "--accept-unsafe-exec")
    assert fake.call_args.kwargs["accept_unsafe_exec"] is True


def test_eval_refuses_a_verdict_it_could_not_give_before_it_runs(library, models_exist) -> None:
    fake = library("fcsd.eval.harness", "evaluate_models", [])
    for options in (["--require", "about 1"], ["--untrained", "runs/u"]):
        assert run("eval", "runs/m", "--baseline", "teacher", *options).exit_code == 2
        assert run("eval", "runs/m", *options).exit_code == 2, "nothing to compare with"
    fake.assert_not_called()


def test_eval_exits_9_unless_the_verdict_is_met(library, models_exist) -> None:
    row = {"column": "PIQA", "metric": "acc", "value": 1.0, "stderr": 0.0, "n": 4000, "chance": 50.0, "engine": {}}
    row |= {"settings_sha256": "s", "data_sha256": "d", "items": [1.0] * 4000}
    worse = {**row, "items": [0.0] * 400 + [1.0] * 3600, "value": 0.9}
    rows = [{**row, "model": "teacher", "baseline": True}, {**worse, "model": "a--final", "baseline": False}]
    rows += [{**worse, "model": "b--final", "baseline": False}]
    library("fcsd.eval.harness", "evaluate_models", rows)
    models = ["runs/a/final", "runs/b/final", "--baseline", "teacher", "--untrained", "runs/b/final"]
    met, missed = (run("eval", *models, "--require", f"within {points}") for points in (12, 1))
    assert (met.exit_code, missed.exit_code) == (0, 9)
    assert "a--final within 1 points of teacher: no (-10.0 ± 0.5)" in missed.stdout


def test_eval_of_a_model_in_a_run_writes_where_export_looks(library, models_exist, tmp_path: Path) -> None:
    fake = library("fcsd.eval.harness", "evaluate_models", [])
    for name in ("mine", "other"):
        (tmp_path / name / "final").mkdir(parents=True)
        (tmp_path / name / "config.resolved.yaml").write_text("name: x\n")
    mine, other = str(tmp_path / "mine/final"), str(tmp_path / "other/final")
    for models, out in (
        ([mine, "org/base"], tmp_path / "mine/eval"),
        ([mine, other], None),
        ([mine, "--out", "x"], Path("x")),
        (["org/base"], None),
    ):
        run("eval", *models)
        assert fake.call_args.kwargs["out"] == out


def test_eval_refuses_a_single_task_that_is_far_below(library, models_exist) -> None:
    right = {"metric": "acc", "value": 1.0, "stderr": 0.0, "n": 2000, "chance": 50.0, "engine": {}}
    right |= {"settings_sha256": "s", "data_sha256": "d", "items": [1.0] * 2000, "model": "teacher", "baseline": True}
    below = {"value": 0.9, "items": [0.0] * 200 + [1.0] * 1800}
    tasks = [f"task{number}" for number in range(30)]
    rows = [{**right, "column": task} for task in tasks]
    rows += [{**row, "model": "m", "baseline": False, **(below if row["column"] == "task7" else {})} for row in rows]
    library("fcsd.eval.harness", "evaluate_models", rows)
    command = ["eval", "m", "--baseline", "teacher", "--require"]
    met, missed = run(*command, "within 1.0"), run(*command, "within 1.0, each within 3.0")
    assert (met.exit_code, missed.exit_code) == (0, 9)
    assert "m within 1 points of teacher: yes" in met.stdout and "further below on task7 (-10.0)" in met.stdout
    assert "more than 3 points below teacher on task7" in missed.stderr


def test_a_file_name_that_is_not_utf8_is_printed_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors="strict")  # closes ``raw`` when it is deleted
    token = command._DATA.set(stream)
    try:
        command.emit(os.fsdecode(b"model\xff"))
    finally:
        command._DATA.reset(token)
    assert raw.getvalue() == b"model\\udcff\n"


def test_export_and_push(library) -> None:
    export = library("fcsd.export.final", "export_model", Path("final"))
    assert run("export", "runs/x", "final", "--push", "org/name", "--private").stdout == "final\n"
    wanted = {"checkpoint": None, "force": False, "push": "org/name", "private": True, "create_pr": False}
    export.assert_called_once_with("runs/x", Path("final"), **wanted, revision=None, quantise=None, calibration=None)
    push = library("fcsd.export.push", "push_model", "address")
    assert run("push", "final", "org/name", "--create-pr", "--revision", "b").stdout == "address\n"
    push.assert_called_once_with(Path("final"), "org/name", private=False, create_pr=True, revision="b")


def test_recipes(tmp_path: Path) -> None:
    assert "tiny-sft" in run("recipes", "list").stdout
    assert set(json.loads(run("recipes", "list", "--json").stdout)) >= {"tiny", "tiny-sft"}
    assert "# --set" in run("recipes", "show", "tiny", "--set", "seed=3").stdout
    assert json.loads(run("recipes", "show", "tiny", "--json").stdout)["name"] == "tiny"
    target = tmp_path / "mine.yaml"
    assert run("recipes", "copy", "tiny", "--out", str(target)).stdout == f"{target}\n"
    target.write_text("edited")
    again = run("recipes", "copy", "tiny", "--out", str(target))
    assert (again.exit_code, target.read_text()) == (2, "edited")
    nowhere = run("recipes", "copy", "tiny", "--out", str(tmp_path / "none" / "x.yaml"))
    assert nowhere.exit_code == 2


def test_a_recipe_that_a_full_disk_does_not_take_leaves_no_file(tmp_path: Path, monkeypatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    done = run("recipes", "copy", "tiny", "--out", str(tmp_path / "mine.yaml"))
    assert done.exit_code == 7 and f"the disk is full: {tmp_path}/mine.yaml" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_of_links_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: mine")
    result = run("bench", "links", "--out", str(tmp_path / "recipe.yaml"))
    assert result.exit_code == 2 and "Nothing was overwritten" in result.stderr
    assert (tmp_path / "recipe.yaml").read_text() == "name: mine"


def test_env_keeps_secrets_and_paths(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/someone/topology.xml")
    facts = json.loads(run("env", "--json").stdout)
    assert torch.__version__.startswith(facts["packages"]["torch"])  # some builds name CUDA in one of the two only
    assert facts["settings"]["NCCL_DEBUG"] == "INFO" and facts["settings"]["NCCL_TOPO_FILE"] == "(a path)"
    assert str(Path.home()) not in json.dumps(facts) and sys.executable not in json.dumps(facts)
    assert "secret" not in run("env").stdout + json.dumps(facts)


def test_env_names_the_commit_of_a_checkout_and_not_that_of_a_folder_around_it(tmp_path, monkeypatch) -> None:
    from fcsd.launch import environment

    for variable in [name for name in os.environ if name.startswith("GIT_")]:  # set where a hook runs the tests
        monkeypatch.delenv(variable)
    package, git = tmp_path / "fcsd", ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
    (package / "launch").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.setattr(environment, "__file__", str(package / "launch/environment.py"))

    def commit() -> Any:
        return environment.snapshot()["commit"]

    assert commit() is None
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "of something else"], check=True)
    assert commit() is None
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "of the package"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert commit() == head
    (package / "__init__.py").write_text("changed")
    assert commit() == f"{head}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit() is None


@pytest.mark.parametrize(
    "cls", [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.FcsdError)]
)
def test_own_errors_end_in_one_line_a_hint_and_their_code(library, cls) -> None:
    library("fcsd.checkpoint", "inspect_checkpoint", raises=cls("what is wrong", "what to do"))
    done = run("inspect", "m")
    assert done.exit_code == cls.exit_code
    assert (done.stdout, done.stderr) == ("", "error: what is wrong\nhint: what to do\n")
    loud = run("inspect", "m", "-v")
    assert loud.exit_code == cls.exit_code
    assert "Traceback" in loud.stderr
    assert loud.stderr.endswith("error: what is wrong\nhint: what to do\n")


def test_unexpected_error(library) -> None:
    library("fcsd.checkpoint", "inspect_checkpoint", raises=ZeroDivisionError("first\nsecond"))
    done = run("inspect", "m")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: ZeroDivisionError: first second\nhint: -v shows the traceback\n"
    assert "Traceback" in run("inspect", "m", "--verbose").stderr
    assert "Traceback" in run("-v", "inspect", "m").stderr
    assert "Traceback" in run("-v", "recipes", "show", "none").stderr
    assert "Traceback" in run("recipes", "-v", "show", "none").stderr
    assert run("-V").stdout == run("--version").stdout == f"{__version__}\n"
    for words in (["inspect", "-V"], ["-q", "-V"], ["bench", "links", "--version"]):
        assert run(*words).stdout == f"{__version__}\n"
    assert "no such directory" in run("serve", "nosuch", "--gpus", "2", "--", "--version").stderr


def test_interrupt_and_rank(library, monkeypatch) -> None:
    library("fcsd.checkpoint", "inspect_checkpoint", raises=KeyboardInterrupt())
    monkeypatch.setenv("RANK", "3")
    done = run("inspect", "m")
    assert (done.exit_code, done.stderr) == (130, "[rank 3] error: interrupted\n")


@pytest.mark.parametrize(
    ("local_rank", "error", "waits"),
    [
        ("0", ZeroDivisionError("first"), []),
        ("1", ZeroDivisionError("first"), [command._FIRST_RANK_SPEAKS]),
        ("1", errors.PreemptedError("first"), []),
    ],
)
def test_only_the_first_process_of_a_machine_says_its_error_at_once(
    library, monkeypatch, local_rank: str, error: Exception, waits: list[int]
) -> None:
    """torchrun ends the others while they wait, if the first one has failed, too. A preempted run has no time."""
    library("fcsd.checkpoint", "inspect_checkpoint", raises=error)
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "RANK": "9", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    waited: list[int] = []
    monkeypatch.setattr(command.time, "sleep", waited.append)
    said = run("inspect", "m").stderr
    assert said.startswith("[rank 9] error: ") and said.splitlines()[0].endswith("first")
    assert waited == waits


def hub_error(name: str) -> BaseException:
    cls = getattr(huggingface_hub.errors, name)
    return cls.__new__(cls, "the hub's words")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (hub_error("GatedRepoError"), 3, "gated"),
        (hub_error("RepositoryNotFoundError"), 3, "no such repository"),
        (hub_error("RevisionNotFoundError"), 3, "no such revision"),
        (hub_error("LocalEntryNotFoundError"), 3, "not cached"),
        (hub_error("OfflineModeIsEnabled"), 3, "offline mode"),
        (hub_error("HFValidationError"), 2, "hub id"),
        (hub_error("HfHubHTTPError"), 1, "the hub refused"),
        (safetensors.SafetensorError("header too large"), 3, "damaged: header too large"),
        (safetensors.SafetensorError("I/O error: No space left on device (os error 28)"), 7, "disk is full"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), 8, "out of GPU memory: CUDA out of memory. Tried"),
        (MemoryError(), 8, "out of memory"),
        (torch.distributed.DistBackendError("NCCL error"), 6, "another process"),
        (OSError(errno.ENOSPC, "No space left on device", "x/y"), 7, "the disk is full: x/y"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 7, "quota"),
        (OSError(errno.EROFS, "Read-only file system", "x"), 7, "read-only: x"),
        (OSError(errno.ENOSPC, "No space left on device", "read", None, "written"), 7, "the disk is full: written"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), 7, "refuses access: x"),
        (RuntimeError("strides should be multiple of 16 bytes"), 2, "routed experts of these widths"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_errors_of_other_libraries(error: BaseException, code: int, says: str) -> None:
    found = translate(error)
    assert found is not None
    assert found.exit_code == code
    assert says in str(found)
    assert "\n" not in str(found)
    wrapped = OSError("transformers' own words")  # transformers wraps the hub's errors
    wrapped.__cause__ = error
    assert str(translate(wrapped)) == str(found)


def test_error_table_names_classes_that_exist() -> None:
    import httpx
    import httpx2

    places = [huggingface_hub.errors, httpx, httpx2, safetensors, torch, torch.distributed, __builtins__]
    for package, name, *_ in _TABLE:
        assert any((vars(place) if inspect.ismodule(place) else place).get(name) is not None for place in places), (
            f"{package}.{name}"
        )
    assert translate(ValueError("unknown")) is None


def test_errors_in_a_real_process(tmp_path: Path) -> None:
    def fcsd(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fcsd", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    bad = tmp_path / "r.yaml"
    bad.write_text("name: x\nname: y\n")
    done = fcsd("recipes", "show", str(bad))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {bad}:2: duplicate key 'name', first on line 1\n"
    assert fcsd("distil").returncode == 2
    piped = subprocess.run(
        f"{sys.executable} -m fcsd recipes show tiny | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert piped.stdout.startswith("name: ")
    assert "Traceback" not in piped.stderr
    shell = f"{sys.executable} -m fcsd recipes list >&-; exec {sys.executable} -m fcsd --help > /dev/full"
    unprinted = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120, check=False)
    assert (unprinted.returncode, unprinted.stderr.splitlines()[0]) == (7, "error: the disk is full")
    shell = f"exec {sys.executable} -m fcsd recipes copy tiny --out {tmp_path}/mine.yaml > /dev/full"
    unprinted = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120, check=False)
    assert (unprinted.returncode, (tmp_path / "mine.yaml").exists()) == (7, True)
    assert unprinted.stderr.startswith("error: the result cannot be printed: No space left on device\nhint: ")


@pytest.mark.parametrize("nowhere", ["2> /dev/full", ">&- 2>&-", "2> >(exec true)"])
def test_messages_that_cannot_be_printed_change_no_exit_code(nowhere: str) -> None:
    """They end no run either: a log may be on a full disk, its reader may have gone, and a terminal be closed."""
    code = (
        "import logging, sys\nfrom fcsd import checkpoint\nfrom fcsd.cli.main import main\n"
        "def full(model, **options):\n"
        "    logging.getLogger('fcsd').info('a message')\n"
        "    print('another', file=sys.stderr)\n"
        "    raise OSError(28, 'full')\n"
        "checkpoint.inspect_checkpoint = full\nsys.argv = ['fcsd', 'inspect', 'm']\nmain()\n"
    )
    ended = subprocess.run(["bash", "-c", f'"$@" {nowhere}', "-", sys.executable, "-c", code], timeout=120, check=False)
    assert ended.returncode == 7


def test_pictures_are_drawn_in_a_notebook_that_names_a_backend_of_its_own() -> None:
    code = "import sys\nfrom fcsd.cli.main import main\nsys.argv[1:] = ['--version']\n"
    code += "try: main()\nfinally: import matplotlib"
    named = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=named)


@pytest.mark.parametrize("import_first", ["time", "torch"])
def test_ctrl_c_ends_with_130_and_no_orphan(tmp_path: Path, import_first: str) -> None:
    """The signal arrives while a library function runs, in a process of its own group."""
    ready = tmp_path / "ready"
    code = (
        f"import sys, time, pathlib, signal, subprocess, {import_first}\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "from fcsd import checkpoint\nfrom fcsd.cli.main import main\n"
        "def slow(model, **options):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(600)\n"
        "checkpoint.inspect_checkpoint = slow\n"
        "sys.argv = ['fcsd', 'inspect', 'm']\n"
        "main()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not ready.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ready.exists(), process.communicate(timeout=120)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert stderr == "error: interrupted\n"
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize(("number", "message"), [(2, "interrupted"), (15, "stopped by SIGTERM")])
def test_a_signal_that_arrives_while_an_object_is_freed_is_not_lost(number: int, message: str) -> None:
    code = (
        "import os, signal, sys, time, weakref\nfrom fcsd import checkpoint\nfrom fcsd.cli.main import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def slow(model, **options):\n"
        f"    found, watch = set(), lambda _: os.kill(os.getpid(), {number})\n"
        "    dead = weakref.ref(found, watch)\n"
        "    del found\n"
        "    time.sleep(9)\n"
        "checkpoint.inspect_checkpoint = slow\nsys.argv = ['fcsd', 'inspect', 'm']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (128 + number, f"error: {message}\n")


def test_ctrl_c_during_the_imports_of_the_console_script_ends_without_a_traceback() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["fcsd"].split(":")
    code = (
        "import sys\n"
        "class Pressed:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': raise KeyboardInterrupt\n"
        f"sys.meta_path.insert(0, Pressed())\nfrom {module} import {function}\n{function}()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (130, "")


OPTIONS = ["--set", "--gpus", "--seed", "--resume", "--output-dir", "--json", "--dry-run", "--layers", "--wiring", "-v"]
WORDS = st.one_of(
    st.sampled_from([*COMMANDS, "recipes", "list", "show", "copy", *OPTIONS, "tiny", "optim.lr=1", "--", "-"]),
    st.integers(-(10**30), 10**30).map(str),
    st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20),
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch) -> None:
    """`recipes copy` writes to the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def every_library_function(library) -> None:
    for module, name in [
        ("fcsd.checkpoint", "inspect_checkpoint"),
        ("fcsd.convert", "convert_checkpoint"),
        ("fcsd.launch.world", "ensure_world"),
        ("fcsd.distill.loop", "distill_model"),
        ("fcsd.eval.harness", "evaluate_models"),
        ("fcsd.export.final", "export_model"),
        ("fcsd.export.push", "push_model"),
        ("fcsd.launch.environment", "snapshot"),
    ]:
        library(module, name, raises=errors.BadInputError("reached"))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(args=st.lists(WORDS, max_size=6))
def test_any_command_line_ends_without_a_traceback(args: list[str], every_library_function, elsewhere) -> None:
    """Whatever is typed, library functions are called with arguments they take, and errors are lines."""
    done = run(*args)
    assert done.exit_code in (0, 2, 3, 7)
    assert done.exception is None or isinstance(done.exception, SystemExit)
    if "-v" not in args and "--verbose" not in args:
        assert "Traceback" not in done.output


def test_stdout_holds_the_data_alone(library) -> None:
    def noisy(*_: object, **__: object) -> object:
        print("a library's chatter")
        return type("Found", (), {"to_json": lambda self: "{}"})()

    library("fcsd.checkpoint", "inspect_checkpoint").side_effect = noisy
    done = run("inspect", "m", "--json")
    assert done.stdout == "{}\n" and "chatter" in done.stderr


def test_env_sees_a_package_whose_distribution_has_another_name(tmp_path, monkeypatch):
    from fcsd.launch import environment

    monkeypatch.setattr(environment, "PACKAGES", ["typer", "a_build", "a_folder", "not_here"])
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("a_build", "a_folder"):  # the second belongs to no distribution
        (tmp_path / f"{name}.py").touch()
    folder = tmp_path / "a_build_cpu-0.24.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: a-build-cpu\nVersion: 0.24.0\n")
    (folder / "top_level.txt").write_text("a_build\n")
    found = environment.snapshot()["packages"]
    typer = importlib.metadata.version("typer")
    assert found == {"typer": typer, "a_build": "0.24.0", "a_folder": None, "not_here": None}


def interrupt_an_import(number: int) -> None:
    sys.modules["torch"] = types.ModuleType("torch")
    sys.modules["torch"].__spec__ = importlib.machinery.ModuleSpec("torch", None)
    sys.modules["torch"].__spec__._initializing = True  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with command.ended_by_signals():
        try:
            signal.raise_signal(number)
        except BaseException:
            os._exit(1)  # an exception is what torch's C++ does not survive


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_ends_the_process_without_an_exception(number):
    assert ranks.exit_code(interrupt_an_import, number) == 128 + number


def test_signals_that_are_ignored_or_handled_stay_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with pytest.raises(errors.Stopped) as stopped, command.ended_by_signals():
            signal.raise_signal(signal.SIGHUP)
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_options_are_taken_by_their_earlier_names(library) -> None:
    fake = library("fcsd.convert", "convert_checkpoint", Shown())
    run("convert", "m", "out", "--wiring", "desync", "--tp-degree=2", "--reduce", "last")
    assert (fake.call_args.kwargs["tp_degree"], fake.call_args.kwargs["reduce"]) == (2, "last")
    chats = library("fcsd.serve.chat", "chat", [])
    library("fcsd.checkpoint.location", "directory_of")
    library("fcsd.launch.world", "ensure_world")
    run("chat", "m", "--gpus", "2", "--reduce", "host", "--prompts", "file.txt")
    assert (chats.call_args.kwargs["reduce"], chats.call_args.kwargs["prompts"]) == ("host", Path("file.txt"))
    measured = library("fcsd.bench.serve.measure", "bench", ({"ratios": [1], "tables": {}}, ""))
    run(
        "bench",
        "serve",
        "tiny",
        "--tp",
        "2",
        "--prompts",
        "8,16",
        "--arrivals",
        "3",
        "--layers",
        "5",
        "--",
        "--layers",
        "6",
    )
    load = measured.call_args.args[0]
    assert (load.tp, load.prompts, load.arrivals, load.layers) == (2, (8, 16), 3, 5)
    assert load.options == ("--layers", "6"), "what stands behind -- is vLLM's"


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("1", False)])
def test_errors_are_coloured_on_a_terminal(variable: str, coloured: bool, monkeypatch, capsys) -> None:
    monkeypatch.setenv("NO_COLOR", variable)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    command.report_error(errors.ConfigError("wrong", "right"))
    assert ("\x1b[31merror:\x1b[0m wrong" in capsys.readouterr().err) is coloured


def test_a_quiet_command_prints_results_warnings_and_errors_alone() -> None:
    code = (
        "import logging, fcsd.checkpoint, fcsd.cli.main as cli, sys\n"
        "class Shown:\n"
        "    def to_text(self): return 'a 1'\n"
        "def inspect(*_, **__):\n"
        "    logging.getLogger('fcsd.checkpoint').info('a step')\n"
        "    logging.getLogger('fcsd.checkpoint').warning('a doubt')\n"
        "    return Shown()\n"
        "fcsd.checkpoint.inspect_checkpoint = inspect\n"
        "cli.app(sys.argv[1:])"
    )
    for asked, said in ((["inspect", "m"], "a step\na doubt\n"), (["-q", "inspect", "m"], "a doubt\n")):
        done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, timeout=120)
        assert (done.stdout, done.stderr) == ("a 1\n", said)


def test_the_shell_completes_recipes_wirings_and_shapes() -> None:
    completed = {
        "fcsd distill ti": "tiny",
        "fcsd convert m out --wiring lad": "ladder",
        "fcsd bench serve llama3-8": "llama3-8b",
    }
    for line, word in completed.items():
        env = {"_FCSD_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
        done = CliRunner().invoke(app, [], prog_name="fcsd", env=env)
        assert word in done.stdout.split()


def test_distill_takes_the_settings_that_the_plan_finds(library) -> None:
    library("fcsd.launch.world", "ensure_world")
    library("fcsd.distill.inputs", "require_inputs")
    loop = library("fcsd.distill.loop", "distill_model", Path("runs/x"))
    plans = library("fcsd.plan", "plan_run")
    change = Change(["--set train.micro_batch_size=2", "--set optim.offload=host"], 1 << 30, 0, 0, 1.0)
    more = Change([*change.written, "--nodes 2"], 1 << 30, 0, 0, 1.0)

    def planned(fits: bool, change: Change | None, faster: Change | None) -> types.SimpleNamespace:
        def check() -> None:
            if not fits:
                raise errors.DoesNotFitError("too large")

        return types.SimpleNamespace(change=change, faster=faster, described=lambda change: "", check=check)

    for plan, size, code in (
        (planned(False, change, None), 2, 0),
        (planned(True, None, change), 2, 0),
        (planned(True, None, None), 8, 0),
        (planned(False, more, None), None, 8),
        (planned(False, None, None), None, 8),
    ):
        plans.return_value = plan
        loop.reset_mock()
        done = run("distill", "tiny", "--fit", "--gpus", "1", "--set", "train.micro_batch_size=8")
        assert done.exit_code == code, done.output
        assert size == (loop.call_args and loop.call_args.args[0].recipe.train.micro_batch_size)
