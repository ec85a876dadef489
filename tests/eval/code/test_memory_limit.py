"""A run has one memory limit for all its processes, and a program killed for the host's memory is not judged by it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fcsd.eval.code import sandbox
from fcsd.eval.code.sandbox import Exit, Limits, Sandbox, sandboxes, whole

CONTAINED = sandboxes()
LEVELS = [*CONTAINED, Sandbox("none", (), drops_root=False)]
LIMITS = Limits(cpu_s=60, wall_s=120, memory_bytes=1 << 30)
FORKS = """\
import os, signal
def f(sizes):
    for size in sizes:
        child = os.fork()
        if child == 0:
            held = bytearray(b'x') * (size << 20)
            signal.pause()
    os.wait()  # one that was killed; the others wait for ever
    os.kill(os.getpid(), signal.SIGKILL)
"""
SHARED = """\
import os, time
def f(processes):
    held = bytearray(b'x') * (100 << 20)
    children = [os.fork() for _ in range(processes)]
    if 0 in children:
        time.sleep(1)
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
"""


def name_of(level: Sandbox) -> str:
    return f"{level.level}-{'root' if level.drops_root else 'user'}"


def run(level: Sandbox, code: str, *arguments: object, limits: Limits = LIMITS) -> Exit:
    return whole(sandbox.run(level, code, [list(arguments)], entry_point="f", limits=limits), lambda _: None)


@pytest.mark.parametrize("level", CONTAINED, ids=name_of)
def test_processes_of_a_run_share_its_memory_limit(level: Sandbox):
    """Eight processes of 64 MiB: each is below the limit of 256 MiB, together they exceed it."""
    limits = replace(LIMITS, memory_bytes=256 << 20)
    ended = run(level, FORKS, [64] * 8, limits=limits)
    assert ended == Exit("died", "its processes needed more than 256 MiB of memory")
    assert run(level, "def f(x): return x", 1).kind == "done"
    assert run(level, SHARED, 4, limits=limits).kind == "done", "pages that four processes share count once"


KILLED = "import os\ndef f(x):\n    os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("level", LEVELS, ids=name_of)
def test_a_program_killed_while_the_host_has_no_memory_is_lost(level: Sandbox, monkeypatch: pytest.MonkeyPatch):
    assert run(level, KILLED, 1) == Exit("died", "killed by signal 9")
    counts = iter([3, 4])  # before and after the run, as /proc/vmstat would count them
    monkeypatch.setattr(sandbox, "_oom_kills", lambda: next(counts))
    assert run(level, KILLED, 1) == Exit("lost", "the host ran out of memory")


REAL = """\
import json, sys
from fcsd.eval.code import sandbox
level = sandbox.Sandbox(**json.loads(sys.argv[1]))
code = "def f(x): return len(bytearray(900 << 20))"
run = sandbox.run(level, code, [[1]], entry_point="f", limits=sandbox.Limits(60, 120))
ended = sandbox.whole(run, lambda _: None)
print(json.dumps([ended.kind, ended.detail]))
"""


@contextlib.contextmanager
def host_with(memory_bytes: int) -> Iterator[Path]:
    """A control group (of version 1, where groups are nested) that plays a host with this much memory."""
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    parents = [Path("/sys/fs/cgroup/memory", name.lstrip("/")) for _, kind, name in own if "memory" in kind.split(",")]
    group = next((parent / f"fcsd-test-{os.getpid()}" for parent in parents if os.access(parent, os.W_OK)), None)
    if group is None:
        pytest.skip("this process may not create control groups of version 1")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(memory_bytes))
        yield group
    finally:
        group.rmdir()


@pytest.mark.parametrize("level", LEVELS, ids=name_of)
def test_a_right_program_that_the_kernel_kills_is_lost(level: Sandbox):
    """The group around caller and sandbox plays the host: it has 300 MiB, and the program needs 900."""
    fields = json.dumps({"level": level.level, "command": level.command, "drops_root": level.drops_root})
    with host_with(300 << 20) as host:
        enter = ["/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"', str(host / "cgroup.procs")]
        command = [*enter, sys.executable, "-c", REAL, fields]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["lost", "the host ran out of memory"]
