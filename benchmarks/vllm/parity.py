"""Compares what vLLM computes, for originals and for converted models, with what transformers computes.

    python -m benchmarks.vllm parity serve FOLDER PLAN... [--tp N] [--pp N] [--dp N]
    python -m benchmarks.vllm parity items FOLDER CASE... --items FOLDER --out FOLDER
    python -m benchmarks.vllm parity refused FOLDER CASE...

``serve`` compares log-probabilities of prompts and answers, ``items`` the requests of the eleven tasks, as
``items record`` has written them down, with the answers of transformers. ``refused`` checks
that vLLM refuses converted models without fcsd's plugin.

The models are those of ``benchmarks/vllm/cases.py``, and are made in FOLDER. A PLAN is ``CASE/DTYPE/MODE``, with
``/ep`` behind it for whole experts on each rank, with ``/marlin`` for vLLM's Marlin kernels in the place of its own
choice for quantised weights, and with settings of the plugin such as ``/beside+always``: a key of ``SETTINGS``, or
several. A plan with settings is about the converted model alone. DTYPE is ``float32``, ``bfloat16``, ``float16`` or
``fp8``, for which vLLM rounds bfloat16 weights itself (``--quantization fp8``). The reference is transformers in
float32 on the CPU, given the same tokens and, with a quantised checkpoint, the weights that it stands for; in other
dtypes, and where kernels round what a layer reads, the error of transformers that rounds so stands beside that of vLLM,
and with a checkpoint in fp8 by blocks the distance from the other wiring. With quantised sums the reference rounds
its sums, too.
``MODE`` is ``eager``, ``graph`` (whole CUDA graphs, not compiled, 200 tokens), ``default`` (compiled, with vLLM's own
choice of graphs) or ``pressure`` (so little memory that requests are preempted).

With ``--dp N`` a rank is a process with tokens of its own: ranks have different numbers of prompts, and the last one
stops after half of the tokens.

Every row says by which communicators vLLM's ranks could sum (``sums``). With ``NCCL_P2P_DISABLE=1`` on GPUs there may
be no other than NCCL's: a row that has one is an error.

``benchmarks/carried/vllm_gpu.sh`` runs it on GPUs, and ``benchmarks/vllm/cpu.sh`` with a build of vLLM for CPUs.
The exit status is 0 if every row is right.
"""

import gc
import gzip
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.vllm import engines, exchange
from benchmarks.vllm.cases import FP8, GATED, QUANTISED, made, prompts
from benchmarks.vllm.cpu_build import attend_linearly_in_float32, score_by_sigmoid
from benchmarks.vllm.engines import generate, sampling
from benchmarks.vllm.report import Row, report

ARGUMENTS = {
    "part": dict(choices=("serve", "items", "refused")),
    "folder": dict(type=Path, help="where the models are made"),
    "words": dict(nargs="+", help="plans, or cases"),
    "--tp": dict(type=int, default=1, help="tensor-parallel ranks"),
    "--pp": dict(type=int, default=1, help="pipeline stages"),
    "--dp": dict(type=int, default=1, help="data-parallel ranks"),
    "--items": dict(type=Path, help="where items-CASE.json.gz lies"),
    "--out": dict(type=Path, help="where the answers are written, under the same name"),
}

