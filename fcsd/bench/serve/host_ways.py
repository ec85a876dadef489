"""Times the ways to sum through memory of the host before any server runs, where every server then finds the table.

A server that measures them while others start on the same GPUs would measure those, so it leaves them to vLLM.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from fcsd.bench.serve.variants import HOST_SUMS
from fcsd.parallel.all_reduce.host import sums_of
from fcsd.parallel.all_reduce.host_table import file_for, kept, measured
from fcsd.serve.vllm.communicator import caches, format_of


def prepare(ranks: int) -> None:
    """Measure the tables of all variants with sums through the host, one rank a GPU; what is there stays.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank cannot sum so.
    """
    with TemporaryDirectory(prefix="fcsd-host-ways-") as folder:
        spawn(_rank, (ranks, Path(folder, "ranks")), nprocs=ranks)


def _rank(rank: int, ranks: int, meeting: Path) -> None:
    torch.cuda.set_device(rank)
    where, device = f"file://{meeting}", torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method=where, rank=rank, world_size=ranks, device_id=device)
    group = dist.new_group(backend="gloo")
    sums = sums_of(group)

    def nccl(x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def nccl_gather(x: Tensor) -> Tensor:
        out = x.new_empty(ranks * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    for environment in HOST_SUMS.values():
        (asked,) = environment.values()
        format = format_of(asked)
        file = file_for(caches(), torch.cuda.get_device_name(), ranks, asked)
        kept(file, lambda format=format: measured(sums, nccl, nccl_gather, group, format), group)
    dist.barrier()
