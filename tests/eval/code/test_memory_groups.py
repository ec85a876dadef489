"""A run has one memory limit for all its processes, and a program killed for the host's memory is not judged by it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fcsd.eval.code import sandbox, sandbox_levels
from fcsd.eval.code.memory_groups import candidates, find_parent, memory_group, remove_stale
from fcsd.eval.code.sandbox import Exit, Limits, Sandbox

CONTAINED = [Sandbox(*way) for way in sandbox_levels.commands()]
LEVELS = [*CONTAINED, Sandbox("none", (), drops_root=False)]
LIMITS = Limits(cpu_s=60, wall_s=120, memory_bytes=1 << 30)
FORKS = """\
import os, signal
def f(sizes):
    for size in sizes:
        child = os.fork()
        if child == 0:
            held = bytearray(size << 20)
            signal.pause()
    os.wait()  # one that was killed; the others wait for ever
    os.kill(os.getpid(), signal.SIGKILL)
"""
NEEDS_GROUPS = pytest.mark.skipif(find_parent() is None, reason="this process may not create control groups")


def run(level: Sandbox, code: str, *arguments: object, limits: Limits = LIMITS) -> Exit:
    return sandbox.run(level, code, [list(arguments)], lambda _: True, entry_point="f", limits=limits)


@NEEDS_GROUPS
@pytest.mark.parametrize("level", CONTAINED, ids=lambda level: level.level)
def test_processes_of_a_run_share_its_memory_limit(level: Sandbox):
    """Eight processes of 64 MiB: each is below the limit of 256 MiB, together they exceed it."""
    level = replace(level, group_parent=find_parent())
    ended = run(level, FORKS, [64] * 8, limits=replace(LIMITS, memory_bytes=256 << 20))
    assert ended == Exit("died", "its processes needed more than 256 MiB of memory")
    assert run(level, "def f(x): return x", 1).kind == "done"


KILLED = "import os\ndef f(x):\n    os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.level)
def test_a_program_killed_while_the_host_has_no_memory_is_lost(level: Sandbox, monkeypatch: pytest.MonkeyPatch):
    assert run(level, KILLED, 1) == Exit("died", "killed by signal 9")
    counts = iter([3, 4])  # before and after the run, as /proc/vmstat would count them
    monkeypatch.setattr(sandbox, "_oom_kills", lambda: next(counts))
    assert run(level, KILLED, 1) == Exit("lost", "the host ran out of memory")


@NEEDS_GROUPS
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.level)
def test_a_program_is_judged_while_others_run_out_of_memory(level: Sandbox, monkeypatch: pytest.MonkeyPatch):
    """A group counts its own processes, so that a program which needs too much does not excuse another."""
    counts = iter([3, 4])
    monkeypatch.setattr(sandbox, "_oom_kills", lambda: next(counts))
    level = replace(level, group_parent=find_parent())
    assert run(level, KILLED, 1) == Exit("died", "killed by signal 9")


REAL = """\
import dataclasses, json, sys
from fcsd.eval.code import sandbox
from fcsd.eval.code.memory_groups import find_parent
level = sandbox.Sandbox(**json.loads(sys.argv[1]))
if sys.argv[2] == "group":
    level = dataclasses.replace(level, group_parent=find_parent())
code = "def f(x): return len(bytearray(900 << 20))"
ended = sandbox.run(level, code, [[1]], lambda _: True, entry_point="f", limits=sandbox.Limits(60, 120))
print(json.dumps([ended.kind, ended.detail]))
"""


@NEEDS_GROUPS
@pytest.mark.parametrize("counted_by", ["host", "group"])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.level)
def test_a_right_program_that_the_kernel_kills_is_lost(level: Sandbox, counted_by: str):
    """The group around caller and sandbox plays the host: it has 300 MiB, and the program needs 900."""
    parent = find_parent()
    assert parent
    fields = json.dumps({"level": level.level, "command": level.command, "drops_root": level.drops_root})
    with memory_group(parent, 300 << 20) as host:
        if counted_by == "group" and not (host.path / "memory.limit_in_bytes").exists():
            pytest.skip("groups are nested in version 1 only")
        command = [*host.enter, sys.executable, "-c", REAL, fields, counted_by]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["lost", "the host ran out of memory"]


@NEEDS_GROUPS
def test_groups_of_dead_processes_are_removed():
    parent = find_parent()
    assert parent
    finished = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    stale = parent / f"fcsd-{finished.stdout.strip()}-00"
    stale.mkdir()
    with memory_group(parent, 1 << 30) as group:
        remove_stale(parent)
        assert not stale.exists() and group.path.exists()
    assert not group.path.exists()


def test_groups_are_created_only_where_their_memory_can_be_limited(tmp_path: Path):
    """On version 2 beside the own group, if the group above both distributes memory."""
    own = tmp_path / "user" / "session"
    own.mkdir(parents=True)
    assert candidates(tmp_path, "0::/user/session\n") == []
    (own / "cgroup.subtree_control").write_text("pids\n")
    (own.parent / "cgroup.subtree_control").write_text("memory pids\n")
    assert candidates(tmp_path, "0::/user/session\n") == [own.parent]
    (tmp_path / "memory" / "job").mkdir(parents=True)
    assert candidates(tmp_path, "4:memory:/job\n1:cpu:/\n") == [tmp_path / "memory" / "job"]
    assert candidates(tmp_path, "4:memory:/absent\n") == []