NEW, REPLAYS = 8, 200  # tokens of an answer, and where the same step is taken again and again
FLOAT32_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}  # nats; kernels on the GPU add up in another order than the CPU
RATIO = 1.5  # root mean square error over that of transformers in bfloat16, or with weights in fp8
# With quantised sums, the root mean square error over what rounding them moves: a value at the border of two codes may
# get the other one. Sums that are not rounded, or rounded otherwise, are a whole rounding or more away.
ROUNDED_SHARE = 0.25
# With a checkpoint in fp8 by blocks, vLLM also rounds what a projection reads, which the reference does not. So the
# error is compared with the distance from the other wiring.
FP8_SHARE = 0.25
ITEM_TOLERANCE = 1e-3  # nats, of the sum over a continuation
MODES: dict[str, dict[str, Any]] = {
    "eager": dict(enforce_eager=True),
    "graph": dict(compilation_config=dict(mode=0, cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2, 4, 8, 96])),
    "default": dict(compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8, 96])),
    # Three answers need 42 blocks of 16 tokens, so some of them are put off and computed again.
    "pressure": dict(enforce_eager=True, block_size=16, num_gpu_blocks_override=30, disable_log_stats=False),
}
LONG = ("graph", "pressure")  # modes with REPLAYS tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "beside": dict(shared_experts="beside"),
    "always": dict(overlap_from=0),  # steps without a graph let their sums travel, too
    "symmetric": dict(reduce="symmetric"),
    "int8": dict(reduce="quantised:int8"),
    "int4": dict(reduce="quantised:int4"),
    "none": dict(reduce="none"),  # the bound, which has to be wrong
}
# Tables: what sums in every row, and the fewest tokens of a decoding step whose sums travel. Three answers are a whole
# graph of 4 tokens, and their prompts one of 96 (``graph``) or a step without one.
TABLES = {"table": ("vllm", 4), "table-late": ("vllm", 8), "table-int8": ("quantised:int8", 4)}
# Methods of quantised checkpoints -> the dtype to which vLLM rounds what a layer reads. Its Marlin kernels do not.
ROUNDED_INPUTS = {"int8": "int8", "float8_dynamic": "float8_e4m3fn"}
MARLIN = dict(VLLM_DISABLED_KERNELS="MacheteLinearKernel,AllSparkLinearKernel", VLLM_TEST_FORCE_FP8_MARLIN="1")
Answer = tuple[list[int], list[int], list[float]]  # a prompt, its answer, and the log-probabilities of both


def engine(path: Path, dtype: str, **options: Any) -> Any:
    """vLLM's engine for a small model, which shares the GPU with others."""
    import torch

    engines.inspect_here()
    options.setdefault("kv_cache_memory_bytes", 1 << 28)
    if dtype == "fp8":
        dtype, options["quantization"] = "bfloat16", "fp8"
    if torch.cuda.is_available():
        if dtype == "float32":
            options["attention_config"] = dict(backend="TRITON_ATTN")  # FlashAttention has no float32
    else:
        score_by_sigmoid()
        options.setdefault("block_size", 128)  # with windows on two ranks the build chooses one that its kernel refuses
        if "vision_config" in json.loads((path / "config.json").read_text()):
            options["limit_mm_per_prompt"] = dict(image=0, video=0)  # the processors of images need torchvision
        if "linear_key_head_dim" in (path / "config.json").read_text():
            options["mamba_ssm_cache_dtype"] = "float32"
            attend_linearly_in_float32()
        if {"kv_lora_rank", "conv_L_cache"} & keys_of(json.loads((path / "config.json").read_text())):
            # With the CPU kernels of its norms and rotary embeddings, the original is wrong as well.
            options["compilation_config"] = dict(custom_ops=["none"])
    return engines.llm(path, dtype=dtype, gpu_memory_utilization=0.1, **options)


def keys_of(config: dict[str, Any]) -> set[str]:
    """The fields of a config and of that of its language model."""
    return config.keys() | config.get("text_config", {}).keys()


def release() -> None:
    """End the engine that was deleted before this call, and free its memory."""
    gc.collect()
    # An engine in processes of its own has ended with them. This process must not touch a GPU then: it forks the next.
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

        cleanup_dist_env_and_memory()


def communicators(worker: Any) -> list[str]:
    """By what the tensor-parallel group of one of vLLM's workers can sum, in the order of its questions.

    They are its communicators that are not disabled, by the names of vLLM's attributes, and then torch's backend.
    """
    import torch
    from vllm.distributed import get_tp_group  # pyright: ignore[reportMissingImports]

    group = get_tp_group()
    held = [(name, own) for name, own in vars(group.device_communicator).items() if name.endswith("_comm")]
    found = [name for name, own in held if own is not None and not getattr(own, "disabled", False)]
    return [*found, torch.distributed.get_backend(group.device_group)]


