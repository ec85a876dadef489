"""Times stock vLLM and a wiring by NCCL and through memory of the host, and stock with NVLink, taking turns on GPUs.

    python -m benchmarks.vllm turns OUT.json SHAPE[:LAYERS[:WEIGHTS]] ... [--tp 2] [--seconds 150]
        [--engines NAME ...]

WEIGHTS is a format in which linear layers are stored, by default bfloat16: w4a16, fp8, or gpt-oss's own mxfp4. The
wiring is ladder, and for a model with experts farskip, whose experts are whole on one GPU. ``--engines`` takes other
names, of those in ``engines``, the same for all shapes; *stages* are pipeline stages of one GPU each, and *pairs* those
of two. All run at the same time, and wait for their turn. Those that wait keep cores busy: twelve engines of two GPUs
left 32 cores too few to time a step, and eight did not. Weights are random. A step is what one more token takes, over
64 tokens of 1, 16 and 64 answers in CUDA graphs; first tokens are those of one prompt of 512 tokens, which graphs
cover, and of 16 prompts of 512 and 2048. ``fcsd bench serve`` does this with servers and more variants, in minutes.
What was measured is in OUT.json after every turn, and what engines say is beside it.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.out_file import out_file
from benchmarks.vllm.engines import (
    Failed,
    Fork,
    ask,
    forks,
    generate,
    llm,
    measure_host_sums,
    replies,
    sampling,
    version,
)

from fcsd.bench.runner import write
from fcsd.errors import unknown_value

USUAL = ("stock", "stock, host sums", "wired", "wired, host sums", "stock with NVLink")
ARGUMENTS = {
    "out": out_file,
    "shapes": dict(nargs="+", metavar="SHAPE", help="SHAPE[:LAYERS[:WEIGHTS]]"),
    "--seconds": 150.0,
    "--tp": dict(type=int, default=2, help="GPUs, between which every engine divides its model"),
    "--engines": dict(nargs="+", metavar="NAME", default=USUAL),
}
_APART = {"NCCL_P2P_DISABLE": "1"}  # as GPUs without peer access


class Engine(NamedTuple):
    """The name of a wiring, environment variables, and further options of ``LLM``."""

    wiring: str
    environment: Mapping[str, str] = {}
    options: Mapping[str, Any] = {}


def _compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "format": form, "weights": weights, "input_activations": inputs}
    kept = ["lm_head", r"re:.*mlp\.(gate|router)$"]
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, "ignore": kept}


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
WEIGHTS: dict[str, dict[str, Any]] = {  # name -> ``quantization_config``, as published models have it
    "w4a16": _compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    ),
    "fp8": _compressed(
        "float-quantized", _FLOAT8 | {"strategy": "channel"}, _FLOAT8 | {"strategy": "token", "dynamic": True}
    ),
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}
STEPS, FIRST = (1, 16, 64), ((1, 512), (16, 512), (16, 2048))  # answers; prompts and tokens of each
BEGIN, END = 8, 72  # tokens of an answer; a step is taken between them


def engines(wiring: str, gpus: int) -> dict[str, Engine]:
    """What can be timed, by its name. ``bound`` leaves all sums of the wiring out, and its answers are wrong."""
    from fcsd.bench.serve.variants import HOST_SUMS

    found = {}
    for name, own in (("stock", "standard"), ("wired", wiring)):
        found[name] = Engine(own, _APART)
        found |= {f"{name}, {sums}": Engine(own, _APART | asked) for sums, asked in HOST_SUMS.items()}
        found[f"{name} with NVLink"] = Engine(own)
    for name, degree in (("stages", 1), ("pairs", 2)):
        stages = {"tensor_parallel_size": degree, "pipeline_parallel_size": gpus // degree}
        stages["max_num_batched_tokens"] = 2048  # so that 16 prompts of 512 tokens fill four stages
        found[f"stock, {name}"] = Engine("standard", _APART, stages)
        if degree > 1:
            found |= {
                f"stock, {name}, {sums}": Engine("standard", _APART | asked, stages)
                for sums, asked in HOST_SUMS.items()
            }
    return found | {"bound": Engine(wiring, _APART, {"additional_config": {"fcsd": {"reduce": "none"}}})}


def fill_integers() -> None:
    """Let vLLM's random weights be random where they are stored as integers, which it leaves as the memory was.

    Bytes stay below 128: as scales of mxfp4 they are at most 1, and above they could overflow.
    """
    from vllm.model_executor.model_loader import weight_utils  # pyright: ignore[reportMissingImports]

    ordinary = weight_utils.initialize_single_dummy_weight

    def initialise(param: torch.Tensor, *limits: float) -> None:
        if param.dtype in (torch.int32, torch.uint8) and param.dim() > 1 and param.device.type != "meta":
            generator = torch.Generator(param.device).manual_seed(1234)
            param.data.view(torch.uint8).random_(0, 128, generator=generator)
        else:
            ordinary(param, *limits)

    weight_utils.initialize_single_dummy_weight = initialise


def serve(path: Path, engine: Engine, gpus: int, experts: bool) -> Iterator[Any]:
    """One engine: answers each request for (prompts, tokens of each, new tokens) by its seconds and its tokens."""
    own = llm(
        path, load_format="dummy", dtype="bfloat16", max_model_len=2304, max_num_seqs=64,
        gpu_memory_utilization=0.1, seed=0, kv_cache_memory_bytes=(6 << 30) // gpus,
        compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64, 256, 512]),
        enable_expert_parallel=experts,
        **{"tensor_parallel_size": gpus, "max_num_batched_tokens": 8192, **engine.options},
    )  # fmt: skip
    told = None
    while True:
        count, tokens, new = yield told
        prompts = [[(7 * n + 31 * i) % 5000 for n in range(tokens)] for i in range(count)]
        began = time.perf_counter()
        outputs = generate(own, prompts, sampling(new))
        told = time.perf_counter() - began, [list(output.outputs[0].token_ids) for output in outputs]


def answer(fork: Fork, *request: int) -> tuple[float, list[list[int]]]:
    """What an engine answers to one request.

    Raises:
        Failed: it has ended; its log says why.
    """
    ask({"": fork}, request)
    ((_, told),) = replies({"": fork})
    if isinstance(told, Failed):
        raise told
    return told


def measured(fork: Fork) -> dict[str, float]:
    """One turn of an engine, in milliseconds."""

    def asked(*request: int) -> float:
        return 1e3 * answer(fork, *request)[0]

    found = {f"step of {n}": (asked(n, 64, END) - asked(n, 64, BEGIN)) / (END - BEGIN) for n in STEPS}
    return found | {f"first tokens of {n} x {tokens}": asked(n, tokens, 1) for n, tokens in FIRST}


def main(given: Any) -> None:
    """See the head of this file."""
    from fcsd.bench.serve.model import config_of, usual_wirings, wiring_for
    from fcsd.bench.serve.running import write_directory
    from fcsd.bench.serve.workload import Workload
    from fcsd.models.build import experts_of
    from fcsd.serve.vllm.communicator import ASKED

    until, out = time.monotonic() + given.seconds, given.out
    for name in given.engines:
        if name not in engines("", 2):
            raise unknown_value("engine", name, engines("", 2))
    found: dict[str, Any] = {"command": given.command, "vllm": version(), "milliseconds": {}, "logs": {}}
    fill_integers()
    own = [engines("", given.tp)[name] for name in given.engines]
    ranks = {engine.options.get("tensor_parallel_size", given.tp) for engine in own if ASKED in engine.environment}
    measure_host_sums(_APART, ranks)
    with tempfile.TemporaryDirectory() as scratch, forks() as fork:
        started: dict[str, Fork] = {}
        for shape in given.shapes:
            model, layers, weights, *_ = (*shape.split(":"), "", "")
            if weights and weights not in WEIGHTS:
                raise unknown_value("format of weights", weights, WEIGHTS)
            config = config_of(model, int(layers) if layers else None)
            own = usual_wirings(Workload(model), config)[0]
            for what in given.engines:
                engine = engines(own, given.tp)[what]
                wiring = wiring_for(engine.wiring, config, given.tp)
                path = write_directory(model, config, wiring, Path(scratch, str(len(started))), 2304)
                if weights:
                    fields = json.loads((path / "config.json").read_text()) | {"quantization_config": WEIGHTS[weights]}
                    (path / "config.json").write_text(json.dumps(fields))
                name = what.replace("wired", own)
                name = f"{shape}, {name}" if len(given.shapes) > 1 else name
                log = out.with_name(f"{name.replace(', ', '-').replace(' ', '-').replace(':', '-')}.log")
                words = path, engine, given.tp, experts_of(config) > 0
                started[name] = fork(serve, *words, log=log, environment=engine.environment)
        told = dict(replies(started, until - 45))
        found["failed"] = {name: str(why) for name, why in told.items() if isinstance(why, Failed)}
        running = {name: fork for name, fork in started.items() if name not in found["failed"]}
        answers, again = _answered(running), _answered(running)
        running = {name: fork for name, fork in running.items() if name in again}
        found["started"], turn, took = list(running), 0, 0.0
        # Requests that arrive while an engine is at work are divided into steps as it happens, which moves last bits.
        found["answers like the first time"] = {name: _equal(answers[name], again[name]) for name in running}
        found["answers like stock"] = {
            name: _equal(answers[name], answers.get(_stock_of(name), [])) for name in running
        }
        while running and time.monotonic() + took < until:
            order, begun = list(running), time.monotonic()
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                try:
                    times = measured(running[name])
                except Failed:
                    del running[name]
                    continue
                for what, time_ in times.items() if turn else ():  # the first round warms up
                    found["milliseconds"].setdefault(name, {}).setdefault(what, []).append(round(time_, 4))
            turn, took = turn + 1, time.monotonic() - begun
            write(found, out)
    for name, rows in found["milliseconds"].items():
        print(name, {what: round(statistics.median(times), 3) for what, times in rows.items()}, flush=True)
    print(found["started"], found["answers like stock"], flush=True)
    for name, why in found["failed"].items():
        print(f"{name} failed: {why}", flush=True)


def _answered(forks_: Mapping[str, Fork]) -> dict[str, list[list[int]]]:
    """What each engine answers to 16 prompts; nothing of those that have ended."""
    ask(forks_, (16, 40, END))
    return {name: told[1] for name, told in replies(forks_) if not isinstance(told, Failed)}


def _equal(answers: list[list[int]], others: list[list[int]]) -> int:
    """How many answers are equal."""
    return sum(a == b for a, b in zip(answers, others, strict=False))


def _stock_of(name: str) -> str:
    """The name of the stock engine of the same shape."""
    shape, found, _ = name.partition(", ")
    return f"{shape}, stock" if found and ":" in shape else "stock"
