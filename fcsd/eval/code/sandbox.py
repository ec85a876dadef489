"""Run untrusted programs where they can reach nothing: no network, no host files, no environment.

Two mechanisms, best first, and a refusal:

* `bwrap`: bubblewrap >= 0.8. As root it builds the mounts and the runner then becomes an unused uid (the
  kernel does not enforce RLIMIT_NPROC for root); as anyone else it uses a user namespace.
* `unshare`: the same namespaces and a file system of read-only binds, built with util-linux alone.
* otherwise `find_sandbox` refuses, unless unsafe execution is accepted: level `none`, resource limits only.

Inside, a program sees `/usr`, the interpreter's own prefixes (read-only), its own processes, a small `/tmp`,
and nothing else. A level is used only after a probe program has failed to get out of it. Landlock or seccomp
would add a layer, but no well-kept Python library offers either.
"""

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


@dataclass(frozen=True)
class Limits:
    """What one program may use. CPU, memory and file size hold per process, the rest per run.

    The CPU limit decides; the wall limit only catches programs that sleep or block, and is wide enough that
    a right program on a machine loaded several times over never meets it.
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
    """How to start the runner: what is put before the interpreter, and whether the runner must leave root."""

    level: str
    command: tuple[str, ...]
    drops_root: bool


@dataclass(frozen=True)
class Exit:
    """How a run ended.

    `kind`: `done` (all calls answered), `stopped` (the receiver had enough), `died` (the program ended
    itself or broke a limit), `timeout` (CPU or wall), `lost` (killed from outside or never started, which
    says nothing about the program).
    """

    kind: Literal["done", "stopped", "died", "timeout", "lost"]
    detail: str


def find_sandbox(*, accept_unsafe_exec: bool = False) -> Sandbox:
    """The best sandbox that works here, found by probing.

    Raises:
        FcsdError: none works and `accept_unsafe_exec` is false.
    """
    reasons = []
    for level, command, drops_root in sandbox_levels.commands():
        sandbox = Sandbox(level, command, drops_root)
        reason = _probe(sandbox)
        if reason is None:
            return sandbox
        reasons.append(f"{level}: {reason}")
    if accept_unsafe_exec:
        return Sandbox("none", (), drops_root=False)
    raise FcsdError(
        f"no sandbox for generated code: {'; '.join(reasons) or 'neither bwrap nor unshare is installed'}",
        hint="install bubblewrap 0.8 or later where namespaces are allowed, or accept unsafe execution on a "
        "machine you can lose",
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
    """Execute `code`, then each call in order, handing every reply to `receive` until that returns False.

    Args:
        calls: encoded argument lists for `entry_point`; expressions where `entry_point` is None.
        receive: gets untrusted bytes, from an honest runner `{"index": i, "value": encoded}`,
            `{"index": i, "raised": text}`, `{"load": text}` and last `{"done": CPU seconds}`.
        not_none: reply only whether a value is not None (booleans stay), for values that are not data.
    """
    # A uid nobody else has, so that RLIMIT_NPROC counts this run alone.
    uid = 30000 + secrets.randbelow(30000) if sandbox.drops_root else None
    job = {"code": code, "calls": calls, "entry_point": entry_point, "not_none": not_none}
    job |= {"limits": asdict(limits), "uid": uid}
    start = time.monotonic()
    deadline = start + limits.wall_s
    oom_kills = _oom_kills()
    with _memory_file(json.dumps(job).encode()) as stdin, _memory_file() as stderr:
        process = subprocess.Popen(
            [*sandbox.command, sys.executable, "-s", "-P", "-B", "-c", _runner_source()],
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
    if end:
        return end
    if status is None:
        return Exit("timeout", f"no end after {limits.wall_s:.0f} s")
    if status < 0 and sandbox.level != "bwrap":
        status = 128 - status  # as bwrap reports its program's signal; bwrap's own death stays negative
    if status < 0 or last is None:
        return Exit("lost", message or f"the sandbox ended with status {status}")
    if last.startswith(b'{"done":'):
        return Exit("done", "")
    killed = status == 128 + signal.SIGKILL
    if status == 128 + signal.SIGXCPU or (killed and time.monotonic() - start >= limits.cpu_s):
        return Exit("timeout", f"used {limits.cpu_s} s of CPU")
    if killed and _oom_kills() > oom_kills:
        return Exit("lost", "the host ran out of memory")
    return Exit("died", f"killed by signal {status - 128}" if status > 128 else f"exit status {status}")


def _probe(sandbox: Sandbox) -> str | None:
    """Why this sandbox cannot be used, or None."""
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


def _runner_source() -> str:
    return Path(sandbox_runner.__file__).read_text(encoding="utf-8")


def _memory_file(content: bytes = b"") -> IO[bytes]:
    file = os.fdopen(os.memfd_create("fcsd"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot."""
    with open("/proc/vmstat") as vmstat:
        return next((int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")), 0)