def kernels(worker: Any) -> list[str]:
    """The classes that compute the quantised layers of one of vLLM's workers."""
    found = set()
    for module in worker.get_model().modules():
        for holder in (getattr(module, "quant_method", None), getattr(module, "scheme", None)):
            for held in () if holder is None else vars(holder).values():
                found.add((held if isinstance(held, type) else type(held)).__name__)
    return sorted(name for name in found - {"FusedMoEKernel"} if name.endswith(("Kernel", "Experts")))


def facts(llm: Any) -> Row:
    """What vLLM has chosen by itself.

    Raises:
        RuntimeError: peer access is off, and vLLM could sum by something else than NCCL.
    """
    import torch

    config = llm.llm_engine.vllm_config
    found: Row = dict(
        runner="v2" if config.use_v2_model_runner else "v1",
        backend=str(config.attention_config.backend),
        graphs=str(config.compilation_config.cudagraph_mode),
    )
    if config.parallel_config.tensor_parallel_size > 1:
        found["sums"] = sorted({" ".join(names) for names in llm.collective_rpc(communicators)})
        if config.compilation_config.pass_config.fuse_allreduce_rms:  # by a communicator of its own
            found["sums"].append("fused with norms")
        by_nccl = set(" ".join(found["sums"]).split()) <= {"pynccl_comm", "nccl"}
        if torch.cuda.is_available() and os.environ.get("NCCL_P2P_DISABLE") == "1" and not by_nccl:
            raise RuntimeError(f"NCCL_P2P_DISABLE=1 asks for NCCL's sums, and vLLM sums by {found['sums']}")
    return found


def compare(folder: Path, plan: Row) -> Row:
    """Ask vLLM for log-probabilities of prompts and of greedy answers, and transformers for those of the same tokens.

    Args:
        folder: where the models are made.
        plan: ``case``, a name in ``vllm_cases``; ``role``, ``original`` or ``converted``; ``dtype``; ``mode``, a key of
            ``MODES``; ``ranks``, the tensor-parallel degree; ``stages`` of the pipeline; ``replicas``, the
            data-parallel degree; ``experts``, whether a rank has whole experts; ``settings``, keys of ``SETTINGS``;
            ``kernels``, ``marlin`` or an empty text for vLLM's choice.

    Returns:
        ``largest`` and ``rms``, the errors of vLLM; ``answers``, the largest error in the answers alone; ``greedy``,
        how many answers are the most likely tokens for transformers; ``other`` and ``other_rms``, how far the other
        wiring is; in other dtypes than float32 ``rms_transformers``, the error of transformers; with quantised sums
        ``rms_rounding``, how far the reference that rounds them is from the one that does not; ``tolerance``;
        ``right``; with quantised weights ``computed_by``, the classes of vLLM's kernels.

    Raises:
        RuntimeError: vLLM has taken other kernels than those that the plan asks for.
    """
    paths = made(folder, plan["case"])
    asked = prompts(paths["original"], plan["case"])
    section = section_of(folder, plan["settings"], plan["ranks"])
    given = paths[plan["role"]], asked, plan, section
    ranks = plan["replicas"]
    answers, chosen = exchange.together(answered, *given, ranks=ranks) if ranks > 1 else answered(*given)
    return judged(paths, plan, answers, section.get("reduce", "")) | chosen


def section_of(folder: Path, settings: str, ranks: int) -> dict[str, Any]:
    """What the plugin is told. Tables of sums are written to ``folder``."""
    found: dict[str, Any] = {}
    for name in filter(None, settings.split("+")):
        if name not in TABLES:
            found |= SETTINGS[name]
            continue
        backend, least = TABLES[name]
        rows = [dict(reduce=backend, travels=travels) for travels in (False, True)]
        steps = dict(decode=(1, least), prefill=(1, 64))
        tables = {step: [{"from": n, **row} for n, row in zip(at, rows, strict=True)] for step, at in steps.items()}
        file = folder / f"{name}-{ranks}-{os.getpid()}.json"
        file.write_text(json.dumps(dict(version=1, user="plugin", tp=ranks, **tables)))
        found["reduce"] = str(file)
    return found


