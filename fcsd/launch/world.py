"""The processes of a run: start them, join them, and make them succeed or fail together."""

import atexit
import math
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

from fcsd.errors import ConfigError, PeerLostError, PreemptedError
from fcsd.launch import preflight
from fcsd.parallel import process_settings

if TYPE_CHECKING:
    import torch

    from fcsd.launch.nodes import Node

T = TypeVar("T")

_PATIENCE = 30.0  # how long torchrun waits for processes that it ends, seconds
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_MEET = timedelta(seconds=60)  # how long the first process to finish waits for the last


@dataclass(frozen=True)
class World:
    """This process among those of the run; ``group`` is where they talk, None for the default process group."""

    rank: int
    size: int
    device: "torch.device"
    group: "torch.distributed.ProcessGroup | None" = None

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """Runs ``function`` on every rank and gives its results by rank; an error on one is raised on all.

        ``function`` must not communicate: a rank that fails would leave the others waiting.
        """
        outcome: tuple[T | None, Exception | None]
        try:
            outcome = (function(), None)
        except Exception as error:
            if self.size == 1:
                raise
            outcome = (None, error)
        outcomes = [outcome]
        if self.size > 1:
            import torch.distributed

            outcomes = [outcome] * self.size
            torch.distributed.all_gather_object(outcomes, outcome, group=self.group)
        for _, error in outcomes:
            if error is not None:
                raise error
        return [result for result, _ in outcomes]  # type: ignore[misc]

    def on_first(self, function: Callable[[], T]) -> T:
        """The result of ``function``, run on rank 0 only, on every rank; its error is raised on every rank."""
        return self.everywhere(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def lowest(self, value: float) -> float:
        """The smallest ``value`` of any rank."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        values = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.group)
        return values.item()


def ensure_world(
    gpus: int | None,
    node: "Node | None" = None,
    timeout: float = preflight.TIMEOUT,
    grace_seconds: float = _PATIENCE,
) -> None:
    """Runs ``gpus`` copies of this command under torchrun and ends with the exit code of the first that failed.

    A process that torchrun started returns at once. Without GPUs the copies share the CPU and talk through gloo.

    Args:
        node: which one this is among several; None if it is the only one.
        timeout: seconds to wait for the other nodes.
        grace_seconds: how long the copies may live on after SIGTERM or SIGUSR1, which they are passed.

    Raises:
        ConfigError: more than this machine has, or the port at which the nodes meet is taken.
        PeerLostError: another node never came up.
    """
    gpus = 1 if gpus is None else gpus
    if (gpus == 1 and node is None) or "WORLD_SIZE" in os.environ:
        return
    import torch

    available = torch.cuda.device_count()
    if 0 < available < gpus:
        raise ConfigError(f"--gpus {gpus}: this machine has {available}")
    # Unless the user chose, the processes share the cores; torchrun would give each one core, with a warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // gpus)))
    process_settings.set_defaults(os.environ)
    where = ["--standalone"]
    if node is not None:
        store = preflight.meet("node", node.rank, node.count, *node.meeting, serves=node.rank == 0, timeout=timeout)
        atexit.register(lambda: store)  # lives on with the process: torchrun shares it
        where = node.torchrun()
    options = [*where, f"--nproc-per-node={gpus}", f"--signals-to-handle={_SIGNALS}"]
    if grace_seconds > _PATIENCE:
        options.append(f"--shutdown-timeout={math.ceil(grace_seconds)}")
    # Without `--` torchrun takes an option of fcsd's such as `--run` for an abbreviation of its own.
    _torchrun([*options, "-m", "--", "fcsd", *sys.argv[1:]])


def _torchrun(arguments: list[str]) -> NoReturn:
    # In this process: as a command of its own, torchrun exits with 1 whatever its children said.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    sys.stdout.flush()
    try:
        run(parse_args(arguments))
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode >= 0:
            sys.exit(first.exitcode)
        # Nobody else could say so. The kernel kills whatever takes the last of the memory.
        print(f"error: rank {rank} was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        print("hint: if nobody did that, the machine ran out of memory; `dmesg` says so", file=sys.stderr)
        sys.exit(PeerLostError.exit_code)
    except SignalException as caught:
        preempted = caught.sigval in (signal.SIGTERM, signal.SIGUSR1)
        sys.exit(PreemptedError.exit_code if preempted else 128 + caught.sigval)
    sys.exit(0)


def join_world(timeout: float = preflight.TIMEOUT) -> World:
    """This process in the group of its run: torchrun's, or one of a single process that needs no port.

    NCCL on GPUs, gloo on CPUs. A process joins once and stays until it exits, since DeepSpeed keeps its groups; a
    command exits by ``leave``.

    Args:
        timeout: seconds to wait for the other processes, and for their first collective.

    Raises:
        PeerLostError: one is missing; the message names its rank.
    """
    import torch
    import torch.distributed as dist

    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed looks for one, aloud
    if not dist.is_initialized():
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
        backend = "nccl" if device.type == "cuda" else "gloo"
        if size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            preflight.join(backend, rank, size, device, timeout)
    return World(rank, size, device)


def leave(end: SystemExit) -> NoReturn:
    """Ends this process as ``end`` says; one that joined a world does so without finalising the interpreter.

    DeepSpeed keeps its process groups, and with them threads that now and then let go of a tensor. Letting go takes
    the interpreter's lock; a thread that asks for it during finalisation is unwound through C++ frames that may not
    be unwound, and the process aborts with its work done. So what Python would have done at exit is done here.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        raise end
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == 0:
        with suppress(Exception):  # the others may still be reading what this process sent, or have failed since
            dist.barrier(async_op=True).wait(_MEET)
            dist.destroy_process_group()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
