"""Serves originals and converted models by vLLM on GPUs, and compares the answers with those of transformers.

    python scripts/vllm_gpu.py imports                      what a call on this machine would miss, all at once
    python scripts/vllm_gpu.py make FOLDER [CASE...]        small random models and the bundled teacher, converted
    python scripts/vllm_gpu.py serve FOLDER --case CASE[,CASE...] --dtype TYPE --mode MODE [--tp N] [--ep]
    python scripts/vllm_gpu.py items FOLDER --case CASE --items FOLDER --out FOLDER

``serve`` compares log-probabilities of prompts and of greedy answers with transformers (float32, on the CPU, given the
same tokens): one row for the original, one for the converted model. In bfloat16 transformers' own error in bfloat16
stands beside it. ``MODE`` is ``eager``, ``graph`` (whole CUDA graphs, not compiled, 200 tokens), ``default`` (compiled,
with vLLM's own choice of graphs) or ``pressure`` (so little memory that requests are preempted). ``items`` asks what
``scripts/vllm_items.py record`` has written down: the requests of the eleven tasks, with the answers of transformers.
``scripts/vllm_gpu.sh`` runs all of it, and ``scripts/vllm_report.py`` reads the lines that begin with START, ROW and
MISSING.
"""

import argparse
import gzip
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]  # fcsd, its small models, other scripts

from vllm_engine import Row, engine, facts, release, report  # noqa: E402

NEW, REPLAYS = 8, 200  # tokens of an answer, and where the same step is taken again and again
FLOAT32_TOLERANCE = 1e-4  # nats; kernels on the GPU add up in another order than the CPU
BFLOAT16_RATIO = 1.5  # root mean square error over that of transformers in bfloat16
ITEM_TOLERANCE = 1e-3  # nats, of the sum over a continuation
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
    # Three answers need 42 blocks of 16 tokens, so some of them are put off and computed again.
    "pressure": dict(enforce_eager=True, block_size=16, num_gpu_blocks_override=30, disable_log_stats=False),
}
LONG = ("graph", "pressure")  # modes with REPLAYS tokens


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
    else:
        vllm_parity.make(folder, [case])


def compare(folder: Path, case: str, role: str, dtype: str, mode: str, ranks: int, experts: bool) -> Row:
    """Ask vLLM for log-probabilities of prompts and of greedy answers, and transformers for those of the same tokens.

    Returns:
        ``largest`` and ``rms``, the errors of vLLM; ``answers``, the largest error in the answers alone; ``other``, how
        far the other wiring is; in bfloat16 ``rms_transformers``, the error of transformers; ``right``.
    """
    import torch
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    prompts = _prompts(folder, case)
    path = folder / (f"{case}.base" if role == "original" else case)
    llm = engine(path, dtype, ranks, experts, max_model_len=256, max_num_seqs=8, **MODES[mode])
    new = REPLAYS if mode in LONG else NEW
    sampling = SamplingParams(
        max_tokens=new, temperature=0, detokenize=False, prompt_logprobs=1, logprobs=1, ignore_eos=True
    )
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    chosen = facts(llm.llm_engine.vllm_config)
    if mode == "pressure":
        chosen["preemptions"] = sum(m.value for m in llm.get_metrics() if m.name.startswith("vllm:num_preemptions"))
    del llm
    release()

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
        answers = max(answers, (values - right)[-new:].abs().max().item())
        found.append(values)
        expected.append(right)
        other.append(_logprobs(references["converted" if role == "original" else "original"], ids + answer))
        if rounded is not None:
            own.append(_logprobs(rounded, ids + answer))
    error = torch.cat(found) - torch.cat(expected)
    result: Row = dict(
        largest=error.abs().max().item(), rms=error.square().mean().sqrt().item(), answers=answers,
        other=(torch.cat(found) - torch.cat(other)).abs().max().item(), tokens=len(error), **chosen,
    )  # fmt: skip
    if not own:
        right = result["largest"] <= FLOAT32_TOLERANCE and result.get("preemptions") != 0
        return result | dict(tolerance=FLOAT32_TOLERANCE, right=right)
    rms = (torch.cat(own) - torch.cat(expected)).square().mean().sqrt().item()
    return result | dict(rms_transformers=rms, tolerance=BFLOAT16_RATIO * rms, right=result["rms"] <= 1.5 * rms)


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