def answered(
    path: Path, asked: list[list[int]], plan: Row, section: dict[str, Any], share: float = 1
) -> tuple[list[Answer], Row]:
    """What vLLM answers, and what it has chosen; ``share`` is the part of the usual number of tokens that is wanted."""
    mode = plan["mode"]
    parallel = dict(tensor_parallel_size=plan["ranks"], pipeline_parallel_size=plan["stages"])
    options = dict(max_model_len=256, max_num_seqs=8, enable_expert_parallel=plan["experts"])
    if section:
        options["additional_config"] = {"fcsd": section}
    if plan["replicas"] > 1:
        # Every step of an engine is then one step of all ranks, which wait for each other in it.
        options |= dict(distributed_executor_backend="uni", async_scheduling=False)
    if plan["kernels"] == "marlin":
        os.environ.update(MARLIN)  # of this process and the engine's alone, see ``engines.in_a_fork``
    llm = engine(path, plan["dtype"], **parallel, **options, **MODES[mode])
    how = sampling(int(share * (REPLAYS if mode in LONG else NEW)), prompt_logprobs=1, logprobs=1)
    outputs = generate(llm, asked, how)
    chosen = facts(llm)
    if plan["case"] in QUANTISED:
        chosen["computed_by"] = sorted({name for names in llm.collective_rpc(kernels) for name in names})
        by_marlin = any("Marlin" in name and name.endswith("Kernel") for name in chosen["computed_by"])
        if plan["kernels"] == "marlin" and not by_marlin:
            raise RuntimeError(f"asked for Marlin kernels, and vLLM computes by {chosen['computed_by']}")
    if mode == "pressure":
        chosen["preemptions"] = sum(m.value for m in llm.get_metrics() if m.name.startswith("vllm:num_preemptions"))
    del llm
    release()
    found = []
    for ids, output in zip(asked, outputs, strict=True):
        said = list(output.outputs[0].token_ids)
        per_token = zip([*output.prompt_logprobs[1:], *output.outputs[0].logprobs], [*ids[1:], *said], strict=True)
        found.append((ids, said, [entry[token].logprob for entry, token in per_token]))
    return found, chosen


def judged(paths: dict[str, Path], plan: Row, given: list[Answer], reduce: str) -> Row:
    """Compare answers with transformers; see ``compare``. ``reduce`` is what the plugin was told to sum by."""
    import torch
    from benchmarks.vllm.rounded import round_inputs, round_sums, round_to_fp8, round_zero_points

    case, role, dtype = plan["case"], plan["role"], plan["dtype"]
    references = {name: reference(path) for name, path in paths.items()}
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype)
    rounded = reference(paths[role]) if half and case not in FP8 else None
    if rounded is not None and QUANTISED.get(case) == "awq" and plan["kernels"] != "marlin":
        round_zero_points(rounded, paths["original"], half)
    rounded = rounded if rounded is None else rounded.to(half)
    if (to := ROUNDED_INPUTS.get(QUANTISED.get(case, ""))) and plan["kernels"] != "marlin":
        round_inputs(rounded, getattr(torch, to))
    if dtype == "fp8":
        rounded = reference(paths[role])
        round_to_fp8(rounded)
    if format := format_of(reduce):
        if dtype != "float32":
            raise ValueError("quantised sums are compared in float32")
        rounded = references[role]
        references[role] = reference(paths[role])
        round_sums(references[role], format, plan["ranks"], plan["experts"])
    found, expected, other, own = [], [], [], []
    answers, greedy = 0.0, 0
    for ids, said, values in given:
        values = torch.tensor(values).double()
        right, likely = logprobs(references[role], ids + said)
        answers = max(answers, (values - right)[-len(said) :].abs().max().item())
        greedy += bool(likely[-len(said) :].all())
        found.append(values)
        expected.append(right)
        other.append(logprobs(references["converted" if role == "original" else "original"], ids + said)[0])
        if rounded is not None:
            own.append(logprobs(rounded, ids + said)[0])
    error, apart = torch.cat(found) - torch.cat(expected), torch.cat(found) - torch.cat(other)
    result: Row = dict(
        largest=error.abs().max().item(), rms=error.square().mean().sqrt().item(), answers=answers, greedy=greedy,
        other=apart.abs().max().item(), other_rms=apart.square().mean().sqrt().item(), tokens=len(error),
    )  # fmt: skip
    if case in FP8:
        tolerance = FP8_SHARE * result["other_rms"]
        return result | dict(tolerance=tolerance, right=result["rms"] <= tolerance)
    if rounded is not None:
        rms = (torch.cat(own) - torch.cat(expected)).square().mean().sqrt().item()
        name, factor = ("rms_rounding", ROUNDED_SHARE) if format else ("rms_transformers", RATIO)
        near = result["rms"] <= factor * rms and result["rms"] < result["other_rms"]
        return result | {name: rms, "tolerance": factor * rms, "right": near}
    tolerance = FLOAT32_TOLERANCE["cuda" if torch.cuda.is_available() else "cpu"]
    if "linear_key_head_dim" in (paths["original"] / "config.json").read_text():
        tolerance *= 2  # transformers computes the gated delta rule in chunks, which rounds more
    near = result["largest"] <= tolerance
    return result | dict(tolerance=tolerance, right=not near if reduce == "none" else near)


