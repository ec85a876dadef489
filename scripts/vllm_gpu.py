"""Serves originals and converted models by vLLM on GPUs: is it right, and how long does a request wait?

    python scripts/vllm_gpu.py imports                      what a call on this machine would miss, all at once
    python scripts/vllm_gpu.py make FOLDER [CASE...]        small random models and the bundled teacher, converted
    python scripts/vllm_gpu.py serve FOLDER --case CASE --dtype TYPE --mode MODE [--tp N] [--ep]
    python scripts/vllm_gpu.py time FOLDER --case SHAPE [--tp N] [--ep]

``serve`` compares log-probabilities of prompts and of greedy answers with transformers (float32, on the CPU, given the
same tokens): one row for the original, one for the converted model. In bfloat16 transformers' own error in bfloat16
stands beside it. ``MODE`` is ``eager``, ``graph`` (whole CUDA graphs, not compiled) or ``default`` (compiled, with
vLLM's own choice of graphs). ``time`` gives all requests to the server at once and measures when each got its first
token; original, converted model and bound take turns. ``scripts/vllm_gpu.sh`` runs all of it.
"""

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]  # fcsd, its small models, vllm_parity

NEW = 8  # tokens of an answer
FLOAT32_TOLERANCE = 1e-4  # nats; kernels on the GPU add up in another order than the CPU
BFLOAT16_RATIO = 1.5  # root mean square error over that of transformers in bfloat16
TEACHER = "teacher"
TEXTS = ("Question: What is 12 plus 30? Answer:", "The capital of France is", "def add(a, b):\n    return")
MODULES = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.vllm_flash_attn",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.layers.fused_moe.fused_moe",
    "vllm.compilation.backends",
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.cli.serve",
    "fcsd.serve.vllm.registration",
    "fcsd.serve.vllm.models",
    "fcsd.convert",
    "fcsd.cli.main",
)
MODES: dict[str, dict[str, Any]] = {
    "eager": dict(enforce_eager=True),
    "graph": dict(compilation_config=dict(mode=0, cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2, 4, 8, 96])),
    "default": dict(compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8, 96])),
}
# Shapes of ``time``: as Qwen3-30B-A3B is published; vLLM fills the weights with random numbers.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_30b": dict(
        hidden_size=2048, num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        moe_intermediate_size=768, intermediate_size=6144, num_experts=128, num_experts_per_tok=8, vocab_size=151936,
        norm_topk_prob=True, max_position_embeddings=40960, rope_theta=1e6, tie_word_embeddings=False,
    ),
}  # fmt: skip
REQUESTS, LENGTHS, ROUNDS = 16, (512, 1024, 2048), 5


def imports() -> None:
    """Import every module that serving needs, and print each failure with the line that it comes from."""
    import torch

    print(f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}", flush=True)
    failed = 0
    for name in MODULES:
        start = time.perf_counter()
        try:
            importlib.import_module(name)
        except BaseException as error:
            failed += 1
            frames = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            where = [frame for frame in frames if "importlib" not in frame][-3:]
            print(f"MISSING {name}: {type(error).__name__}: {str(error)[:200]}; {' '.join(where)}", flush=True)
        else:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    if failed:
        sys.exit(f"{failed} of {len(MODULES)} modules cannot be imported")


def make(folder: Path, cases: list[str]) -> None:
    """Write ``FOLDER/CASE.base`` and ``FOLDER/CASE``: originals and converted models. One that fails is reported."""
    for case in cases:
        try:
            _make_case(folder, case)
        except Exception as error:
            traceback.print_exc()
            print(f"MISSING {case}: {type(error).__name__}: {error}", flush=True)


def _make_case(folder: Path, case: str) -> None:
    import vllm_parity

    from fcsd.convert import convert_checkpoint

    if case == TEACHER:
        base = folder / f"{TEACHER}.base"
        base.symlink_to(ROOT / "assets" / "teacher")
        convert_checkpoint(base, folder / TEACHER, layers="all", wiring="farskip", check=False)
    elif case in SHAPES:
        _make_shape(folder, case)
    else:
        vllm_parity.make(folder, [case])


