"""Compares what vLLM computes under data-parallel attention with expert parallelism with what transformers computes.

    python benchmarks/vllm/vllm_exchange.py FOLDER CASE/ROLE/EXCHANGE...

It starts two processes of vLLM's build for CPUs for a plan, with whole experts divided over them. They have different
numbers of prompts, and one of them stops earlier. ROLE is ``original`` or ``converted``. EXCHANGE is ``at-once``, by
vLLM, or ``in-flight``, by fcsd's plugin. The models are those of ``benchmarks/vllm/vllm_cases.py``, in float32.

The build for CPUs lacks two things, which ``fill_in`` gives it: gathers and scatters of different numbers of rows, and
experts of which a rank has a part. Engine, models, routers, and the exchange at once are vLLM's own.
``benchmarks/vllm/vllm_cpu.sh`` runs it. The exit status is 0 if every row is right.
"""

import argparse
import multiprocessing
import os
import queue
import random
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent)]

from vllm_cases import made, prompts  # noqa: E402
from vllm_parity import FLOAT32_TOLERANCE, NEW, engine, logprobs, reference  # noqa: E402
from vllm_report import Row, report  # noqa: E402

RANKS, SECONDS = 2, 300


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


def answer(rank: int, port: int, path: Path, asked: list[list[int]], exchange: str, found: Any) -> None:
    """One rank: what vLLM answers to every second prompt, as ``(ids, answer, log-probabilities)``."""
    os.environ |= dict(VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), VLLM_DP_SIZE=str(RANKS))
    os.environ |= dict(VLLM_DP_MASTER_IP="127.0.0.1", VLLM_DP_MASTER_PORT=str(port))
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    fill_in()
    section = {"fcsd": {"exchange": exchange, "overlap_from": 0}}
    options = dict(max_model_len=256, max_num_seqs=8, enforce_eager=True, distributed_executor_backend="uni")
    llm = engine(path, "float32", enable_expert_parallel=True, additional_config=section, **options)
    sampling = SamplingParams(
        max_tokens=NEW - 4 * rank, temperature=0, detokenize=False, prompt_logprobs=1, logprobs=1, ignore_eos=True
    )
    mine = asked[rank::RANKS]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in mine], sampling, use_tqdm=False)
    rows = []
    for ids, output in zip(mine, outputs, strict=True):
        said = list(output.outputs[0].token_ids)
        per_token = zip([*output.prompt_logprobs[1:], *output.outputs[0].logprobs], [*ids[1:], *said], strict=True)
        rows.append((ids, said, [entry[token].logprob for entry, token in per_token]))
    found.put(rows)


def compare(folder: Path, case: str, role: str, exchange: str) -> Row:
    """The largest error of both ranks, how far the other wiring is, and how many answers are the likeliest tokens."""
    import torch

    paths = made(folder, case)
    asked = prompts(paths["original"], case)
    context, port = multiprocessing.get_context("spawn"), random.randrange(20000, 50000)
    found = context.Queue()
    given = (port, paths[role], asked, exchange.replace("-", " "), found)
    ranks = [context.Process(target=answer, args=(rank, *given)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    try:
        rows = [row for _ in ranks for row in found.get(timeout=SECONDS)]
    except queue.Empty:
        raise TimeoutError(f"no answer after {SECONDS} s; exit codes {[rank.exitcode for rank in ranks]}") from None
    finally:
        for rank in ranks:
            rank.join(10)
            rank.kill()
    right, other = reference(paths[role]), reference(paths["converted" if role == "original" else "original"])
    largest = apart = 0.0
    greedy = 0
    for ids, said, values in rows:
        expected, likely = logprobs(right, ids + said)
        largest = max(largest, (torch.tensor(values).double() - expected).abs().max().item())
        apart = max(apart, (torch.tensor(values).double() - logprobs(other, ids + said)[0]).abs().max().item())
        greedy += bool(likely[-len(said) :].all())
    tolerance = FLOAT32_TOLERANCE["cpu"]
    right = largest <= tolerance and greedy == len(asked)
    return dict(largest=largest, other=apart, greedy=greedy, answers=len(asked), tolerance=tolerance, right=right)


def main() -> None:
    """Compare every plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the models are made")
    parser.add_argument("plans", nargs="+", help="CASE/ROLE/EXCHANGE")
    given = parser.parse_args()
    rows = []
    for plan in given.plans:
        case, role, exchange = plan.split("/")
        row = dict(case=case, role=role, exchange=exchange, data_parallel=RANKS, experts=True, dtype="float32")
        rows.append(report(row, compare, given.folder, case, role, exchange))
    sys.exit(not all(row["right"] for row in rows))


if __name__ == "__main__":
    main()