def items(path: Path, file: Path, target: Path) -> Row:
    """Let vLLM answer the recorded requests in float32, and write its answers in the same order.

    Returns:
        ``largest``, the largest difference of a continuation's log-likelihood from that of transformers; ``greedy``,
        how many continuations are the most likely tokens for one of the two only; ``texts``, how many of the generated
        answers differ; ``right`` if none does and ``largest`` is within the tolerance.
    """
    from transformers import AutoTokenizer

    with gzip.open(file, "rt") as source:
        requests = json.load(source)["requests"]
    scored = [request for request in requests if "continuation" in request]
    generated = [request for request in requests if "prompt" in request]
    options = dict(max_model_len=2048, max_num_seqs=256, kv_cache_memory_bytes=1 << 31)
    llm = engine(path, "float32", 1, False, enforce_eager=True, **options)
    answers = _score(llm, scored), _generate(llm, generated, AutoTokenizer.from_pretrained(path))
    del llm
    release()
    order = iter(answers[0]), iter(answers[1])
    with gzip.open(target, "wt") as out:
        json.dump([next(order["prompt" in request]) for request in requests], out)
    pairs = list(zip(scored, answers[0], strict=True))
    result: Row = dict(
        largest=max(abs(before["logprob"] - after["logprob"]) for before, after in pairs),
        greedy=sum(before["greedy"] != after["greedy"] for before, after in pairs),
        texts=sum(before["text"] != after["text"] for before, after in zip(generated, answers[1], strict=True)),
        requests=len(requests), tolerance=ITEM_TOLERANCE,
    )  # fmt: skip
    right = result["largest"] <= ITEM_TOLERANCE and not result["greedy"] and not result["texts"]
    return result | dict(right=right)


def _score(llm: Any, requests: list[Row]) -> list[Row]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False, prompt_logprobs=1)
    prompts = [{"prompt_token_ids": request["context"] + request["continuation"]} for request in requests]
    found = []
    for request, output in zip(requests, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        ids = request["continuation"]
        entries = [step[token] for step, token in zip(output.prompt_logprobs[-len(ids) :], ids, strict=True)]
        found.append(dict(logprob=sum(e.logprob for e in entries), greedy=all(e.rank == 1 for e in entries)))
    return found


def _generate(llm: Any, requests: list[Row], tokenizer: Any) -> list[Row]:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]

    from fcsd.serve.answer_end import Ending

    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    sampling = [
        SamplingParams(max_tokens=request["new"], temperature=0, detokenize=False, stop_token_ids=request["ends"])
        for request in requests
    ]
    found = []
    for request, output in zip(requests, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        end = Ending(tokenizer, frozenset(request["ends"]), tuple(filter(None, request["stops"])), 0)
        found.append(dict(text=end.text(list(output.outputs[0].token_ids))))
    return found


def main() -> None:
    """Run the part that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("imports", "make", "serve", "items"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--case", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mode", choices=tuple(MODES), default="eager")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--items", type=Path, help="where items-CASE.json.gz lies")
    parser.add_argument("--out", type=Path, help="where the answers are written, under the same name")
    given = parser.parse_args()
    if given.part == "imports":
        return imports()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.part == "make":
        return make(given.folder, given.words)
    if given.tp == 1 and MODES[given.mode].get("enforce_eager"):
        # The engine of one rank runs in this process. With graphs it must not: torch failed to capture the graphs of a
        # second engine in the memory pool of one that had ended.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    for case in given.case.split(","):
        if given.part == "items":
            name = f"items-{case}.json.gz"
            report(dict(items=case), items, given.folder / case, given.items / name, given.out / name)
            continue
        for role in ("original", "converted"):
            row = dict(case=case, role=role, dtype=given.dtype, mode=given.mode, ranks=given.tp, experts=given.ep)
            report(row, compare, given.folder, case, role, given.dtype, given.mode, given.tp, given.ep)


if __name__ == "__main__":
    main()
