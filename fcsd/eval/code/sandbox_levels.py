"""The command lines of the sandbox levels, and the probe program that tries to escape from them."""

import os
import shutil
import sys
from pathlib import Path

TMPFS_BYTES = 32 << 20
ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
NOBODY = "65534"

# Builds a root of read-only binds over /sys of a private mount namespace (no interpreter lives there), moves
# into it and gives up every capability but the two the runner needs to leave root. A shell stays above the runner and
# returns 128 plus the signal that ended it: `unshare` itself cannot report SIGKILL (it exits with status 1).
UNSHARE_SCRIPT = """\
set -e
umask 022
PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t tmpfs -o mode=755,size=1m sandbox /sys
cd /sys
mkdir proc dev tmp old
mount -t tmpfs -o mode=1777,size=$TMPFS_BYTES sandbox tmp
mount -t proc proc proc
for node in null zero urandom; do : > dev/$node; mount --bind /dev/$node dev/$node; done
for path in $MOUNTS; do
    if [ -d "$path" ]; then mkdir -p ".$path"; else mkdir -p ".${path%/*}"; : > ".$path"; fi
    mount --bind "$path" ".$path"
    flags=$(findmnt -no VFS-OPTIONS -T "$path")  # flags that a user namespace must keep
    mount -o "remount,bind,ro${flags#r[wo]}" ".$path"
done
for name in $LINKS; do ln -s "usr/$name" "$name"; done
pivot_root . old
umount -l old
mount -o remount,bind,ro /
cd /tmp
exec env -u MOUNTS -u LINKS -u TMPFS_BYTES -u PWD -u OLDPWD -u _ setpriv --no-new-privs --inh-caps=-all \\
    --bounding-set=-all,+setuid,+setgid -- sh -c '"$@"; exit $?' sh "$@"
"""

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


def commands() -> list[tuple[str, tuple[str, ...], bool]]:
    """The sandboxes that the tools on PATH can build, best first: (level, command, runner must drop root)."""
    ways: list[tuple[str, tuple[str, ...], bool]] = []
    is_root = os.geteuid() == 0
    bwrap, unshare = shutil.which("bwrap"), shutil.which("unshare")
    if bwrap:
        if is_root:
            ways.append(("bwrap", _bwrap(bwrap, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"), True))
        user = ("--unshare-user", "--disable-userns", "--uid", NOBODY, "--gid", NOBODY)
        ways.append(("bwrap", _bwrap(bwrap, *user), False))
    if unshare:
        ways.append(("unshare", _unshare(unshare, *(() if is_root else ("--map-root-user",))), is_root))
    return ways


def _bwrap(bwrap: str, *identity: str) -> tuple[str, ...]:
    small_tmpfs = ("--perms", "1777", "--size", str(TMPFS_BYTES), "--tmpfs")
    # Parent directories are made explicitly, because those that bwrap makes itself are accessible to root only.
    parents = sorted({str(parent) for path in _mounts() for parent in Path(path).parents} - {"/"})
    directories = [part for path in parents for part in ("--perms", "0755", "--dir", path)]
    mounts = [part for path in _mounts() for part in ("--ro-bind", path, path)]
    links = [part for name in _links() for part in ("--symlink", f"usr/{name}", f"/{name}")]
    return (
        *(bwrap, "--die-with-parent", "--new-session", *identity),
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--proc", "/proc", "--dev", "/dev", *small_tmpfs, "/dev/shm", *small_tmpfs, "/tmp"),
        *(*directories, *mounts, *links, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--"),
    )


def _unshare(unshare: str, *identity: str) -> tuple[str, ...]:
    spaces = ("--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child")
    settings = (f"MOUNTS={' '.join(_mounts())}", f"LINKS={' '.join(_links())}", f"TMPFS_BYTES={TMPFS_BYTES}")
    # With --pdeathsig a run ends when its judging process is killed.
    start = ("setpriv", "--pdeathsig", "KILL", unshare, *spaces, *identity)
    return (*start, "env", *settings, "sh", "-c", UNSHARE_SCRIPT, "sh")


def _mounts() -> list[str]:
    """The host directories that the interpreter needs, outermost first. None of them lies inside another one."""
    prefixes = (sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix)
    wanted = {Path("/usr"), Path("/etc/ld.so.cache")}
    wanted |= {Path(prefix) for prefix in prefixes} | {Path(prefix).resolve() for prefix in prefixes}
    wanted |= {Path(f"/{name}") for name in ("lib", "lib64", "bin") if name not in _links()}
    present = sorted(path for path in wanted if path.exists())
    return [str(path) for path in present if not any(parent in present for parent in path.parents)]


def _links() -> list[str]:
    """Names in / that are links into /usr, as on every current distribution."""
    return [name for name in ("lib", "lib64", "bin", "sbin") if Path(f"/{name}").is_symlink()]
