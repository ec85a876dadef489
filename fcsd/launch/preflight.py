"""Joins the process group of a run, reports the ranks that are missing, and checks that the network works.

Every rank sets a key in the store when it has started, and waits for the keys of the other ranks. Then one number is
summed over all ranks. Both steps have the same timeout, so a run that cannot work ends before it has loaded anything.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fcsd.errors import ConfigError, PeerLostError

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

log = logging.getLogger(__name__)

TIMEOUT = 300.0  # seconds; importing Python packages from a network disk can take minutes
_SAY_AFTER = 5.0  # seconds of waiting after which a process says for whom it waits


def launched() -> tuple[int, int]:
    """The rank of this process and the number of ranks, as its launcher says in the environment; else 0 and 1.

    Raises:
        ConfigError: a variable is missing, or is not the number that it should be. Nobody would ever come.
    """
    if "WORLD_SIZE" not in os.environ:
        return 0, 1
    said = {name: os.environ.get(name, "").strip() for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT")}
    alone = said["WORLD_SIZE"] == "1"  # such a process meets nobody
    numbers = {name: int(text) for name, text in said.items() if text.isdecimal()}
    size, rank = numbers.get("WORLD_SIZE", 0), numbers.get("RANK", 0 if alone else -1)
    if not 0 <= rank < size or not (alone or (said["MASTER_ADDR"] and "MASTER_PORT" in numbers)):
        told = ", ".join(f"{name}={text}" if text else f"no {name}" for name, text in said.items())
        raise ConfigError(
            f"the environment is not that of a launcher: it has {told}",
            "If no launcher started this process, unset WORLD_SIZE. Else docs/launching.md says what it has to set.",
        )
    return rank, size


def join(backend: str, rank: int, size: int, device: "torch.device", timeout: float) -> None:
    """Make the default process group of the run, whose ranks meet at ``MASTER_ADDR`` and ``MASTER_PORT``.

    Args:
        backend: ``nccl`` or ``gloo``.
        device: the device of this rank, on which the first collective runs.
        timeout: how long, in seconds, to wait for all ranks to start, and again for their first collective.

    Raises:
        ConfigError: the port is in use.
        PeerLostError: a rank did not start, or the sum was not finished; the message names the ranks.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_timeout

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Under torchrun the ranks use torchrun's own store. Otherwise rank 0 holds the store.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = meet(rank, size, host, port, serves=serves, timeout=timeout)
    store.set_timeout(default_pg_timeout)  # later waits are for collectives, which take longer than starting
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    total = torch.ones((), device=device)
    work: Any = dist.all_reduce(total, async_op=True)
    if not _within(work.is_completed, timeout):
        late = _missing(store, "summed", size)
        raise PeerLostError(
            f"all {size} ranks are up, but after {timeout:g} seconds their first all-reduce is unfinished at "
            f"{_named(late)}",
            hint="the network between them is broken; NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME help to find out where",
        )
    work.wait()
    store.set(f"summed/{rank}", "1")


def meet(rank: int, size: int, host: str, port: int, *, serves: bool, timeout: float) -> "Store":
    """Connect to the store at ``host:port``, and return it when all ranks have connected to it.

    Args:
        serves: whether this process holds the store, which then exists as long as the process.
        timeout: how long to wait, in seconds.

    Raises:
        ConfigError: the port is in use.
        PeerLostError: some ranks did not connect in time; the message names them.
    """
    from torch.distributed import (
        DistError,
        PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
        TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    )

    wait = timedelta(seconds=timeout)
    asked = f"waits up to {timeout:g} seconds; if no other process was started, unset WORLD_SIZE"
    try:
        with _said_later(f"nobody answers yet at {host}:{port}: rank {rank} {asked}"):
            # The store's own waits heed no signal, so this process asks again and again, here and for the keys below.
            if not serves and not _within(lambda: _answers(host, port), timeout, 0.1):
                raise _silent(host, port, timeout)
            tcp = TCPStore(host, port, None, serves, timeout=wait, wait_for_workers=False)
    except DistError as error:
        raise _unreachable(error, host, port, timeout) from error
    store = PrefixStore("fcsd", tcp)
    try:
        now = time.monotonic()
        until = now + timeout
        store.set(f"rank/{rank}", "1")
        keys = [f"rank/{one}" for one in range(size)]
        for end in (min(until, now + _SAY_AFTER), until):
            if _within(lambda: store.check(keys), end - time.monotonic(), 0.05):
                return store
            if rank == 0 and time.monotonic() < until:  # speaks for all
                late = _named(_missing(store, "rank", size))
                log.info("%s of %d did not come yet: rank 0 %s", late, size, asked)
    except DistError:
        pass  # the process that holds the store is gone
    raise PeerLostError(
        f"{_named(_missing(store, 'rank', size))} of {size} did not come up within {timeout:g} seconds",
        hint="look at the output of that process, or of its node; if no other was started, unset WORLD_SIZE",
    )


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens at an address."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def _said_later(text: str) -> Iterator[None]:
    """Log ``text`` if the block takes long."""
    timer = threading.Timer(_SAY_AFTER, log.info, [text])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _unreachable(error: Exception, host: str, port: int, timeout: float) -> ConfigError | PeerLostError:
    """The error of fcsd for a store that could not be made or reached."""
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return ConfigError(f"port {port} of {host} is in use", hint="Perhaps another run uses it. Choose another port.")
    return _silent(host, port, timeout)


def _silent(host: str, port: int, timeout: float) -> PeerLostError:
    return PeerLostError(
        f"nobody answers at {host}:{port} within {timeout:g} seconds",
        hint="Check that the process of rank 0 runs on node 0, and that its address can be reached from here.",
    )


def _missing(store: "Store", mark: str, count: int) -> list[int]:
    """The numbers whose key is not in the store; number 0, which holds the store, if the store does not answer."""
    from torch.distributed import DistError

    try:
        return [one for one in range(count) if not store.check([f"{mark}/{one}"])]
    except DistError:
        return [0]


def _within(done: Callable[[], bool], timeout: float, pause: float = 0.01) -> bool:
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
    return True


def _named(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' * (len(numbers) > 1)} {shown}"
