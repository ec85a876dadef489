"""The README is true: its tour runs as printed, its two commands are what CI runs."""

import re
import shlex

import pytest
import ranks

from fcsd import recipes


@pytest.fixture(scope="module")
def readme(repo):
    return (repo / "README.md").read_text()


def test_the_tour_runs(readme, repo, tmp_path):
    (tmp_path / "assets").symlink_to(repo / "assets")
    (tour,) = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    assert readme[: readme.index("```console")].count("\n") < 30, "the commands are on the first screen"
    commands = [line.removeprefix("$ ") for line in tour.splitlines()]
    assert len(commands) == 5 and all(command.startswith("fcsd ") for command in commands)
    for command in commands:
        done = ranks.fcsd(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet)
    done = ranks.script(tmp_path / "snippet.py")
    assert done.returncode == 0, done.stderr


def test_the_two_commands_are_what_ci_runs(readme, repo):
    (block,) = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    commands = [line.split()[0] for line in block.splitlines()]
    assert commands == ["scripts/test.sh", "scripts/quickstart.sh"]
    ci = (repo / ".ci/run").read_text().splitlines()
    for command in commands:
        assert command in ci and (repo / command).stat().st_mode & 0o111


def test_the_large_runs_name_recipes_that_exist(readme):
    """They need GPUs and the hub."""
    (block,) = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    commands = [shlex.split(line.split(" #")[0].split(" >")[0]) for line in block.splitlines()]
    named = [
        words[words.index(next(w for w in ("plan", "--recipe", "--sweep") if w in words)) + 1] for words in commands
    ]
    assert len(named) > 3 and set(named) <= set(recipes.names())
