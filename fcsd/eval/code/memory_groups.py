"""Sets one memory limit for all processes of a run together, where the kernel's control groups allow it.

A resource limit holds per process, so a program with sixteen processes may use sixteen times the memory. A control
group counts all of its processes, their files on tmpfs included. Whether this process may create one depends on the
machine: root usually may, and other users may where systemd has delegated a subtree to them. Version 1 and version 2
of the interface are supported.
"""

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PREFIX = "fcsd-"
REMOVAL_S = 10.0  # killed processes leave their group within milliseconds; a busy machine may need longer

# This shell program moves itself into the group and then executes the command. Zero means the process that writes.
ENTER = 'echo 0 > "$0" && exec "$@"'


@dataclass(frozen=True)
class MemoryGroup:
    """A control group with a memory limit, for one run."""

    path: Path

    @property
    def enter(self) -> tuple[str, ...]:
        """The words to put before a command so that it starts inside the group."""
        return ("/bin/sh", "-c", ENTER, str(self.path / "cgroup.procs"))

    def oom_kills(self) -> int:
        """How many of its processes the kernel has killed because memory ran out, here or on the host."""
        version_1 = self.path / "memory.oom_control"
        return _counters(version_1 if version_1.exists() else self.path / "memory.events")["oom_kill"]

    def reached_limit(self) -> bool:
        """Whether the group has asked for more memory than its limit."""
        version_1 = self.path / "memory.failcnt"
        if version_1.exists():
            return int(version_1.read_text()) > 0
        return _counters(self.path / "memory.events")["oom"] > 0


@contextlib.contextmanager
def memory_group(parent: Path, limit_bytes: int) -> Iterator[MemoryGroup]:
    """Create a group below `parent`, and kill what is left in it at the end.

    Raises:
        OSError: this process may not create groups there.
    """
    path = parent / f"{PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    path.mkdir()
    try:
        if (path / "memory.limit_in_bytes").exists():  # version 1
            (path / "memory.limit_in_bytes").write_text(str(limit_bytes))
        else:
            (path / "memory.max").write_text(str(limit_bytes))
            with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
                (path / "memory.swap.max").write_text("0")
        yield MemoryGroup(path)
    finally:
        _remove(path, time.monotonic() + REMOVAL_S)


def find_parent() -> Path | None:
    """The control group below which this process can create memory groups, or None."""
    possible = candidates(ROOT, Path("/proc/self/cgroup").read_text())
    return next((path for path in possible if _works(path)), None)


def candidates(root: Path, own_groups: str) -> list[Path]:
    """Groups whose children can have memory limits, best first.

    Version 2 forbids such children below a group that has processes, unless it is the root. There the new groups become
    siblings of this process's own group.

    Args:
        root: where the control groups are mounted.
        own_groups: content of `/proc/self/cgroup`.
    """
    found: list[Path] = []
    for line in own_groups.splitlines():
        _, controllers, name = line.split(":", 2)
        if "memory" in controllers.split(","):  # version 1
            found.append(root / "memory" / name.lstrip("/"))
        elif not controllers:  # version 2
            own = root / name.lstrip("/")
            found += [path for path in (own, own.parent) if path.is_relative_to(root) and _has_memory(path)]
    return [path for path in found if path.is_dir()]


def remove_stale(parent: Path) -> None:
    """Remove groups whose creators were killed before they could remove them."""
    for path in parent.glob(f"{PREFIX}*-*"):
        creator = path.name.removeprefix(PREFIX).split("-")[0]
        if not Path("/proc", creator).exists():
            _remove(path, time.monotonic())


def _counters(path: Path) -> dict[str, int]:
    """The numbers in a file with a name and a number per line."""
    return {name: int(number) for name, number in (line.split() for line in path.read_text().splitlines())}


def _has_memory(path: Path) -> bool:
    """Whether children of a group of version 2 have a memory limit."""
    with contextlib.suppress(OSError):
        return "memory" in (path / "cgroup.subtree_control").read_text().split()
    return False


def _works(parent: Path) -> bool:
    """Whether a process can be started in a new group below `parent`."""
    try:
        with memory_group(parent, 1 << 30) as group:
            return subprocess.run([*group.enter, "/bin/true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _remove(path: Path, deadline: float) -> None:
    """Kill the processes of a group and remove it; a group that stays is removed by `remove_stale` later."""
    while True:
        with contextlib.suppress(OSError):
            processes = [int(line) for line in (path / "cgroup.procs").read_text().split()]
            for process in filter(None, processes):  # zero is a process outside of this process's PID namespace
                os.kill(process, signal.SIGKILL)
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() >= deadline:
                return
        time.sleep(0.01)
