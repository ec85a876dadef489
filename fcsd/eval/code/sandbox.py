"""Runs untrusted programs in bubblewrap: without network, environment, or files of the host but the interpreter's.

Inside, a program sees `/usr`, the interpreter's own prefixes (read-only), its own processes, a small `/tmp`, and
nothing else. As root, bubblewrap builds the mounts and the runner then becomes an unused uid (the kernel does not
enforce RLIMIT_NPROC for root); as anyone else it uses a user namespace. The sandbox is used only after a probe program
has failed to get out of it. Where it does not work, `find_sandbox` refuses, unless unsafe execution is accepted: level
`none`, resource limits only.

Memory is limited per process (address space), and for all processes of a run together by a thread that watches them.
System calls that provide memory outside of both, or namespaces in which more of it can be mounted, are refused.
"""

import contextlib
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from fcsd.errors import FcsdError
from fcsd.eval.code import sandbox_runner

PYTHON = (sys.executable, "-s", "-P", "-B", "-c")
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
TMPFS_BYTES = 32 << 20
NOBODY = "65534"
WATCH_S = 0.05  # how often the memory and the time of a run are looked at

# System call numbers: those that provide memory outside of the address space, or namespaces; then `clone`, `clone3`.
SYSTEM_CALLS = {
    # machine: (audit architecture, (shmget, semget, msgget, mq_open, memfd_create, memfd_secret, bpf, unshare), ...)
    "x86_64": (0xC000003E, (29, 64, 68, 240, 319, 447, 321, 272), 56, 435),
    "aarch64": (0xC00000B7, (194, 190, 186, 180, 279, 447, 280, 97), 220, 435),
}
CLONE_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET

# The probe returns the ways out that it found, and the names of the environment variables that it saw.
PROBE = """\
import ctypes, os, socket

def escapes(canary, port, processes):
    found = []
    if os.path.exists(canary):
        found.append("sees host files")
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2)
        found.append("reaches the host's network")
    except OSError:
        pass
    for directory in ("/", "/usr", os.__file__.rsplit("/", 1)[0], "/dev"):
        try:
            open(directory + "/escape", "w")
            found.append("writes to " + directory)
        except OSError:
            pass
    open("/tmp/allowed", "w").close()
    libc = ctypes.CDLL(None)
    if libc.shmget(0, 4096, 0o600) != -1:
        found.append("gets shared memory outside its limits")
    if libc.unshare(0x10000000) != -1:
        found.append("makes user namespaces")
    try:
        for _ in range(processes + 1):
            if os.fork() == 0:
                os.execv("/usr/bin/sleep", ["sleep", "60"])
        found.append("has no process limit")
    except BlockingIOError:
        pass
    return found, sorted(os.environ)
"""


@dataclass(frozen=True)
class Limits:
    """The resources that one program may use.

    CPU time and file size are limited per process, wall time and the number of processes per run, and memory both per
    process and per run. A busy program is ended by the CPU limit. The wall limit only ends programs that sleep or
    block; it is so wide that a right program does not reach it on a machine that is loaded several times over.
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
    """How the runner is started.

    Attributes:
        level: `bwrap` or `none`.
        command: the words that are put before the interpreter.
        drops_root: whether the runner starts as root and must change to an unused uid.
    """

    level: str
    command: tuple[str, ...]
    drops_root: bool


@dataclass(frozen=True)
class Exit:
    """The end of a run.

    `kind` is `done` (every call was answered), `died` (the program ended itself or broke a limit), `timeout` (CPU or
    wall time), or `lost` (the run never started or was killed from outside, for example because the host ran out of
    memory; this says nothing about the program).
    """

    kind: Literal["done", "died", "timeout", "lost"]
    detail: str


def find_sandbox(*, accept_unsafe_exec: bool = False) -> Sandbox:
    """The sandbox that works here: a probe program has not got out of it.

    Raises:
        FcsdError: none works and `accept_unsafe_exec` is false.
    """
    reasons = []
    for sandbox in sandboxes():
        reason = _probe(sandbox)
        if reason is None:
            return sandbox
        reasons.append(f"{sandbox.level}: {reason}")
    if accept_unsafe_exec:
        return Sandbox("none", (), drops_root=False)
    raise FcsdError(
        f"no sandbox for generated code: {'; '.join(reasons) or 'bwrap is not installed'}",
        hint="install bubblewrap 0.8 or later on a machine that allows namespaces, or accept unsafe execution on a "
        "machine that holds nothing of value",
    )


def sandboxes() -> list[Sandbox]:
    """The ways to start bubblewrap here, best first; none where it is not on PATH."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return []
    small_tmpfs = ("--perms", "1777", "--size", str(TMPFS_BYTES), "--tmpfs")
    links = [name for name in ("lib", "lib64", "bin", "sbin") if Path(f"/{name}").is_symlink()]  # into /usr
    mounts = _mounts(links)
    # Parent directories are made explicitly, because those that bwrap makes itself are accessible to root only.
    parents = sorted({str(parent) for path in mounts for parent in Path(path).parents} - {"/"})
    rest = (
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--proc", "/proc", "--dev", "/dev", *small_tmpfs, "/dev/shm", *small_tmpfs, "/tmp"),
        *(part for path in parents for part in ("--perms", "0755", "--dir", path)),
        *(part for path in mounts for part in ("--ro-bind", path, path)),
        *(part for name in links for part in ("--symlink", f"usr/{name}", f"/{name}")),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"),
    )
    start = (bwrap, "--die-with-parent", "--new-session")
    as_user = ("--unshare-user", "--disable-userns", "--uid", NOBODY, "--gid", NOBODY)
    found = [Sandbox("bwrap", (*start, *as_user, *rest), drops_root=False)]
    if os.geteuid() == 0:
        as_root = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")
        found.insert(0, Sandbox("bwrap", (*start, *as_root, *rest), drops_root=True))
    return found


