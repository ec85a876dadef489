"""Starts the processes of a run, joins them to one group, and makes them succeed or fail together."""

import atexit
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

from fcsd.errors import ConfigError, PeerLostError, PreemptedError
from fcsd.launch import own_code, preflight
from fcsd.parallel import process_settings

if TYPE_CHECKING:
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

T = TypeVar("T")
log = logging.getLogger(__name__)

_PATIENCE = 30.0  # seconds that torchrun waits for processes that it has told to end
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
_MEET = timedelta(seconds=60)  # how long a process that has finished waits for the others


@dataclass(frozen=True)
class World:
    """This process as one of the processes of the run.

    Attributes:
        rank: the rank of this process.
        size: the number of ranks.
        device: the device of this process.
        group: the process group through which the ranks communicate; None for the default process group.
    """

    rank: int
    size: int
    device: "torch.device"
    group: "torch.distributed.ProcessGroup | None" = None

    def everywhere(self, function: Callable[[], T]) -> list[T]:
        """Run ``function`` on every rank, and return the results in the order of ranks on every rank.

        An error on one rank is raised on all ranks. ``function`` must not communicate, because a rank that fails would
        leave the other ranks waiting.
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
        """Run ``function`` on rank 0 only, and return its result on every rank. Its error is raised on every rank."""
        return self.everywhere(lambda: function() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def lowest(self, value: float) -> float:
        """The smallest ``value`` of all ranks."""
        if self.size == 1:
            return value
        import torch
        import torch.distributed as dist

        values = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self.group)
        return values.item()

    def patient(self, patience: timedelta) -> "World":
        """The same ranks in a gloo group of their own, in which each waits so long for the others."""
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo", timeout=patience))


def gpus_here(divides: Callable[[int], bool] = lambda count: True) -> int:
    """What a command takes that was told no number of GPUs: the most of this machine for which ``divides`` holds.

    It is said, unless the machine has one GPU or none, where the number is 1. In a process that a launcher has started
    it is the number of these processes.
    """
    if "WORLD_SIZE" in os.environ:
        return preflight.launched()[1]
    import torch

    here = torch.cuda.device_count()
    count = next(filter(divides, range(here, 0, -1)), 1)
    if here > 1:
        log.info("%d of the %d GPUs here take part; --gpus N says how many", count, here)
    return count


def ensure_world(gpus: int | None, grace_seconds: float = _PATIENCE, module: str = "fcsd") -> None:
    """Run ``gpus`` copies of this command under torchrun, then exit with the exit code of the first copy that failed.

    The function returns at once in a process that torchrun has started, and where one process is enough. On a machine
    without GPUs the copies share the CPU and communicate through gloo. On several machines, another launcher starts the
    processes (docs/launching.md).

    Args:
        gpus: the number of processes; None is ``gpus_here()``.
        grace_seconds: seconds that the copies may go on after SIGTERM or SIGUSR1. Both signals are passed on to them.
        module: what the copies run, with the arguments of this process: ``python -m`` of this name.

    Raises:
        ConfigError: the machine has fewer GPUs, or the environment says that a launcher started this process, and is
            not complete.
    """
    gpus = gpus_here() if gpus is None else gpus
    _, started = preflight.launched()
    if "WORLD_SIZE" in os.environ and started < gpus:
        raise ConfigError(
            f"{gpus} processes are asked for, and WORLD_SIZE={started} says that a launcher has started {started}",
            "If no launcher started this process, unset WORLD_SIZE.",
        )
    if gpus == 1 or "WORLD_SIZE" in os.environ:
        return
    import torch

    available = torch.cuda.device_count()
    if 0 < available < gpus:
        raise ConfigError(f"--gpus {gpus}: this machine has {available} GPUs")
    # The processes share the cores, unless the user has set a number. torchrun would give each one core and warn.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // gpus)))
    process_settings.set_defaults(os.environ)
    own_code.leave_out_current_directory(os.environ)
    options = ["--standalone", f"--nproc-per-node={gpus}", f"--signals-to-handle={_SIGNALS}"]
    if grace_seconds > _PATIENCE:
        options.append(f"--shutdown-timeout={math.ceil(grace_seconds)}")
    # Without `--` torchrun would read an option of fcsd such as `--run` as an abbreviation of one of its own options.
    _torchrun([*options, "-m", "--", module, *sys.argv[1:]])


def _torchrun(arguments: list[str]) -> NoReturn:
    # torchrun runs in this process. As a command it would exit with 1, whatever the exit codes of its processes are.
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    sys.stdout.flush()
    options = parse_args(arguments)
    if not logging.getLogger("fcsd").isEnabledFor(logging.DEBUG):  # -v
        logging.disable()  # what torchrun says about its processes, each of which reports its own error
    try:
        run(options)
    except ChildFailedError as failed:
        rank, first = _cause(failed.failures)
        if first.exitcode == 128 + signal.SIGINT:
            raise KeyboardInterrupt from None
        if first.exitcode >= 0:
            sys.exit(first.exitcode)
        # A killed process prints nothing, so its parent reports it. The kernel kills processes when memory runs out.
        print(f"error: rank {rank} was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
        print("hint: if nobody did that, the machine ran out of memory; `dmesg` says so", file=sys.stderr)
        sys.exit(PeerLostError.exit_code)
    except SignalException as caught:
        if caught.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        preempted = caught.sigval in (signal.SIGTERM, signal.SIGUSR1)
        sys.exit(PreemptedError.exit_code if preempted else 128 + caught.sigval)
    sys.exit(0)


def _cause(failures: "Mapping[int, ProcessFailure]") -> "tuple[int, ProcessFailure]":
    """The rank that failed by itself, and its failure.

    torchrun dates failures in whole seconds and looks at its processes several times per second. If a process has
    ended because of another one before torchrun looks, both have the same date, and the date does not tell which of
    them was the first.
    """
    consequences = (PeerLostError.exit_code, PreemptedError.exit_code, -signal.SIGTERM)
    first = min(failures, key=lambda rank: failures[rank].timestamp)
    together = [rank for rank in failures if failures[rank].timestamp <= failures[first].timestamp + 1]
    cause = next((rank for rank in together if failures[rank].exitcode not in consequences), first)
    return cause, failures[cause]


def join_world(timeout: float = preflight.TIMEOUT) -> World:
    """Join the process group of the run: that of torchrun, or a group of this process alone, which needs no port.

    The group uses NCCL on GPUs and gloo on CPUs. A process joins once and stays in the group until it exits, because
    DeepSpeed keeps its process groups. A command exits through ``leave``.

    Args:
        timeout: seconds to wait for the other processes, and again for their first collective.

    Raises:
        ConfigError: the environment says that a launcher started this process, and is not complete.
        PeerLostError: a process is missing; the message names its rank.
    """
    import torch
    import torch.distributed as dist

    joined = dist.is_initialized()  # by a caller, perhaps without the variables of a launcher
    rank, size = (dist.get_rank(), dist.get_world_size()) if joined else preflight.launched()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise DeepSpeed searches and prints messages about it
    if not joined:
        os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed requires this variable
        backend = "nccl" if device.type == "cuda" else "gloo"
        if size == 1:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        else:
            preflight.join(backend, rank, size, device, timeout)
    return World(rank, size, device)


def first_rank() -> bool:
    """Whether this is the only process of a run, or the first one. The answer needs neither torch nor a group."""
    return "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"


def barrier() -> None:
    """Wait until every rank is here."""
    import torch.distributed as dist

    dist.barrier(device_ids=_gpu())


def _gpu() -> list[int] | None:
    # NCCL prints a warning at a barrier that does not name the GPU of the rank. Gloo refuses one that does.
    import torch
    import torch.distributed as dist

    return [torch.cuda.current_device()] if dist.get_backend() == "nccl" else None


def leave(end: SystemExit) -> NoReturn:
    """End this process with the exit code of ``end``.

    A process that has joined a process group ends without finalising the interpreter. DeepSpeed keeps its process
    groups, whose threads free tensors from time to time. To free a tensor, a thread takes the interpreter's lock. A
    thread that asks for the lock during finalisation is unwound through C++ frames that do not allow it, and the
    process aborts although its work is done. This function therefore does itself what Python would do at exit.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        raise end
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the wait below; nothing is left to remove
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if code == 0:
        with suppress(Exception):  # other ranks may still be reading what this process sent, or have failed
            dist.barrier(async_op=True, device_ids=_gpu()).wait(_MEET)
            dist.destroy_process_group()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
