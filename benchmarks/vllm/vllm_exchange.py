"""Runs vLLM under data-parallel attention with expert parallelism, for ``benchmarks/vllm/vllm_parity.py serve --dp N``.

A rank is a process with an engine of its own. Ranks have different numbers of prompts, and the last one stops after
half of the tokens. The build of vLLM for CPUs lacks two things, which ``fill_in`` gives it: gathers and scatters of
different numbers of rows, and experts of which a rank has a part. Engine, models, routers, and the exchange at once are
vLLM's own.
"""

import multiprocessing
import os
import queue
import random
import time
from pathlib import Path
from typing import Any

SECONDS = 300


def fill_in() -> None:
    """Give vLLM's build for CPUs what it lacks, by gloo and torch."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import (  # pyright: ignore[reportMissingImports]
        CpuCommunicator,
    )
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        CPUUnquantizedExperts,
    )

    def all_gatherv(self: Any, x: Any, dim: int = 0, sizes: Any = None) -> Any:
        if isinstance(x, list):
            return [all_gatherv(self, part, dim, sizes) for part in x]
        mine = x.new_zeros(max(sizes), *x.shape[1:])
        mine[: len(x)] = x
        found = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(found, mine, group=self.device_group)
        return torch.cat([part[:rows] for part, rows in zip(found, sizes, strict=True)])

    def reduce_scatterv(self: Any, x: Any, dim: int = -1, sizes: Any = None) -> Any:
        whole = x.clone()
        dist.all_reduce(whole, group=self.device_group)
        return whole.split(sizes)[self.rank_in_group].clone()

    def keep(self: Any, layer: Any) -> None:  # instead of packing the weights for the kernel
        for name in ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function"):
            setattr(self, name, getattr(layer, name))

    def apply(self: Any, hidden_states: Any, w1: Any, w2: Any, router_logits: Any, **given: Any) -> Any:
        assert given["activation"].value == "silu"
        names = ("num_expert_group", "topk_group", "e_score_correction_bias", "routed_scaling_factor")
        weights, ids = self._select_experts(hidden_states, router_logits, **{name: given[name] for name in names})
        out, places = torch.zeros_like(hidden_states), given["expert_map"]
        for expert, place in enumerate(range(len(w1)) if places is None else places.tolist()):
            if place < 0:  # another rank has it
                continue
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            x, scale = hidden_states[rows], weights[rows, slots, None].to(out.dtype)
            if given["apply_router_weight_on_input"]:
                x, scale = x * scale, torch.ones_like(scale)
            gate, up = (x @ w1[place].T).chunk(2, -1)
            out.index_add_(0, rows, (torch.nn.functional.silu(gate) * up) @ w2[place].T * scale)
        return out

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply = keep, apply


def _rank(rank: int, port: int, path: Path, asked: list[list[int]], plan: dict, section: dict, found: Any) -> None:
    import torch
    import vllm_parity

    ranks = plan["replicas"]
    os.environ |= dict(VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE=str(ranks))
    os.environ |= dict(VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in this process
    if not torch.cuda.is_available():
        fill_in()
    share = 0.5 if rank == ranks - 1 else 1
    found.put(vllm_parity.answered(path, asked[rank::ranks], plan, section, share))


def answered(path: Path, asked: list[list[int]], plan: dict[str, Any], section: dict[str, Any]) -> Any:
    """What all ranks answer, and what one of them has chosen; see ``vllm_parity.answered``.

    Raises:
        RuntimeError: a rank has failed, and has said why.
        TimeoutError: a rank has not answered in time.
    """
    context = multiprocessing.get_context("fork")
    port = random.randrange(20000, 32000)  # Linux gives higher ones to any socket
    found = context.Queue()
    given = (port, path, asked, plan, section, found)
    ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(plan["replicas"])]
    for rank in ranks:
        rank.start()
    answers, chosen, end = [], {}, time.monotonic() + SECONDS
    try:
        for _ in ranks:
            some, chosen = _next(found, ranks, end)
            answers += some
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    return answers, chosen


def _next(found: Any, ranks: list[Any], end: float) -> Any:
    while True:
        try:
            return found.get(timeout=1)
        except queue.Empty:
            codes = [rank.exitcode for rank in ranks]
            if any(codes):
                raise RuntimeError(f"a rank has failed: exit codes {codes}") from None
            if time.monotonic() > end:
                raise TimeoutError(f"no answer after {SECONDS} s: exit codes {codes}") from None
