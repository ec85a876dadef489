"""Run a function on several gloo ranks, each a process of its own; a failure on any rank fails the test."""

import os
import socket
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp


def _run(rank: int, world: int, port: int, function: Callable, args: tuple, out: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_SIZE=str(world),
    )
    torch.set_num_threads(1)
    try:
        import deepspeed
        from deepspeed.ops import __compatible_ops__
        from deepspeed.utils import logger

        logger.setLevel("ERROR")
        __compatible_ops__["deepspeed_shm_comm"] = False  # it would compile C++ for half a minute
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        torch.save(function(rank, *args), f"{out}/{rank}.pt")
    except Exception:
        traceback.print_exc()
        os._exit(1)  # the others must not wait for a rank that failed
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # see fcsd.launch.leave


def on_ranks(world: int, function: Callable, *args: Any) -> list[Any]:
    """``[function(rank, *args) for each rank]``, run at the same time on a gloo process group."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        mp.start_processes(_run, (world, port, function, args, out), nprocs=world, start_method="spawn")
        return [torch.load(f"{out}/{rank}.pt", weights_only=False) for rank in range(world)]
