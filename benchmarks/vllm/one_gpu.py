"""Lets the ranks of vLLM share one GPU, so that tensor parallelism can be tried, though not timed, on a single GPU.

It is an entry point ``vllm.general_plugins``, which vLLM calls in each of its processes, and does something only where
``ONE_GPU`` is the number of ranks. NCCL takes two ranks on one GPU for an error unless it believes that they are on
two hosts; they then talk through sockets. A kernel that waits for another rank is preempted after its slice of time,
so every sum takes milliseconds.
"""

import os


def register() -> None:
    """Give every rank the GPU 0, and an identity of its own for NCCL."""
    ranks = int(os.environ.get("ONE_GPU", "0"))
    if not ranks:
        return
    import torch
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    def first(cls: type, rank: int) -> int:
        os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
        return 0

    platform = type(current_platform)
    platform.logical_device_id_to_visible_device_id = classmethod(first)
    platform.device_count = classmethod(lambda cls: ranks)
    torch.accelerator.device_count = lambda: ranks