def run(
    sandbox: Sandbox,
    code: str,
    calls: Sequence[Any],
    *,
    entry_point: str | None,
    limits: Limits,
    not_none: bool = False,
) -> Generator[bytes, None, Exit]:
    """Execute `code`, then each call in order. Yields every reply, and returns how the run ended.

    The replies are untrusted bytes, from an honest runner `{"index": i, "value": encoded}`, `{"index": i, "raised":
    text}`, `{"load": text}` and last `{"done": CPU seconds}`. A caller that wants no more of them closes the generator.

    Args:
        calls: encoded argument lists for `entry_point`; expressions where `entry_point` is None.
        not_none: for values that are not data: reply only whether a value is not None. Booleans are sent unchanged.
    """
    # The uid is used by no other process, so that RLIMIT_NPROC counts the processes of this run alone.
    uid = 30000 + secrets.randbelow(30000) if sandbox.drops_root else None
    job = {"code": code, "calls": calls, "entry_point": entry_point, "not_none": not_none}
    job |= {"limits": asdict(limits), "uid": uid}
    runner = Path(sandbox_runner.__file__).read_text(encoding="utf-8")
    oom_kills = _oom_kills()
    start = time.monotonic()
    broken: list[Exit] = []  # the limit that ended the run
    last: bytes | None = None
    with contextlib.ExitStack() as stack:
        files = (json.dumps(job).encode(), b"", system_call_filter())
        stdin, stderr, refused = (stack.enter_context(_memory_file(content)) for content in files)
        filtered = ("--seccomp", str(refused.fileno()), "--") if sandbox.command else ()
        process = subprocess.Popen(
            [*sandbox.command, *filtered, *PYTHON, runner],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=ENVIRONMENT,
            start_new_session=True,
            pass_fds=[refused.fileno()] if filtered else [],
        )
        stack.enter_context(process)
        assert process.stdout is not None
        watch = threading.Thread(target=_watch, args=(process, start + limits.wall_s, limits, broken))
        watch.start()
        try:
            while line := process.stdout.readline(limits.reply_bytes + 1):
                if len(line) > limits.reply_bytes:
                    broken.append(Exit("died", f"a result of more than {limits.reply_bytes >> 20} MiB"))
                    break
                if last is not None:  # the first line only says `ready`
                    yield line.rstrip(b"\n")
                last = line
            else:
                process.wait()
        finally:
            _kill(process)
            process.wait()
            watch.join()
        stderr.seek(0)
        message = stderr.read(300).decode(errors="replace").strip()
    return broken[0] if broken else _ended(sandbox, process.returncode, last, message, limits, start, oom_kills)


def _ended(
    sandbox: Sandbox, status: int, last: bytes | None, message: str, limits: Limits, start: float, oom_kills: int
) -> Exit:
    """How a run ended that broke no watched limit; `status` and `last` are its exit status and its last line."""
    if status < 0 and sandbox.level == "none":
        status = 128 - status  # as bubblewrap reports its program's signal; a negative status is its own
    if last and last.startswith(b'{"done":'):
        return Exit("done", "")
    if _oom_kills() > oom_kills:  # the victim may have been any process of this run
        return Exit("lost", "the host ran out of memory")
    if status < 0 or last is None:
        return Exit("lost", message or f"the sandbox ended with status {status}")
    killed = status == 128 + signal.SIGKILL
    if status == 128 + signal.SIGXCPU or (killed and time.monotonic() - start >= limits.cpu_s):
        return Exit("timeout", f"used {limits.cpu_s} s of CPU")
    return Exit("died", f"killed by signal {status - 128}" if status > 128 else f"exit status {status}")


