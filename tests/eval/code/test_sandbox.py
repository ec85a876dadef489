"""Hostile programs are judged for real: none passes, none gets out, none leaves anything behind."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fcsd.eval.code import sandbox_runner
from fcsd.eval.code.judge import Outcome, score
from fcsd.eval.code.problems import Case, Problem
from fcsd.eval.code.sandbox import find_sandbox

SECRET = 918_273_645  # the expected value of every case: it must not be found inside
GOOD = f"def f(x):\n    return {SECRET} * x"

# S1: use everything up, or never end. The verdict must be `fail` or `timeout`.
EXHAUST = {
    "fork bomb": "import os\ndef f(x):\n    while 1:\n        try: os.fork()\n        except OSError: pass",
    "daemon": "import os, time\ndef f(x):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
    "            for fd in range(64):\n                try: os.close(fd)\n                except OSError: pass\n"
    "            time.sleep(600)\n        os._exit(0)\n    return 0",
    "thread bomb": "import threading, time\ndef f(x):\n    while 1:\n"
    "        threading.Thread(target=time.sleep, args=(600,)).start()",
    "thread left": "import threading, time\ndef f(x):\n"
    "    threading.Thread(target=time.sleep, args=(600,)).start()\n    return 0",
    "endless": "def f(x):\n    while 1: pass",
    "endless at import": "while 1: pass",
    "catches all": "import signal\nfor s in (1, 2, 14, 15, 24):\n    signal.signal(s, lambda *a: None)\n"
    "def f(x):\n    while 1:\n        try:\n            while 1: pass\n        except BaseException: pass",
    "8 GB": "def f(x):\n    return len(bytearray(8 << 30))",
    "list of everything": "def f(x):\n    out = []\n    while 1: out.append(' ' * 10_000_000)",
    "1 GB print": "def f(x):\n    for _ in range(1024): print('x' * (1 << 20))\n    return 0",
    "1 GB result": "def f(x):\n    return 'x' * (1 << 30)",
    "64 MB result": "def f(x):\n    return 'x' * (64 << 20)",
    "floods the result pipe": "import os\ndef f(x):\n    while 1:\n        for fd in range(3, 64):\n"
    "            try: os.write(fd, b'x' * 65536)\n            except OSError: pass",
    "fills the disk": "def f(x):\n    for d in ('/tmp', '/dev/shm'):\n        for i in range(64):\n"
    "            open(f'{d}/{i}', 'wb').write(b'x' * (8 << 20))\n    return 0",
    "deep recursion": "def f(x):\n    return f(x)",
    "deeper recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(x):\n    return f(x)",
    "deep result": "def f(x):\n    out = []\n    for _ in range(100_000): out = [out]\n    return out",
    "deep source": "x = " + "(" * 5000 + ")" * 5000,
    "sleep": "import time\ndef f(x):\n    time.sleep(600)",
    "os._exit": "import os\ndef f(x):\n    os._exit(0)",
    "exit at import": "import sys\nsys.exit(0)",
    "segfault": "import ctypes\ndef f(x):\n    ctypes.string_at(0)",
    "kills itself": "import os\ndef f(x):\n    os.kill(os.getpid(), 9)",
    "reads stdin": "def f(x):\n    return input()",
}

# S3: look right without being right. The verdict must be `fail`.
FORGE = {
    "equal to all": "class E:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E()",
    "int equal to all": "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    "def f(x): return E(0)",
    "frame walk": "import sys\ndef f(x):\n    frame = sys._getframe(1)\n"
    "    frame.f_locals['job']['calls'].clear()\n    frame.f_locals['calls'].clear()\n    return 0",
    "finds the answer": "import gc\ndef f(x):\n"
    "    held = [o for h in gc.get_objects() for o in (h, *gc.get_referents(h)) if type(o) is int]\n"
    "    return next((o for o in held if 910_000_000 < o < 920_000_000), 0)",
    "exit 0": "import sys\ndef f(x): sys.exit(0)",
    "prints a result": 'def f(x):\n    print(\'{"index":0,"value":0}\\n{"done":0.1}\', flush=True)\n    return 0',
    "writes a result": "import os\ndef f(x):\n    for fd in range(3, 64):\n"
    '        try: os.write(fd, b\'{"index":0,"value":{"int":"pass"}}\\n{"done":0.1}\\n\')\n'
    "        except OSError: pass\n    os._exit(0)",
    "says done": "import os\ndef f(x):\n    for fd in range(3, 64):\n"
    "        try: os.write(fd, b'{\"done\":0.1}\\n')\n        except OSError: pass\n    os._exit(0)",
    "replaces the encoder": "import sys\nsys.modules['__main__'].encode = lambda v: True\ndef f(x): return 0",
    "replaces json": "import json\njson.dumps = lambda *a, **k: '{\"done\":true}'\ndef f(x): return 0",
    "generator": "def f(x):\n    yield 1",
    "endless iterator": "class I(list):\n    def __iter__(self):\n        while 1: yield 1\ndef f(x): return I()",
    "contains itself": "def f(x):\n    out = []\n    out.append(out)\n    return out",
    "infinity": "def f(x): return float('inf')",
    "not a number": "def f(x): return float('nan')",
    "an exception": "def f(x): return ValueError('pass')",
}

# S2: get out. Each returns "escaped" or the name of what stopped it, which must be one of the second entry.
TRY = (
    "def f(x):\n    try:\n        {body}\n        return 'escaped'\n    except Exception as e: return type(e).__name__"
)
DENIED = {"FileNotFoundError", "PermissionError", "OSError", "ConnectionRefusedError", "ProcessLookupError"}


def escapes(canary: Path, port: int) -> dict[str, str]:
    bodies = {
        "reads a file": f"open({str(canary)!r}).read()",
        "writes a file": f"open({str(canary)!r}, 'w').write('x')",
        "deletes a file": f"import os; os.remove({str(canary)!r})",
        "deletes a directory": f"import os; os.rename({str(canary.parent)!r}, '/tmp/moved')",
        "follows a link": f"import os; os.symlink({str(canary)!r}, '/tmp/link'); open('/tmp/link').read()",
        "goes up": f"import os; open('../../../../..' + {str(canary)!r}).read()",
        "reads the test": f"open({__file__!r}).read()",
        "writes the interpreter": "import sys, os; open(os.__file__, 'a')",
        "writes a library": "import sys; open(sys.prefix + '/lib/evil.pth', 'w')",
        "writes the system": "open('/usr/bin/evil', 'w')",
        "writes a cache": f"import os; os.makedirs({str(Path.home() / '.cache' / 'evalplus')!r})",
        "reaches localhost": f"import socket; socket.create_connection(('127.0.0.1', {port}), 3)",
        "reaches out": "import socket; socket.create_connection(('1.1.1.1', 53), 3)",
        "sends a datagram": "import socket; "
        "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('8.8.8.8', 53))",
        "becomes root": "import os; os.setuid(0); open('/escape', 'w')",
        "makes a device": "import os, stat; os.mknod('/tmp/disk', 0o600 | stat.S_IFBLK, os.makedev(259, 0))",
        "changes root": "import os; os.chroot('/tmp')",
        "reads the host's memory": "open('/proc/kcore', 'rb').read(1)",
        "changes the kernel": "open('/proc/sys/kernel/hostname', 'w').write('evil')",
        "reads the first process": "open('/proc/1/mem', 'rb').read(1)",
        "mounts": "import ctypes; libc = ctypes.CDLL(None, use_errno=True); "
        "r = libc.mount(b'none', b'/tmp', b'tmpfs', 0, None)\n        if r: raise PermissionError",
        "gets System V shared memory": "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "        if libc.shmget(0, 8 << 20, 0o600) == -1: raise PermissionError",
        "gets a message queue": "import ctypes; libc = ctypes.CDLL(None)\n"
        "        if libc.msgget(0, 0o600) == -1 and libc.semget(0, 9, 0o600) == -1: raise PermissionError",
        "gets a file in memory": "import os; os.memfd_create('more')",
        "mounts in a user namespace": "import ctypes; libc = ctypes.CDLL(None)\n"
        "        if libc.unshare(0x10020000): raise PermissionError\n"
        "        if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None): raise PermissionError",
        "clones a user namespace": "import ctypes, platform; libc = ctypes.CDLL(None)\n"
        "        number = {'x86_64': 56, 'aarch64': 220}[platform.machine()]\n"
        "        process = libc.syscall(number, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "        if process == 0: libc._exit(0)\n"
        "        if process == -1: raise PermissionError",
        "clones by another call": "import ctypes, struct; libc = ctypes.CDLL(None)\n"
        "        arguments = struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0)\n"
        "        process = libc.syscall(435, arguments, len(arguments))\n"
        "        if process == 0: libc._exit(0)\n"
        "        if process == -1: raise PermissionError",
        "sees us": f"import os; os.kill({os.getpid()}, 0)",
        "traces us": "import ctypes, os; libc = ctypes.CDLL(None)\n"
        f"        if libc.ptrace(16, {os.getpid()}, 0, 0): raise PermissionError",
    }  # fmt: skip
    return {name: TRY.format(body=body) for name, body in bodies.items()}


# Programs that return what they saw; the second entry is what a contained one sees.
LOOK = {
    "tokens": (
        "import os\ndef f(x):\n    seen = ' '.join(os.environ.values())\n    for p in os.listdir('/proc'):\n"
        "        try: seen += open(f'/proc/{p}/environ').read()\n        except OSError: pass\n"
        "    return 'FCSD-CANARY' in seen",
        False,
    ),
    "processes of the host": (
        "import os\ndef f(x): return sum(p.isdigit() for p in os.listdir('/proc')) > 6",
        False,
    ),
    "kills its parents": (
        "import os\ndef f(x):\n    for p in (1, os.getppid(), -os.getppid()):\n        try: os.kill(p, 9)\n"
        "        except OSError: pass\n    return 'alive'",
        "alive",
    ),
}


def verdicts(
    programs: dict[str, str], expected: object = SECRET, *, timeout_s: int = 60, accept_unsafe_exec: bool = False
) -> dict[str, Outcome]:
    """Verdicts on programs whose `f(1)` should be `expected`; a short limit is for programs that never end."""
    problems = [Problem(name, "f", [Case([1], expected)], []) for name in programs]
    results = score(
        problems, list(programs.values()), workers=4, timeout_s=timeout_s, accept_unsafe_exec=accept_unsafe_exec
    )
    return {verdict.task_id: verdict.base for verdict in results}


def left_behind() -> list[psutil.Process]:
    """Every process on this machine that runs our runner or a sandbox around it."""
    text = sandbox_runner.__doc__ or ""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if text[:60] in command:
            found.append(process)
    return found


@pytest.fixture(scope="module", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    _, alive = psutil.wait_procs(left_behind(), timeout=60)  # other sessions' runs are seen too, and end
    assert alive == []


@pytest.fixture(scope="module")
def exhausting() -> Iterator[list[Future[dict[str, Outcome]]]]:
    """Programs that end by themselves run at the same time as the others, but with a generous limit on time.

    Some sleep until their limit. The tests before theirs judge other programs meanwhile.
    """
    ending = {"8 GB": EXHAUST["8 GB"], "good": GOOD}
    endless = {name: program for name, program in EXHAUST.items() if name not in ending}
    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(verdicts, endless, timeout_s=1), pool.submit(verdicts, ending)]


@pytest.fixture(scope="module")
def exhausted(exhausting: list[Future[dict[str, Outcome]]]) -> dict[str, Outcome]:
    return {name: outcome for each in exhausting for name, outcome in each.result().items()}


@pytest.fixture(scope="module")
def forged(exhausting: object) -> dict[str, Outcome]:
    return verdicts({**FORGE, "good": GOOD})


@pytest.mark.parametrize("name", FORGE)
def test_forged_results_fail(forged: dict[str, Outcome], name: str):
    assert forged[name].status == "fail", forged[name]
    assert forged["good"] == Outcome("pass")


def test_expected_values_are_not_inside(forged: dict[str, Outcome]):
    assert forged["finds the answer"].detail == f"case 0: got 0, expected {SECRET}"


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("canary") / "file"
    file.write_text("untouched")
    return file


def test_nothing_gets_out(canary: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "FCSD-CANARY")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        programs = escapes(canary, listener.getsockname()[1])
        tried = verdicts(programs, "escaped")
    allowed = {f"case 0: got {kind!r}, expected 'escaped'" for kind in DENIED}
    assert {name: outcome for name, outcome in tried.items() if outcome.detail not in allowed} == {}
    assert canary.read_text() == "untouched"
    for name, (program, contained) in LOOK.items():
        assert verdicts({name: program}, contained) == {name: Outcome("pass")}


@pytest.mark.parametrize("name", EXHAUST)
def test_exhausting_programs_end_without_passing(exhausted: dict[str, Outcome], name: str):
    assert exhausted[name].status in ("fail", "timeout"), exhausted[name]


def test_a_good_program_passes_beside_them(exhausted: dict[str, Outcome]):
    assert exhausted["good"] == Outcome("pass")
    assert exhausted["8 GB"].detail.startswith("MemoryError")
    assert exhausted["sleep"].status == exhausted["endless"].status == "timeout"


def test_those_attacks_work_without_a_sandbox(canary: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The control: what the tests above see stopped does get out when nothing stops it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        programs = escapes(canary, listener.getsockname()[1])
        harmless = {name: programs[name] for name in ("reads a file", "reaches localhost", "reads the test")}
        tried = verdicts(harmless, "escaped", accept_unsafe_exec=True)
    assert set(tried.values()) == {Outcome("pass")}


CHECK = """
import json, sys
from fcsd.eval.code.judge import score
from fcsd.eval.code.problems import Case, Problem
programs = json.load(sys.stdin)
problems = [Problem(name, "f", [Case([1], "escaped")], []) for name in programs]
found = score(problems, list(programs.values()), workers=2, timeout_s=60)
print(json.dumps({v.task_id: [v.base.status, v.base.detail, v.sandbox] for v in found}))
"""


# Directories that are closed to others are covered by empty ones, into which what is needed is bound again.
OPEN_DIRECTORIES = """\
set -e
umask 022
number=0
for path in $NEEDED; do number=$((number + 1)); mkdir "$STAGE/$number"; mount --bind "$path" "$STAGE/$number"; done
for path in $CLOSED; do mount -t tmpfs -o mode=755 open "$path"; done
number=0
for path in $NEEDED; do number=$((number + 1)); mkdir -p "$path"; mount --bind "$STAGE/$number" "$path"; done
cd /
exec setpriv --reuid=4242 --regid=4242 --clear-groups --inh-caps=-all -- "$@"
"""


def as_ordinary_user(repo: Path, stage: Path) -> list[str]:
    """A command prefix that changes to uid 4242 (if this is root), who can read the interpreter and `repo`."""
    if os.geteuid() != 0:
        return []
    needed = [Path(path) for path in (sys.prefix, sys.base_prefix, repo)]
    closed: set[Path] = set()
    for path in needed:
        closed |= set([parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001][:1])
    hidden = {path for path in needed if closed & set(path.parents)}
    stage.mkdir()
    values = {"NEEDED": hidden, "CLOSED": closed, "STAGE": [stage]}
    settings = [f"{name}={' '.join(map(str, paths))}" for name, paths in values.items()]
    return ["unshare", "--mount", "env", *settings, "sh", "-c", OPEN_DIRECTORIES, "sh"]


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that everybody can read. Those of pytest are closed again whenever another session of it starts."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("user", ["same", "ordinary"])
def test_the_sandbox_holds_for_root_and_for_others(repo: Path, canary: Path, open_path: Path, user: str):
    assert shutil.which("bwrap"), "bubblewrap is missing: scripts/test.sh installs it"
    tools = open_path / "bin"
    tools.mkdir(mode=0o755)
    for tool in (tool for directory in ("/usr/sbin", "/usr/bin") for tool in Path(directory).iterdir()):
        if not (tools / tool.name).exists():
            (tools / tool.name).symlink_to(tool)
    prefix = as_ordinary_user(repo, open_path / "stage") if user == "ordinary" else []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        programs = escapes(canary, listener.getsockname()[1])
        good = "def f(x):\n    import numpy\n    return 'esc' + 'aped' * int(numpy.ones(1)[0])"
        done = subprocess.run(
            [*prefix, "env", f"PATH={tools}", f"PYTHONPATH={repo}", "HOME=/tmp", sys.executable, "-c", CHECK],
            input=json.dumps({**programs, "good": good}),
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row[2] for row in found.values()} == {"bwrap"}
    assert found.pop("good")[:2] == ["pass", ""]
    allowed = {f"case 0: got {kind!r}, expected 'escaped'" for kind in DENIED}
    assert {name: row for name, row in found.items() if row[1] not in allowed} == {}
    assert canary.read_text() == "untouched"


def test_this_machine_has_a_real_sandbox():
    assert find_sandbox(accept_unsafe_exec=True).level == "bwrap", (
        "bubblewrap is missing (scripts/test.sh installs it) or may not create namespaces"
    )