def format_of(reduce: str) -> Any:
    """The format of quantised sums, which a table names in each of its rows; None if they are sent as they are."""
    from fcsd.kernels.bit_split.format import format_of_reduction
    from fcsd.parallel.all_reduce.ways import is_table, read_ways

    return format_of_reduction(read_ways(reduce).decode[0][1].reduce if is_table(reduce) else reduce)


def reference(path: Path) -> Any:
    """The model in transformers, float32, on the CPU."""
    import torch
    import transformers

    from fcsd.models.archs import ARCHS
    from fcsd.models.build import load_model

    config = json.loads((path / "config.json").read_text())
    options: dict[str, Any] = dict(dtype=torch.float32)
    if "fcsd" in config or config.get("quantization_config", {}).get("quant_method", "fp8") != "fp8":
        return load_model(path, decode=True, **options).eval().float()
    if "quantization_config" in config:
        options["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    # vLLM puts classes of its own in the place of some of transformers' configs.
    options["config"] = getattr(transformers, ARCHS[config["model_type"]].config).from_pretrained(path)
    model_class = getattr(transformers, ARCHS[config["model_type"]].causal_lm)
    return model_class.from_pretrained(path, **options).eval().float()


def logprobs(model: Any, tokens: list[int]) -> tuple[Any, Any]:
    """For each token but the first, ``[tokens - 1]``: its log-probability, and whether it is the likeliest."""
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].double()
    following = ids[0, 1:]
    return torch.log_softmax(logits, -1).gather(-1, following[:, None])[:, 0], logits.argmax(-1) == following


