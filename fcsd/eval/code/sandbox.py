"""Runs untrusted programs without access to the network, to the host's files and to the environment.

There are two mechanisms. The first that works on this machine is used:

* `bwrap`: bubblewrap >= 0.8. As root it builds the mounts and the runner then becomes an unused uid (the
  kernel does not enforce RLIMIT_NPROC for root); as anyone else it uses a user namespace.
* `unshare`: the same namespaces and a file system of read-only binds, built with util-linux alone.
* otherwise `find_sandbox` refuses, unless unsafe execution is accepted: level `none`, resource limits only.

Inside, a program sees `/usr`, the interpreter's own prefixes (read-only), its own processes, a small `/tmp`,
and nothing else. A level is used only after a probe program has failed to get out of it.

Memory is limited per process (address space), and per run where control groups allow it (`memory_groups`). System calls
that provide memory outside of the address space, or namespaces in which more of it can be mounted, are filtered
(`sandbox_runner.filter_system_calls`). The filter takes the place of setting `kernel.shm*` and
`user.max_user_namespaces` to zero inside: before Linux 6.9 only root can set the former, and where root builds the
sandbox without a user namespace, the latter is the host's own setting.
"""

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from fcsd.errors import FcsdError
from fcsd.eval.code import sandbox_levels, sandbox_runner
from fcsd.eval.code.memory_groups import find_parent, memory_group, remove_stale

PYTHON = (sys.executable, "-s", "-P", "-B", "-c")


@dataclass(frozen=True)
class Limits:
    """The resources that one program may use.

    CPU time and file size are limited per process, and wall time and the number of processes per run.

    Memory is limited per process, and to the same number of bytes per run where control groups allow it. A busy
    program is ended by the CPU limit. The wall limit only ends programs that sleep or block; it is so wide that a right
    program does not reach it on a machine that is loaded several times over.
    """

    cpu_s: int = 10
    wall_s: float = 35.0
    memory_bytes: int = 2 << 30
    processes: int = 16
    file_bytes: int = 16 << 20
    open_files: int = 64
    reply_bytes: int = 32 << 20


@dataclass(frozen=True)
class Sandbox:
    """The command and the settings that start the runner in a sandbox.

    Attributes:
        level: `bwrap`, `unshare` or `none`.
        command: the words that are put before the interpreter.
        drops_root: whether the runner starts as root and must change to an unused uid.
        group_parent: the control group below which every run gets its memory group, if there is one.
    """

    level: str
    command: tuple[str, ...]
    drops_root: bool
    group_parent: Path | None = None


@dataclass(frozen=True)
class Exit:
    """The end of a run.

    `kind` is `done` (every call was answered), `stopped` (the receiver wanted no more replies), `died` (the program
    ended itself or broke a limit), `timeout` (CPU or wall time), or `lost` (the run never started or was killed from
    outside, for example because the host ran out of memory; this says nothing about the program).
    """

    kind: Literal["done", "stopped", "died", "timeout", "lost"]
    detail: str


def find_sandbox(*, accept_unsafe_exec: bool = False) -> Sandbox:
    """The best sandbox that works here. A probe program is run in each until one contains it.

    Raises:
        FcsdError: none works and `accept_unsafe_exec` is false.
    """
    reasons = []
    group_parent = find_parent()
    if group_parent:
        remove_stale(group_parent)
    for level, command, drops_root in sandbox_levels.commands():
        sandbox = Sandbox(level, command, drops_root, group_parent)
        reason = _probe(sandbox)
        if reason is None:
            return sandbox
        reasons.append(f"{level}: {reason}")
    if accept_unsafe_exec:
        return Sandbox("none", (), drops_root=False, group_parent=group_parent)
    raise FcsdError(
        f"no sandbox for generated code: {'; '.join(reasons) or 'neither bwrap nor unshare is installed'}",
        hint="install bubblewrap 0.8 or later on a machine that allows namespaces, or accept unsafe execution on a "
        "machine that holds nothing of value",
    )