def _make_shape(folder: Path, case: str) -> None:
    """Two directories with a config.json and without weights; the second is wired ``farskip`` in all layers."""
    from transformers import Qwen3MoeConfig

    from fcsd.models.wiring_block import Wiring

    config = Qwen3MoeConfig(**SHAPES[case], architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder / f"{case}.base")
    fields = json.loads((folder / f"{case}.base" / "config.json").read_text())
    wiring = Wiring("farskip", layers=tuple(range(config.num_hidden_layers)))
    converted = folder / case
    converted.mkdir()
    names = dict(model_type="fcsd_qwen3_moe", architectures=["FcsdQwen3MoeForCausalLM"])
    (converted / "config.json").write_text(json.dumps({**fields, **names, "fcsd": wiring.to_block()}))


def engine(path: Path, dtype: str, tensor_parallel: int, expert_parallel: bool, **options: Any) -> Any:
    """vLLM's engine for a model, which shares the GPU with others. It needs no tokenizer: requests are token ids."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    return LLM(
        str(path), dtype=dtype, tensor_parallel_size=tensor_parallel, enable_expert_parallel=expert_parallel,
        skip_tokenizer_init=True, enable_prefix_caching=False, gpu_memory_utilization=0.3, **options,
    )  # fmt: skip


def serve(folder: Path, case: str, dtype: str, mode: str, tensor_parallel: int, expert_parallel: bool) -> None:
    """Serve the original and the converted model of a case. Prints a row with differences, in nats, for each."""
    for role, path in (("original", folder / f"{case}.base"), ("converted", folder / case)):
        row = dict(case=case, role=role, dtype=dtype, mode=mode, ranks=tensor_parallel, experts=expert_parallel)
        start = time.perf_counter()
        try:
            row |= compare(path, folder, case, role, dtype, mode, tensor_parallel, expert_parallel)
        except Exception as error:
            traceback.print_exc()
            row |= dict(right=False, error=f"{type(error).__name__}: {str(error)[:300]}")
        print_row(row | dict(seconds=round(time.perf_counter() - start, 1)))


def print_row(row: dict[str, Any]) -> None:
    """Print one row of the results. ``scripts/vllm_gpu.sh`` collects the lines."""
    print("ROW " + json.dumps(row), flush=True)


def compare(
    path: Path, folder: Path, case: str, role: str, dtype: str, mode: str, tensor_parallel: int, expert_parallel: bool
) -> dict[str, Any]:
    """Ask vLLM for log-probabilities of prompts and of greedy answers, and transformers for those of the same tokens.

    Returns:
        ``largest`` and ``rms``, the errors of vLLM; ``answers``, the largest error in the answers alone; ``other``, how
        far the other wiring is; in bfloat16 ``rms_transformers``, the error of transformers; ``right``.
    """
    import torch
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    prompts = _prompts(folder, case)
    options = dict(MODES[mode], max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=1 << 28)
    if dtype == "float32":
        options["attention_config"] = dict(backend="TRITON_ATTN")  # FlashAttention has no float32
    llm = engine(path, dtype, tensor_parallel, expert_parallel, **options)
    sampling = SamplingParams(
        max_tokens=NEW, temperature=0, detokenize=False, prompt_logprobs=0, logprobs=0, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    backend = str(llm.llm_engine.vllm_config.attention_config.backend)
    graphs = str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()

    references = {
        name: _reference(where) for name, where in (("original", folder / f"{case}.base"), ("converted", folder / case))
    }
    rounded = _reference(path).to(torch.bfloat16) if dtype == "bfloat16" else None
    found, expected, other, own = [], [], [], []
    answers = 0.0
    for ids, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        per_token = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        tokens = [*ids[1:], *answer]
        values = torch.tensor([entry[token].logprob for entry, token in zip(per_token, tokens, strict=True)]).double()
        right = _logprobs(references[role], ids + answer)
        answers = max(answers, (values - right)[-NEW:].abs().max().item())
        found.append(values)
        expected.append(right)
        other.append(_logprobs(references["converted" if role == "original" else "original"], ids + answer))
        if rounded is not None:
            own.append(_logprobs(rounded, ids + answer))
    error = torch.cat(found) - torch.cat(expected)
    result: dict[str, Any] = dict(
        largest=error.abs().max().item(), rms=error.square().mean().sqrt().item(), answers=answers, backend=backend,
        other=(torch.cat(found) - torch.cat(other)).abs().max().item(), graphs=graphs, tokens=len(error),
    )  # fmt: skip
    if not own:
        return result | dict(right=result["largest"] <= FLOAT32_TOLERANCE)
    rms = (torch.cat(own) - torch.cat(expected)).square().mean().sqrt().item()
    return result | dict(rms_transformers=rms, right=result["rms"] <= BFLOAT16_RATIO * rms)


def _prompts(folder: Path, case: str) -> list[list[int]]:
    if case == TEACHER:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder / f"{TEACHER}.base")
        return [tokenizer(text)["input_ids"] for text in TEXTS]
    import tiny  # pyright: ignore[reportMissingImports]

    return tiny.tokens(3, 24).tolist()


def _reference(path: Path) -> Any:
    """The model in transformers, float32, on the CPU."""
    import torch
    import transformers

    from fcsd.models.build import load_model

    if "fcsd" in json.loads((path / "config.json").read_text()):
        return load_model(path, dtype=torch.float32).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def _logprobs(model: Any, tokens: list[int]) -> Any:
    """Log-probability of each token but the first, given those before it. ``[tokens - 1]``, float64."""
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double()
    return torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]


def first_tokens(folder: Path, case: str, tensor_parallel: int, expert_parallel: bool) -> None:
    """Time to first token of ``REQUESTS`` distinct prompts that arrive at once: mean and last, in milliseconds."""
    import torch
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    none = dict(additional_config={"fcsd": {"reduce": "none"}})
    variants: dict[str, tuple[Path, dict]] = {
        "original": (folder / f"{case}.base", {}),
        "converted": (folder / case, {}),
    }
    if tensor_parallel > 1:
        variants["bound (nothing summed, wrong results)"] = (folder / case, none)
    engines = {}
    for name, (path, options) in variants.items():
        engines[name] = engine(
            path, "bfloat16", tensor_parallel, expert_parallel, load_format="dummy", max_model_len=4096,
            max_num_seqs=REQUESTS, kv_cache_memory_bytes=8 << 30, disable_log_stats=False,
            compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8, 16]), **options,
        )  # fmt: skip
        print(f"{name}: started", flush=True)
    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    measured: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for turn in range(ROUNDS + 1):
        for length in LENGTHS:
            for name, llm in engines.items():
                ids = torch.randint(100, 100_000, (REQUESTS, length), generator=generator).tolist()
                outputs = llm.generate([{"prompt_token_ids": row} for row in ids], sampling, use_tqdm=False)
                waits = [1e3 * output.metrics.first_token_latency for output in outputs]
                if turn:  # the first round warms up
                    measured.setdefault((name, length), []).append((statistics.mean(waits), max(waits)))
    for (name, length), values in measured.items():
        means, lasts = zip(*values, strict=True)
        row = dict(case=case, role=name, length=length, ranks=tensor_parallel, experts=expert_parallel)
        row |= dict(mean_ms=round(statistics.median(means), 2), last_ms=round(statistics.median(lasts), 2))
        print_row(row | dict(rounds=[[round(mean, 2), round(last, 2)] for mean, last in values]))


def main() -> None:
    """Run the part that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("imports", "make", "serve", "time"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--case", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", choices=tuple(MODES), default="eager")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    given = parser.parse_args()
    if given.part == "imports":
        return imports()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part == "make":
        return make(given.folder, given.words)
    if given.tp == 1:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine of one rank runs in this process
    if given.part == "time":
        return first_tokens(given.folder, given.case, given.tp, given.ep)
    for case in given.case.split(","):
        serve(given.folder, case, given.dtype, given.mode, given.tp, given.ep)


if __name__ == "__main__":
    main()