def answer_items(path: Path, file: Path, target: Path) -> list[Row]:
    """Let vLLM answer the recorded requests in float32, and write its answers in the same order.

    Returns two rows. The first has ``largest``, the largest difference of a continuation's log-likelihood from that
    of transformers, and ``greedy``, how many continuations are the most likely tokens for one of the two only. The
    second has ``texts``, how many of the generated answers differ.
    """
    from transformers import AutoTokenizer

    with gzip.open(file, "rt") as source:
        requests = json.load(source)["requests"]
    scored = [request for request in requests if "continuation" in request]
    generated = [request for request in requests if "prompt" in request]
    row: Row = dict(items=path.name)
    shared: dict[str, Any] = {}

    def score() -> Row:
        options = dict(max_model_len=2048, max_num_seqs=256, max_num_batched_tokens=8192, kv_cache_memory_bytes=1 << 31)
        shared["llm"] = engine(path, "float32", enforce_eager=True, **options)
        answers = shared["scores"] = _score(shared["llm"], scored)
        pairs = list(zip(scored, answers, strict=True))
        largest = max(abs(before["logprob"] - after["logprob"]) for before, after in pairs)
        greedy = sum(before["greedy"] != after["greedy"] for before, after in pairs)
        right = largest <= ITEM_TOLERANCE and not greedy
        return dict(largest=largest, greedy=greedy, requests=len(scored), tolerance=ITEM_TOLERANCE, right=right)

    def write() -> Row:
        answers = _generate(shared.pop("llm"), generated, AutoTokenizer.from_pretrained(path))
        texts = sum(before["text"] != after["text"] for before, after in zip(generated, answers, strict=True))
        order = iter(shared["scores"]), iter(answers)
        with gzip.open(target, "wt") as out:
            json.dump([next(order["prompt" in request]) for request in requests], out)
        return dict(texts=texts, requests=len(generated), right=not texts)

    rows = [report(row | dict(what="log-likelihoods"), score)]
    if "error" not in rows[0]:
        rows.append(report(row | dict(what="texts"), write))
    shared.clear()
    release()
    return rows


def _score(llm: Any, requests: list[Row]) -> list[Row]:
    asked, found = [request["context"] + request["continuation"] for request in requests], []
    for request, output in zip(requests, generate(llm, asked, sampling(1, prompt_logprobs=1)), strict=True):
        ids = request["continuation"]
        entries = [step[token] for step, token in zip(output.prompt_logprobs[-len(ids) :], ids, strict=True)]
        found.append(dict(logprob=sum(e.logprob for e in entries), greedy=all(e.rank == 1 for e in entries)))
    return found


def _generate(llm: Any, requests: list[Row], tokenizer: Any) -> list[Row]:
    from fcsd.engine.generate import Ending

    how = [sampling(one["new"], stop_token_ids=one["ends"], ignore_eos=False) for one in requests]
    found = []
    for request, output in zip(requests, generate(llm, [one["prompt"] for one in requests], how), strict=True):
        end = Ending(tokenizer, frozenset(request["ends"]), tuple(filter(None, request["stops"])), 0)
        found.append(dict(text=end.text(list(output.outputs[0].token_ids))))
    return found


def refused(path: Path, trust: bool) -> Row:
    """Check that vLLM without fcsd's plugin (``VLLM_PLUGINS=``) does not serve a converted model."""
    try:
        engines.llm(path, trust_remote_code=trust, enforce_eager=True, dtype="float32", max_model_len=128)
    except Exception as error:
        return dict(right=True, refusal=" ".join(str(error).split())[:300])
    return dict(right=False)


def main(given: Any) -> bool:
    """Run the part that the arguments name; whether a row is wrong."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # ``communicators`` is sent to vLLM's workers
    rows = []
    for word in given.words:
        case, *rest = word.split("/")
        if given.part == "serve":
            dtype, mode, *further = rest
            settings = "".join(name for name in further if name not in ("ep", "marlin"))
            # The converted first, in case that the time ends.
            for role in ("converted",) if case in GATED or settings else ("converted", "original"):
                row = dict(case=case, role=role, dtype=dtype, mode=mode, ranks=given.tp, stages=given.pp)
                row |= dict(replicas=given.dp, experts="ep" in further, settings=settings)
                row["kernels"] = "marlin" if "marlin" in further else ""
                rows.append(report(row, engines.in_a_fork, compare, given.folder, row))
        elif given.part == "items":
            role = "original" if case.endswith(".base") else "converted"
            name = f"items-{case}.json.gz"
            path = made(given.folder, case.removesuffix(".base"))[role]
            rows += answer_items(path, given.items / name, given.out / name)
        else:
            for trust in (False, True):
                path = made(given.folder, case)["converted"]
                rows.append(report(dict(refused=case, trust_remote_code=trust), refused, path, trust))
    return not all(row["right"] for row in rows)
