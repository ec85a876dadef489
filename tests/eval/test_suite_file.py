"""A suite in a user's file: its rows, and what is refused; the whole of it runs in tests/docs/test_contributing.py."""

from pathlib import Path

import pytest

from fcsd.errors import ConfigError
from fcsd.eval.suite import select, select_any
from fcsd.eval.task_files import folders_of, tasks_folder
from fcsd.eval.tasks import load_tasks

SUITE = "tasks:\n  - piqa\n  - {task: gsm8k, column: GSM, shots: 2, max_tokens: 8}\n  - {task: gsm8k, column: GSM 0}\n"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(SUITE)
    return tmp_path / "mine.yaml"


def test_rows_have_the_settings_of_the_file(mine: Path) -> None:
    piqa, short, plain = select(str(mine))
    assert (piqa.column, piqa.shots, piqa.metric, piqa.filter) == ("piqa", None, "", "")
    assert (short.column, short.task, short.shots, short.generation) == ("GSM", "gsm8k", 2, {"max_gen_toks": 8})
    assert (plain.column, plain.shots, plain.generation) == ("GSM 0", None, None)
    assert select(str(mine), ["GSM 0", "PIQA"]) == [plain, piqa]
    assert select_any(str(mine), ["piqa", "arc_easy"])[1].directory == ""


@pytest.mark.parametrize(
    "text, said",
    [
        ("tasks: [{task: piqa, shot: 1}]", r"mine.yaml:1: unknown key 'tasks.0.shot'; did you mean 'tasks.0.shots'"),
        ("tasks: [{column: a}]", "mine.yaml:1: 'tasks.0.task' is missing"),
        ("tasks: []", "mine.yaml:1: tasks: List should have at least 1 item"),
        ("- piqa", "mine.yaml:1"),
        ("tasks: [piqa, piqa]", "two tasks have the column 'piqa'"),
        ("tasks: [{task: piqa, chance: 101}]", "less than or equal to 100"),
    ],
)
def test_what_is_no_suite_is_refused(mine: Path, text: str, said: str) -> None:
    mine.write_text(text)
    with pytest.raises(ConfigError, match=said):
        select(str(mine))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        select(str(tmp_path / "other.yml"))


@pytest.mark.parametrize("setting", ["metric: f1", "filter: nosuch"])
def test_a_metric_or_filter_that_the_task_lacks_is_refused(mine: Path, repo: Path, setting: str) -> None:
    mine.write_text(f"tasks: [{{task: piqa, {setting}}}]")
    with (
        pytest.raises(ConfigError, match=f"piqa has no {setting.split(':')[0]}"),
        load_tasks(select(str(mine)), repo / "assets/mirror"),
    ):
        pass


def test_tasks_are_found_by_their_files() -> None:
    found = folders_of(["piqa", "arc_easy"])
    assert {name: folder.relative_to(tasks_folder()).as_posix() for name, folder in found.items()} == {
        "piqa": "piqa",
        "arc_easy": "arc",
    }
    with pytest.raises(ConfigError, match="has a task 'piqqa'") as refused:
        folders_of(["piqa", "piqqa"])
    assert "piqa" in str(refused.value.hint)
