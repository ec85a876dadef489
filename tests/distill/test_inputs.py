"""What a recipe reads is looked for before anything expensive is done: before torch is imported, or a model loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import runs

from fcsd.checkpoint import open_checkpoint
from fcsd.config import load_recipe
from fcsd.distill import loop, prepare
from fcsd.distill.inputs import require_inputs
from fcsd.errors import BadInputError

# Runs commands in one process and prints, for each, its exit code, its messages and whether torch was imported.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from fcsd.cli.main import app
for command in json.loads(sys.argv[1]):
    done = CliRunner().invoke(app, command, prog_name="fcsd")
    print(json.dumps([done.exit_code, done.stderr, "torch" in sys.modules]))
"""


def test_tiny_says_how_to_convert_its_model_in_any_folder(tmp_path: Path, repo: Path) -> None:
    """The line can be typed as it is, because it names the bundled model by its full path; torch is not imported."""
    commands = [
        ["distill", "--recipe", "tiny"],
        ["distill", "tiny-sft", "--dry-run", "--gpus", "2"],
        ["distill", "--sweep", "tiny-sweep"],
        ["plan", "tiny"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps(commands)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    line = "hint: Convert the original first: fcsd convert bundled:teacher runs/tiny-farskip --wiring farskip\n"
    assert len(answers) == len(commands)
    for code, stderr, torch_imported in answers:
        assert (code, torch_imported) == (3, False)
        assert "runs/tiny-farskip: there is no such directory here" in stderr and stderr.endswith(line)
    assert not list(tmp_path.iterdir())


def test_bundled_files_are_found_from_any_folder(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    changes = ["model=bundled:teacher", "init.wiring=farskip", "teacher=bundled:teacher"]
    recipe = load_recipe("tiny", changes).recipe
    assert recipe.model == str(repo / "assets/teacher") == str(open_checkpoint("bundled:teacher").path)
    require_inputs(recipe)
    wrong = load_recipe("tiny", [*changes, "data.held_out.path=bundled:corpus/held_out.json"]).recipe
    with pytest.raises(BadInputError, match="there is no such data file") as caught:
        require_inputs(wrong)
    assert f"Did you mean {repo}/assets/corpus/held_out.jsonl?" in caught.value.hint


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"data__sources": [{"path": "corpsu.jsonl"}]}, "corpsu.jsonl: there is no such data file"),
        ({"data__held_out": {"path": "{folder}/held_out.jsonl", "column": "txt"}}, "no usable row"),
    ],
)
def test_data_are_read_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, reason: str
) -> None:
    runs.write_models(tmp_path)
    change = json.loads(json.dumps(change).replace("{folder}", str(tmp_path)))

    def load(*_args: object, **_options: object) -> None:
        raise AssertionError("a model was loaded before the data were read")

    monkeypatch.setattr(prepare, "load_student", load)
    monkeypatch.setattr(prepare, "load_teacher", load)
    with pytest.raises(BadInputError, match=reason):
        loop.distill_model(runs.resolved(tmp_path, **change))
    assert not (tmp_path / "run").exists()
