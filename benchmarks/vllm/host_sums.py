"""Compares what stock vLLM answers with its own sums and with sums through memory of the host, for kinds of models.

    NCCL_P2P_DISABLE=1 python -m benchmarks.vllm host_sums OUT.json [--seconds 200] [--models FOLDER] [KIND ...]

The kinds are those of ``KINDS``; all are tried at the same time, so one GPU is shared by many engines. Each has three
layers with random weights, and an engine on two ranks for each way in turn: in whole CUDA graphs, eagerly, compiled.
In graphs NCCL runs twice: what differs between the two is what may differ. Prompts have 3 to 700 tokens, for sums of
all ways; each is asked alone, and then all together, where the engine may divide the work otherwise the next time.
Between two ranks exact sums have NCCL's bits, so tokens and log-probabilities have to be equal. OUT.json is written
after every engine; a log of each is beside it. ``HOST`` is host, or host:FORMAT.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.out_file import out_file
from benchmarks.vllm import engines
from benchmarks.vllm.speculation import eagle_head

from fcsd.bench.runner import write
from fcsd.errors import unknown_value

LENGTHS = (3, 40, 700)
NEW = 24  # tokens of an answer
GRAPHS = dict(mode=0, cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2, 4])
MODES: dict[str, dict[str, Any]] = {
    "graphs": dict(compilation_config=GRAPHS),
    "eager": dict(enforce_eager=True),
    "compiled": dict(compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4])),
}
HOST = os.environ.get("HOST", "host")
TURNS = [("graphs", "NCCL"), ("graphs", HOST), ("graphs", "NCCL again")]
TURNS += [(mode, way) for mode in ("eager", "compiled") for way in ("NCCL", HOST)]

DENSE = dict(
    vocab_size=4096, hidden_size=1024, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.05, tie_word_embeddings=False,
)  # fmt: skip
EXPERTS = DENSE | dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256, head_dim=128)
LATENT = DENSE | dict(
    num_key_value_heads=8, head_dim=64, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, n_routed_experts=16, n_shared_experts=2, num_experts_per_tok=4, moe_intermediate_size=256,
    first_k_dense_replace=1, topk_method="greedy", n_group=1, topk_group=1,
)  # fmt: skip
WINDOWED = DENSE | dict(head_dim=128, sliding_window=128)
# name -> the class of the config in transformers, its fields, what the engine is given
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("LlamaConfig", DENSE, {}),
    "experts": ("Qwen3MoeConfig", EXPERTS, {}),
    "divided-experts": ("Qwen3MoeConfig", EXPERTS, dict(enable_expert_parallel=True)),
    "latent-attention": ("DeepseekV2Config", LATENT, {}),
    "sliding-window": ("MistralConfig", WINDOWED, {}),
    "fp8-weights": ("LlamaConfig", DENSE, dict(quantization="fp8")),
    "fp8-cache": ("LlamaConfig", DENSE, dict(kv_cache_dtype="fp8")),
    "drafts": ("LlamaConfig", DENSE, dict(speculative_config=dict(method="eagle", num_speculative_tokens=2))),
}


ARGUMENTS = {
    "out": out_file,
    "kinds": dict(nargs="*", default=list(KINDS), metavar="KIND"),
    "--seconds": 200.0,
    "--models": dict(type=Path, help="where models are made, for the time of the run"),
}


def made(kind: str, folder: Path) -> dict[str, Any]:
    """Write a model of a kind, unless it is there; the options with which vLLM serves it."""
    import torch
    import transformers

    name, fields, options = KINDS[kind]
    path = folder / kind
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, name)(**fields)
        transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    if speculative := options.get("speculative_config"):
        eagle_head(path, folder / "head")
        options = {"speculative_config": {**speculative, "model": str(folder / "head")}}
    return {"path": path, **options}


def serve(kind: str, mode: str, folder: Path) -> Iterator[dict[str, list[Any]]]:
    """What an engine answers to the prompts alone and together."""
    llm = engines.llm(
        tensor_parallel_size=2, disable_custom_all_reduce=True, max_model_len=1024, max_num_seqs=4,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, seed=0, **made(kind, folder), **MODES[mode],
    )  # fmt: skip
    prompts = [[(7 * n * n + length) % 4000 for n in range(length)] for length in LENGTHS]
    found: dict[str, list[Any]] = {"alone": [], "together": []}
    for name, group in (("alone", [[prompt] for prompt in prompts]), ("together", [prompts])):
        for some in group:
            for one in engines.generate(llm, some, engines.sampling(NEW, logprobs=1)):
                (output,) = one.outputs
                said = [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
                found[name].append({"tokens": list(output.token_ids), "logprobs": said})
    yield found


def compared(first: dict[str, list[Any]], other: dict[str, list[Any]]) -> dict[str, Any]:
    """For prompts alone and together: equal answers, the largest difference of log-probabilities before another token,
    and whether all log-probabilities are equal.
    """
    found = {}
    for name in first:
        worst, equal = 0.0, 0
        for a, b in zip(first[name], other[name], strict=True):
            equal += a["tokens"] == b["tokens"]
            for x, y, p, q in zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True):
                worst = max(worst, abs(p - q))
                if x != y:
                    break
        found[name] = {"equal answers": equal, "of": len(first[name]), "largest difference": worst}
    return found


def main(given: Any) -> None:
    """Each kind: each mode and way in turn, until the time is over."""
    import transformers  # noqa: F401 # before the forks

    for kind in given.kinds:
        if kind not in KINDS:
            raise unknown_value("kind", kind, KINDS)
    until, beside = time.monotonic() + given.seconds, given.out.with_suffix("")
    beside.mkdir(exist_ok=True)
    found: dict[str, Any] = {"command": given.command, "vllm": engines.version(), "kinds": {}}
    firsts: dict[tuple[str, str], Any] = {}
    left = {kind: iter(TURNS) for kind in given.kinds}
    running: dict[str, tuple[str, str, Path, float]] = {}
    forked: dict[str, engines.Fork] = {}
    with tempfile.TemporaryDirectory(dir=given.models) as folder, engines.forks() as fork:

        def begin(kind: str) -> None:
            mode, way = next(left[kind], ("", ""))
            if mode and time.monotonic() < until - 15:
                log = beside / f"{kind}-{mode}-{way.replace(' ', '-').replace(':', '-')}.log"
                running[kind] = mode, way, log, time.monotonic()
                asked = {"FCSD_ALL_REDUCE": HOST if way == HOST else ""}
                forked[kind] = fork(serve, kind, mode, Path(folder), log=log, environment=asked)

        for kind in given.kinds:
            begin(kind)
        while forked:
            kind, told = next(engines.replies(forked, until))
            engines.end(forked.pop(kind))
            mode, way, log, begun = running.pop(kind)
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            row: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1)}
            if way == HOST:
                row["log"] = [line[-400:] for line in lines if "sums through" in line or "sums are vLLM" in line][:1]
            if isinstance(told, engines.Failed):
                row["failed"] = lines[-12:] or [str(told)] if time.monotonic() < until else "no time"
            else:
                first = firsts.setdefault((kind, mode), told)
                row |= compared(first, told) | ({"tokens": told} if told is first else {})
            found["kinds"].setdefault(kind, {}).setdefault(mode, {})[way] = row
            write(found, given.out)
            print(kind, mode, way, {name: value for name, value in row.items() if name != "tokens"}, flush=True)
            begin(kind)
