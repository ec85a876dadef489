"""The two scripts of the README do all the set-up, on a machine that has only coreutils, bash and python3."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COREUTILS = "cat chmod cp cut dirname env head ln ls mkdir mktemp mv nproc rm sha256sum sort tail touch uname"
INSTALL = "install -qq -y --no-install-recommends"
# Notes what it is asked for. "Installing" a compiler or a sandbox creates a program that does nothing.
APT_GET = """\
echo "$@" >> {log}
case "$*" in *gcc*) for name in gcc bwrap; do echo '#!/bin/sh' > {bin}/$name; chmod +x {bin}/$name; done;; esac
"""
NO_ENSUREPIP = 'case "$*" in *ensurepip*) exit 1;; esac\n'


class Machine:
    """A PATH of its own, with stand-ins for `apt-get` and `id`."""

    def __init__(self, folder: Path, repo: Path) -> None:
        self.bin, self.log, self.repo = folder / "bin", folder / "asked", repo
        self.venv = folder / "venv"
        self.bin.mkdir()
        for name in [*COREUTILS.split(), "bash"]:
            (self.bin / name).symlink_to(shutil.which(name) or name)
        self.program("python3", f'exec {sys.executable} "$@"')
        self.program("apt-get", APT_GET.format(log=self.log, bin=self.bin))
        self.user(0)

    def program(self, name: str, body: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{body}\n")
        (self.bin / name).chmod(0o755)

    def user(self, uid: int) -> None:
        self.program("id", f"echo {uid}")

    def environment_is_up_to_date(self, extras: str = "dev") -> None:
        """As the scripts leave it, so that pip has nothing to do."""
        (self.venv / "bin").mkdir(parents=True)
        (self.venv / "bin/python").symlink_to(sys.executable)
        (self.venv / "bin/activate").touch()
        needs = b"".join((self.repo / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))
        (self.venv / "fcsd-installed").write_text(f"{self.repo} {hashlib.sha256(needs).hexdigest()}  - {extras}\n")

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        settings = {"PATH": str(self.bin), "FCSD_VENV": str(self.venv)}
        return subprocess.run(command, cwd=self.repo, env=settings, capture_output=True, text=True, timeout=300)

    def set_up(self, before: str = "") -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", f"set -euo pipefail; {before} source scripts/venv.sh; echo ready")

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def machine(tmp_path: Path, repo: Path) -> Machine:
    return Machine(tmp_path, repo)


def test_root_gets_what_is_missing_once(machine: Machine):
    machine.environment_is_up_to_date()
    done = machine.set_up()
    assert done.returncode == 0 and done.stdout.endswith("ready\n"), done.stderr
    assert machine.asked() == ["update -qq", f"{INSTALL} gcc libc6-dev bubblewrap"]
    assert machine.set_up().stdout == "ready\n"
    assert len(machine.asked()) == 2


@pytest.mark.parametrize("script", ["scripts/test.sh", "scripts/quickstart.sh"])
def test_others_are_told_what_to_type(machine: Machine, script: str, tmp_path: Path):
    machine.user(1000)
    machine.program("python3", f'{NO_ENSUREPIP}exec {sys.executable} "$@"')
    done = machine.run(str(machine.repo / script), *([str(tmp_path / "out")] if "quickstart" in script else []))
    assert done.returncode == 1
    packages = "python3-venv gcc libc6-dev bubblewrap"
    line = f"sudo apt-get update && sudo apt-get install -y --no-install-recommends {packages}"
    assert done.stderr.splitlines()[1].strip() == line
    assert machine.asked() == [] and not machine.venv.exists()


def test_without_apt_the_packages_are_named(machine: Machine):
    (machine.bin / "apt-get").unlink()
    machine.environment_is_up_to_date()
    done = machine.set_up()
    assert done.returncode == 1 and "missing. Debian calls them: gcc libc6-dev bubblewrap." in done.stderr


def test_a_failed_installation_ends_the_set_up(machine: Machine):
    machine.environment_is_up_to_date()
    machine.program("apt-get", "exit 100")
    done = machine.set_up()
    assert done.returncode == 100 and "ready" not in done.stdout


def test_the_quickstart_installs_no_tools_of_development(machine: Machine):
    machine.environment_is_up_to_date("train,eval")
    machine.program("gcc", "")
    machine.program("bwrap", "")
    machine.program("python", f'echo "python $*" >> {machine.log}')
    quickstart = "extras=train,eval;"
    assert quickstart[:-1] in (machine.repo / "scripts/quickstart.sh").read_text()
    assert machine.set_up(quickstart).stdout == "ready\n" and machine.asked() == []
    assert machine.set_up().returncode == 0
    (asked,) = machine.asked()
    assert asked.startswith("python -m pip install") and asked.endswith(
        "--constraint constraints.txt --editable .[dev]"
    )
    assert machine.set_up(quickstart).returncode == 0 and len(machine.asked()) == 1, "dev has what it needs"
    (machine.venv / "fcsd-installed").unlink()
    machine.program("uv", f'echo "uv $*" >> {machine.log}')
    assert machine.set_up(quickstart).returncode == 0
    assert machine.asked()[1] == "uv pip install --quiet --constraint constraints.txt --editable .[train,eval]"


def test_ci_installs_nothing_itself(repo: Path):
    text = (repo / ".ci/run").read_text()
    assert "source scripts/venv.sh" in text
    assert [word for word in ("apt-get", "pip install", "-m venv") if word in text] == []