def _watch(process: subprocess.Popen[bytes], deadline: float, limits: Limits, broken: list[Exit]) -> None:
    """End a run that exceeds its memory, or `deadline` (monotonic seconds), and append the reason to `broken`."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            broken.append(Exit("timeout", f"no end after {limits.wall_s:.0f} s"))
        elif _memory_bytes(process.pid, limits.memory_bytes) > limits.memory_bytes:
            broken.append(Exit("died", f"its processes needed more than {limits.memory_bytes >> 20} MiB of memory"))
        if broken:
            return _kill(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(WATCH_S)


def _memory_bytes(pid: int, most: int) -> int:
    """The memory of a process's descendants. Pages that they share count once where all together exceed `most`."""
    import psutil

    def total(bytes_of: Callable[[psutil.Process], int]) -> int:
        held = 0
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                held += bytes_of(member)
        return held

    try:
        family = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return 0
    resident = total(lambda member: member.memory_info().rss)
    return resident if resident <= most else total(lambda member: member.memory_full_info().pss)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _probe(sandbox: Sandbox) -> str | None:
    """The reason why this sandbox cannot be used; None if it can."""
    if platform.machine() not in SYSTEM_CALLS:
        return f"its filter of system calls is not known for {platform.machine()}"
    limits = Limits(cpu_s=5, wall_s=30.0)
    replies: list[bytes] = []
    with tempfile.NamedTemporaryFile() as canary, socket.create_server(("127.0.0.1", 0)) as listener:
        os.chmod(canary.name, 0o644)
        arguments = [canary.name, listener.getsockname()[1], limits.processes]
        ended = whole(run(sandbox, PROBE, [arguments], entry_point="escapes", limits=limits), replies.append)
    if ended.kind != "done":
        return ended.detail
    reply = json.loads(replies[0])
    if "value" not in reply:
        return reply.get("raised") or reply["load"]
    found, environment = sandbox_runner.decode(reply["value"])
    leaked = sorted(set(environment) - {*ENVIRONMENT, "LC_CTYPE", "PWD"})
    if leaked:
        found.append(f"sees the environment ({', '.join(leaked)})")
    return ", ".join(found) or None


def whole(replies: Generator[bytes, None, Exit], receive: Callable[[bytes], object]) -> Exit:
    """Give all replies of a run to `receive`. Returns how the run ended."""
    while True:
        try:
            receive(next(replies))
        except StopIteration as end:
            return end.value


def system_call_filter() -> bytes:
    """The program of the kernel's filter (BPF) that refuses the system calls of `SYSTEM_CALLS`, for bubblewrap."""
    architecture, refused, clone, clone3 = SYSTEM_CALLS.get(platform.machine(), (0, (), 0, 0))
    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06  # opcodes of BPF on 32-bit words
    allow, kill, errno = 0x7FFF0000, 0x80000000, 0x00050000
    eperm, enosys = errno | 1, errno | 38
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (end, 0, 0, kill)]  # word 4: the architecture
    program += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (end, 0, 0, kill)]  # word 0: the call; x32 has this bit
    for number in refused:
        program += [(equal, 0, 1, number), (end, 0, 0, eperm)]
    program += [(equal, 0, 1, clone3), (end, 0, 0, enosys)]  # its flags are in memory; libc then uses clone
    program += [(equal, 1, 0, clone), (end, 0, 0, allow)]
    program += [(load, 0, 0, 16), (any_bit, 0, 1, CLONE_NAMESPACES), (end, 0, 0, eperm), (end, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *step) for step in program)


def _mounts(links: Sequence[str]) -> list[str]:
    """The host directories that the interpreter needs, outermost first. None of them lies inside another one."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    wanted = {Path("/usr"), Path("/etc/ld.so.cache")}
    wanted |= {Path(prefix) for prefix in prefixes} | {Path(prefix).resolve() for prefix in prefixes}
    wanted |= {Path(f"/{name}") for name in ("lib", "lib64", "bin") if name not in links}
    present = sorted(path for path in wanted if path.exists())
    return [str(path) for path in present if not any(parent in present for parent in path.parents)]


def _memory_file(content: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("fcsd"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _oom_kills() -> int:
    """How many processes the kernel has killed since boot because memory ran out."""
    with open("/proc/vmstat") as vmstat:
        return next((int(line.split()[1]) for line in vmstat if line.startswith("oom_kill ")), 0)
