"""Compares what stock vLLM answers with its own sums and with sums through memory of the host, for kinds of models.

    NCCL_P2P_DISABLE=1 python3 benchmarks/vllm/vllm_host_sums.py OUT.json [--seconds 200] [--models FOLDER] [KIND ...]

The kinds are those of ``KINDS``; all are tried at the same time, so one GPU is shared by many engines. Each has three
layers with random weights, and an engine on two ranks for each way in turn: in whole CUDA graphs, eagerly, compiled.
In graphs NCCL runs twice: what differs between the two is what may differ. Prompts have 3 to 700 tokens, for sums of
all ways; each is asked alone, and then all together, where the engine may divide the work otherwise the next time.
Between two ranks exact sums have NCCL's bits, so tokens and log-probabilities have to be equal. OUT.json is written
after every engine; a log of each is beside it. ``HOST`` is host, or host:FORMAT. PYTHONPATH is the root of the
repository, and vLLM is installed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

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


def made(kind: str, folder: Path) -> dict[str, Any]:
    """Write a model of a kind, and the options with which vLLM serves it."""
    import torch
    import transformers

    name, fields, options = KINDS[kind]
    path = folder / kind
    torch.manual_seed(0)
    config = getattr(transformers, name)(**fields)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    if speculative := options.get("speculative_config"):
        from vllm_speculation import eagle_head

        eagle_head(path, folder / "head")
        options = {"speculative_config": {**speculative, "model": str(folder / "head")}}
    return {"model": str(path), **options}


def answer(options: dict[str, Any], log: Path, out: Path, asked: str) -> None:
    """Serve a model in this process, which has the sums that are asked for, and write its answers."""
    os.setsid()  # what is left of it is ended with its group
    with log.open("w") as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)
    os.environ["FCSD_ALL_REDUCE"] = asked
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    llm = LLM(
        tensor_parallel_size=2, skip_tokenizer_init=True, disable_custom_all_reduce=True, max_model_len=1024,
        max_num_seqs=4, gpu_memory_utilization=0.05, kv_cache_memory_bytes=1 << 28, enable_prefix_caching=False,
        seed=0, **options,
    )  # fmt: skip
    prompts = [{"prompt_token_ids": [(7 * n * n + length) % 4000 for n in range(length)]} for length in LENGTHS]
    settings = SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, detokenize=False, ignore_eos=True)
    found: dict[str, list[Any]] = {"alone": [], "together": []}
    for name, group in (("alone", [[prompt] for prompt in prompts]), ("together", [prompts])):
        for some in group:
            for one in llm.generate(some, settings, use_tqdm=False):
                (output,) = one.outputs
                said = [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
                found[name].append({"tokens": list(output.token_ids), "logprobs": said})
    out.write_text(json.dumps(found))


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


def lane(kind: str, folder: Path, beside: Path, until: float) -> None:
    """One kind: each mode and way in turn, until the time is over. What was found is in ``beside``/KIND.json."""
    options = made(kind, folder)
    rows: dict[str, Any] = {}
    firsts: dict[str, Any] = {}
    for mode, way in TURNS:
        if time.monotonic() > until - 15:
            break
        out = folder / f"{kind}-{mode}-{way.replace(' ', '-')}.json".replace(":", "-")
        log = beside / f"{out.stem}.log"
        begun = time.monotonic()
        given = options | MODES[mode], log, out, HOST if way == HOST else ""
        engine = multiprocessing.get_context("fork").Process(target=answer, args=given)
        engine.start()
        engine.join(max(1.0, until - time.monotonic()))
        _end(engine)
        lines = log.read_text(errors="replace").splitlines()
        row: dict[str, Any] = {"seconds": round(time.monotonic() - begun, 1)}
        if way == HOST:
            row["log"] = [line[-400:] for line in lines if "sums through" in line or "sums are vLLM" in line][:1]
        if out.exists():
            found = json.loads(out.read_text())
            first = firsts.setdefault(mode, found)
            row |= compared(first, found) | ({"tokens": found} if found is first else {})
        else:
            row["failed"] = lines[-12:] if time.monotonic() < until else "no time"
        rows.setdefault(mode, {})[way] = row
        _write(beside / f"{kind}.json", rows)
        print(kind, mode, way, {name: value for name, value in row.items() if name != "tokens"}, flush=True)


def _end(engine: BaseProcess) -> None:
    engine.kill()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid or 0, signal.SIGKILL)


def _write(file: Path, found: Any) -> None:
    """At once, because another process reads it."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(found, indent=1) + "\n")
    beside.replace(file)


def main() -> None:
    """See the head of this file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--models", type=Path)
    options = parser.parse_intermixed_args()
    until = time.monotonic() + options.seconds
    sys.path[:0] = [str(Path(__file__).parent)]
    # Imported once, before the forks.
    import transformers  # noqa: F401
    from vllm import LLM, __version__  # noqa: F401  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    from fcsd.bench.runner import without_folders

    with tempfile.TemporaryDirectory(dir=options.models) as folder:
        beside = options.out.with_suffix("")
        beside.mkdir(exist_ok=True)
        fork = multiprocessing.get_context("fork")
        lanes = [fork.Process(target=lane, args=(kind, Path(folder), beside, until)) for kind in options.kinds]
        for one in lanes:
            one.start()
        while any(one.is_alive() for one in lanes) and time.monotonic() < until + 5:
            time.sleep(1.0)
            files = {kind: beside / f"{kind}.json" for kind in options.kinds}
            kinds = {kind: json.loads(file.read_text()) for kind, file in files.items() if file.exists()}
            found = {"command": without_folders(" ".join(sys.argv)), "vllm": __version__, "kinds": kinds}
            _write(options.out, found)
        for one in lanes:
            one.kill()


if __name__ == "__main__":
    main()
