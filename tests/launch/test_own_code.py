"""Further processes run the fcsd of this process, not a module of that name in the current directory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fcsd import __version__
from fcsd.launch import own_code


@pytest.fixture
def planted(tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with an ``fcsd.py``, where this fcsd is found through PYTHONPATH."""
    (tmp_path / "fcsd.py").write_text("print('planted')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repo))
    return tmp_path


def test_a_command_does_not_run_a_file_of_the_current_directory(planted: Path) -> None:
    done = subprocess.run([*own_code.command(), "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_processes_of_torchrun_do_not_run_one_either(planted: Path) -> None:
    environment = dict(os.environ)
    own_code.leave_out_current_directory(environment)
    command = [sys.executable, "-m", "fcsd", "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_a_checkout_that_is_the_current_directory_is_named(repo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repo)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert own_code.command()[:2] == ["env", f"PYTHONPATH={repo}:/elsewhere"]
    environment = {"PATH": "/bin"}
    own_code.leave_out_current_directory(environment)
    assert environment == {"PATH": "/bin", "PYTHONPATH": str(repo), "PYTHONSAFEPATH": "1"}
    monkeypatch.setenv("PYTHONPATH", str(repo))
    assert own_code.command()[0] == sys.executable