def run(
    sandbox: Sandbox,
    code: str,
    calls: Sequence[Any],
    receive: Callable[[bytes], bool],
    *,
    entry_point: str | None,
    limits: Limits,
    not_none: bool = False,
) -> Exit:
    """Execute `code`, then each call in order, and give every reply to `receive` until that returns False.

    Args:
        calls: encoded argument lists for `entry_point`; expressions where `entry_point` is None.
        receive: gets untrusted bytes, from an honest runner `{"index": i, "value": encoded}`,
            `{"index": i, "raised": text}`, `{"load": text}` and last `{"done": CPU seconds}`.
        not_none: for values that are not data: reply only whether a value is not None. Booleans are sent unchanged.
    """
    # The uid is used by no other process, so that RLIMIT_NPROC counts the processes of this run alone.
    uid = 30000 + secrets.randbelow(30000) if sandbox.drops_root else None
    job = {"code": code, "calls": calls, "entry_point": entry_point, "not_none": not_none}
    job |= {"limits": asdict(limits), "uid": uid}
    start = time.monotonic()
    deadline = start + limits.wall_s
    oom_kills = _oom_kills()
    runner = Path(sandbox_runner.__file__).read_text(encoding="utf-8")
    with contextlib.ExitStack() as stack:
        group = sandbox.group_parent and stack.enter_context(memory_group(sandbox.group_parent, limits.memory_bytes))
        stdin, stderr = (stack.enter_context(_memory_file(content)) for content in (json.dumps(job).encode(), b""))
        process = subprocess.Popen(
            [*(group.enter if group else ()), *sandbox.command, *PYTHON, runner],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=sandbox_levels.ENVIRONMENT,
            start_new_session=True,
        )
        last: bytes | None = None
        end: Exit | None = None
        try:
            for line in _lines(process, deadline, limits.reply_bytes):
                if last is not None and not receive(line):  # the first line only says `ready`
                    end = Exit("stopped", "")
                    break
                last = line
        except TimeoutError:
            end = Exit("timeout", f"no end after {limits.wall_s:.0f} s")
        except OverflowError:
            end = Exit("died", f"a result of more than {limits.reply_bytes >> 20} MiB")
        status = _reap(process, deadline=start if end else deadline)
        stderr.seek(0)
        message = stderr.read(300).decode(errors="replace").strip()
        # Without a group every kill on the host counts, because the run may have been the victim.
        out_of_memory = group.oom_kills() > 0 if group else _oom_kills() > oom_kills
        over_limit = out_of_memory and group is not None and group.reached_limit()
    if end:
        return end
    if status is None:
        return Exit("timeout", f"no end after {limits.wall_s:.0f} s")
    if status < 0 and sandbox.level == "none":
        status = 128 - status  # as a sandbox reports its program's signal; a negative status is its own
    if last and last.startswith(b'{"done":'):
        return Exit("done", "")
    # The kernel may have killed any process of the run, so the exit status does not matter.
    if over_limit:
        return Exit("died", f"its processes needed more than {limits.memory_bytes >> 20} MiB of memory")
    if out_of_memory:
        return Exit("lost", "the host ran out of memory")
    if status < 0 or last is None:
        return Exit("lost", message or f"the sandbox ended with status {status}")
    killed = status == 128 + signal.SIGKILL
    if status == 128 + signal.SIGXCPU or (killed and time.monotonic() - start >= limits.cpu_s):
        return Exit("timeout", f"used {limits.cpu_s} s of CPU")
    return Exit("died", f"killed by signal {status - 128}" if status > 128 else f"exit status {status}")


def _probe(sandbox: Sandbox) -> str | None:
    """The reason why this sandbox cannot be used; None if it can."""
    limits = Limits(cpu_s=5, wall_s=30.0)
    replies: list[bytes] = []
    with tempfile.NamedTemporaryFile() as canary, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(canary.name, 0o644)
        arguments = [canary.name, listener.getsockname()[1], limits.processes]
        ended = run(
            sandbox,
            sandbox_levels.PROBE,
            [arguments],
            lambda line: replies.append(line) is None,
            entry_point="escapes",
            limits=limits,
        )
    if ended.kind != "done":
        return ended.detail
    reply = json.loads(replies[0])
    if "value" not in reply:
        return reply.get("raised") or reply["load"]
    found, environment = sandbox_runner.decode(reply["value"])
    leaked = sorted(set(environment) - {*sandbox_levels.ENVIRONMENT, "LC_CTYPE", "PWD"})
    if leaked:
        found.append(f"sees the environment ({', '.join(leaked)})")
    return ", ".join(found) or None


def _lines(process: subprocess.Popen[bytes], deadline: float, most: int) -> Iterator[bytes]:
    """Lines of stdout, without their ends, until it closes.

    Raises:
        TimeoutError: `deadline` (monotonic seconds) passed.
        OverflowError: a line is longer than `most` bytes.
    """
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    pending: list[bytes] = []
    size = 0
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TimeoutError
        chunk = os.read(process.stdout.fileno(), 1 << 20)
        if not chunk:
            return
        *whole, rest = chunk.split(b"\n")
        for end in whole:
            yield b"".join((*pending, end))
            pending, size = [], 0
        pending.append(rest)
        size += len(rest)
        if size > most:
            raise OverflowError


def _reap(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    """Exit status, or None where the process had to be killed at `deadline` (monotonic seconds)."""
    with process:  # closes the pipe
        try:
            return process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None


def _memory_file(content: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("fcsd"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _oom_kills() -> int:
    """How many processes the kernel has killed since boot because memory ran out."""
    with open("/proc/vmstat") as vmstat:
        return next((int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")), 0)
