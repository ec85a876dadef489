"""Runs vLLM under data-parallel attention with expert parallelism, for ``parity serve --dp N``.

A rank is a process with an engine of its own. Ranks have different numbers of prompts, and the last one stops after
half of the tokens.
"""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.vllm.cpu_build import fill_in
from benchmarks.vllm.engines import Failed, forks, replies

SECONDS = 300


def _rank(rank: int, port: int, answered: Callable[..., Any], path: Path, asked: Any, plan: Any, section: Any) -> Any:
    import torch

    ranks = plan["replicas"]
    os.environ |= dict(VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE=str(ranks))
    os.environ |= dict(VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    if not torch.cuda.is_available():
        fill_in()
    yield answered(path, asked[rank::ranks], plan, section, 0.5 if rank == ranks - 1 else 1)


def together(answered: Callable[..., Any], *given: Any, ranks: int) -> Any:
    """What all ranks answer, and what one of them has chosen; ``answered`` and what it is given are of ``parity``.

    Raises:
        Failed: a rank has failed, or has not answered in time.
    """
    port = random.randrange(20000, 32000)  # Linux gives higher ones to any socket
    answers, chosen = [], {}
    with forks() as fork:
        group = {str(rank): fork(_rank, rank, port, answered, *given) for rank in range(ranks)}
        for rank, told in replies(group, time.monotonic() + SECONDS):
            if isinstance(told, Failed):
                raise Failed(f"rank {rank} has failed: {told}")
            some, chosen = told
            answers += some
    return answers, chosen
