"""Times the ways to sum through memory of the host before any server runs, where every server then finds the table.

A server that measures them while others start on the same GPUs would measure those, so it leaves them to vLLM.
``fcsd bench links`` measures the same tables, so that measuring once is enough.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, spawn

from fcsd.errors import ConfigError
from fcsd.foreign_errors import reason_in
from fcsd.parallel.all_reduce.host import sums_of
from fcsd.parallel.all_reduce.host_table import (
    STOCK,
    HostTables,
    Stock,
    exact,
    exact_ways,
    file_for,
    kept,
    measured,
    read_times,
)
from fcsd.serve.vllm.communicator import caches, format_of

# A setting of NCCL: without peer access its copies are those of copy engines, not of kernels.
COPIES = "NCCL_SHM_USE_CUDA_MEMCPY"
_MOST_WAYS = "host:int8"  # of the values of ``HOST_SUMS``, the one whose table has all ways; the other is ``host``


def through_host() -> bool:
    """Whether data between the GPUs have to go through the host; NCCL_P2P_DISABLE=1 sends them so, too."""
    peers = os.environ.get("NCCL_P2P_DISABLE", "0") == "0"
    return torch.cuda.device_count() > 1 and not (peers and torch.cuda.can_device_access_peer(0, 1))


def measure(counts: Sequence[int]) -> None:
    """Measure and keep the tables of these numbers of ranks, with NCCL's own copies and with those of ``COPIES``.

    Where GPUs can access each other's memory a server would not sum by NCCL alone, so nothing is measured.

    Raises:
        ConfigError: a rank cannot sum so.
    """
    for ranks in counts if through_host() else ():
        prepare(ranks)
        with _copies():
            prepare(ranks)


def microseconds(counts: Sequence[int]) -> dict[str, dict[int, dict[int, float]]]:
    """What is kept, by the way to sum, ranks and bytes: ``host``, ``host:int8``, and NCCL with ``COPIES``."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for ranks in counts:
        for size, row in _kept(ranks).items():
            own = {way: time for way, time in row.items() if way != STOCK}
            for name, time in (("host", min(exact_ways(own).values())), (_MOST_WAYS, min(own.values()))):
                found.setdefault(name, {}).setdefault(ranks, {})[size] = time
        with _copies():
            for size, row in _kept(ranks).items():
                found.setdefault(f"{COPIES}=1", {}).setdefault(ranks, {})[size] = row[STOCK]
    return found


def _kept(ranks: int) -> dict[int, dict[str, float]]:
    """Microseconds by bytes and way; empty if they were not measured."""
    if not torch.cuda.is_available():
        return {}
    found = read_times(file_for(caches(), torch.cuda.get_device_name(), ranks, _MOST_WAYS))
    return {} if found is None else found[0]


@contextmanager
def _copies() -> Iterator[None]:
    before = os.environ.get(COPIES)
    os.environ[COPIES] = "1"
    try:
        yield
    finally:
        del os.environ[COPIES]
        os.environ.update({} if before is None else {COPIES: before})


def prepare(ranks: int) -> None:
    """Measure the tables of ``HOST_SUMS``, one rank a GPU; what is there stays. Both are of one pass.

    Raises:
        ConfigError: a rank cannot sum so.
    """
    with TemporaryDirectory(prefix="fcsd-host-ways-") as folder:
        try:
            spawn(_rank, (ranks, Path(folder, "ranks")), nprocs=ranks)
        except ProcessException as error:
            why = reason_in(str(error))
            raise ConfigError(f"the ways to sum through memory of the host cannot be timed: {why}") from None


def _rank(rank: int, ranks: int, meeting: Path) -> None:
    torch.cuda.set_device(rank)
    where, device = f"file://{meeting}", torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=ranks, device_id=device)
    group = dist.new_group(backend="gloo")
    sums = sums_of(group)

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(x: Tensor) -> Tensor:
        out = x.new_empty(ranks * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    def scatter(x: Tensor) -> Tensor:
        out = x.new_empty(len(x) // ranks, *x.shape[1:])
        dist.reduce_scatter_tensor(out, x)
        return out

    def table(asked: str, made: Callable[[], HostTables]) -> HostTables:
        return kept(file_for(caches(), torch.cuda.get_device_name(), ranks, asked), made, group)

    stock = Stock(nccl, gather, scatter)
    ways = table(_MOST_WAYS, lambda: measured(sums, stock, group, format_of(_MOST_WAYS)))
    table("host", lambda: exact(ways))
    dist.barrier()
