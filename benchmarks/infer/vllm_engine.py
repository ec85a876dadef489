"""Times prefill and decoding of a workload in vLLM, with rows as those of fcsd's own engine.

The standard wiring is vLLM's own model of the architecture. Every other wiring is that model with fcsd's plugin, once
for each all-reduce backend. A variant is an engine in a process of its own. Two engines rarely fit into the memory of
the same GPUs, so the engines run one after the other: the variants do not take turns, and changes of the clocks between
two engines are not seen in ``drift``, which compares the rounds of one engine.

The figures are those of a client of vLLM's ``AsyncLLM``, so they include vLLM's scheduler and the transport between its
processes. Prefix caching is off. A batch arrives at once; vLLM's scheduler may prefill it in several steps.

- ``prefill_ms`` is the time until every prompt has its first token.
- ``decode_ms`` is the time from then to the last token of all, per step. If the prefill took several steps, some
  prompts are decoded further than others, and the last steps of a round have a smaller batch.

A shape has vLLM's dummy weights. Their values differ from those of fcsd's engine, so routers choose other experts. The
weights of a checkpoint are the same in both engines.
"""

import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.infer.table import draw, table
from benchmarks.infer.vllm_process import Answer, Engine, started
from benchmarks.infer.workload import Workload, compare, row
from transformers import PretrainedConfig

from fcsd.bench.runner import write
from fcsd.bench.serve.model_files import write_directory
from fcsd.bench.serve.own import Times
from fcsd.bench.serve.workload import config_of, wiring_for
from fcsd.bench.shapes import SHAPES
from fcsd.launch.environment import snapshot
from fcsd.models.build import experts_of
from fcsd.models.wiring_block import DESYNC, Wiring
from fcsd.serve.vllm.support import require_vllm

NOTE = (
    "vLLM's times include its scheduler. Each wiring and all-reduce backend was an engine of its own, and the engines "
    "ran one after the other."
)
_OF_VLLM = "vllm"  # the all-reduce backend in the rows of a model that is not rewired, and of a single rank
Variant = tuple[str, str]  # the name of a wiring, and the kind of its reductions


def bench(load: Workload, out: Path | None = None) -> dict[str, Any]:
    """Measure all variants in vLLM, print a table to stderr, and return what ``infer.json`` holds.

    Args:
        load: the workload, whose ``engine`` is ``vllm``.
        out: directory for ``infer.json``, which is written again after each engine, and for ``infer.png``.

    Returns:
        What ``own_engine.bench`` returns, and ``vllm``: what vLLM has chosen by itself for each variant, see
        ``vllm_process.Engine``. A row is ``out_of_memory`` if the engine did not fit, or if vLLM had to put prompts of
        the batch off because their keys and values did not fit.

    Raises:
        ConfigError: vLLM or the plugin is missing, or the model cannot have a wiring.
        BadInputError: the checkpoint cannot be used.
        FcsdError: vLLM failed.
    """
    config = config_of(load.model, load.layers)
    wirings = {degree: _wirings(load, config, degree) for degree in load.degrees}
    rewired = any(wiring.layers for found in wirings.values() for wiring in found.values())
    require_vllm("python -m benchmarks.infer --engine vllm", rewired=rewired)
    workload = {**asdict(load), "reduce": load.kinds}
    result: dict[str, Any] = {"workload": workload, "environment": snapshot(), "vllm": [], "rows": []}
    with TemporaryDirectory(prefix="fcsd-bench-infer-") as scratch:
        for degree, found in wirings.items():
            before, times = result["rows"], {}
            for name, wiring in found.items():
                path = Path(scratch) / f"{name}-{degree}"
                write_directory(load.model, config, wiring, path, weights=True)
                for kind in _kinds(load, name, wiring, degree):
                    print(f"vLLM: TP {degree}, {name}, {kind}", file=sys.stderr, flush=True)
                    options = _options(load, config, degree, kind if wiring.layers else None)
                    chosen, times[name, kind] = _measure(load, config, path, options, Path(scratch) / "log")
                    result["vllm"].append({"tp": degree, "wiring": name, "reduce": kind, **chosen})
                    result["rows"] = [*before, *_rows(load, degree, times)]
                    write(result, out and out / "infer.json")
    print(table(result["rows"]), NOTE, sep="\n", file=sys.stderr, flush=True)
    if out is not None and find_spec("matplotlib") is None:  # where fcsd was installed beside vLLM with --no-deps
        print(f"{out / 'infer.png'} is not drawn: matplotlib is not installed", file=sys.stderr, flush=True)
    elif out is not None:
        title = f"{load.model} in vLLM, prompts of {load.prompt} tokens, {load.new} new"
        draw(result["rows"], title, out / "infer.png")
    return result


def _wirings(load: Workload, config: PretrainedConfig, degree: int) -> dict[str, Wiring]:
    """The wirings of a degree by their names. Desync drops reductions, and one rank has none."""
    names = [name for name in load.wirings if degree > 1 or name not in DESYNC]
    return {name: wiring_for(name, config, degree) for name in names}


def _kinds(load: Workload, name: str, wiring: Wiring, degree: int) -> list[str]:
    """The all-reduce backends that a wiring is timed with: one where fcsd's plugin reduces nothing."""
    if not wiring.layers or degree == 1:
        return [_OF_VLLM]
    return [kind for kind in load.kinds if load.times(name, kind)]


def _options(load: Workload, config: PretrainedConfig, degree: int, kind: str | None) -> dict[str, Any]:
    """vLLM's arguments; ``kind`` is None for a model that is not rewired."""
    return {
        "dtype": load.dtype,
        "tensor_parallel_size": degree,
        "enable_expert_parallel": load.experts == "whole" and experts_of(config) > 0,
        "enforce_eager": not load.graphs,
        "load_format": "dummy" if load.model in SHAPES else "auto",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_model_len": load.prompt + load.new,
        "max_num_seqs": max(load.batches),
        "additional_config": {} if kind is None else {"fcsd": {"reduce": kind}},
    }


def _measure(
    load: Workload, config: PretrainedConfig, path: Path, options: dict[str, Any], log: Path
) -> tuple[dict[str, Any], dict[int, Times | None]]:
    """What vLLM has chosen, and the times of each batch; None for a batch that does not fit."""
    vocabulary = config.get_text_config().vocab_size
    try:
        with started(path, options, log) as engine:
            found = {batch: _times(engine, load.prompts(batch, vocabulary), load) for batch in load.batches}
            return engine.chosen, found
    except MemoryError:
        return {}, dict.fromkeys(load.batches)


def _times(engine: Engine, prompts: list[list[int]], load: Workload) -> Times | None:
    times: Times = {"prefill": [], "decode": []}
    for round_ in range(-1, load.rounds):  # the first round warms up
        answer = engine.ask(prompts, load.new)
        if answer.preempted:
            return None
        if round_ >= 0:
            prefill, decode = phases(answer, load.new)
            times["prefill"].append(prefill)
            times["decode"].append(decode)
    return times


def phases(answer: Answer, new: int) -> tuple[float, float]:
    """Milliseconds of the prefill of a batch, and of one of the ``new - 1`` steps after it."""
    prefill = max(first for first, _ in answer.times)
    end = max(last for _, last in answer.times)
    return 1e3 * prefill, 1e3 * (end - prefill) / (new - 1)


def _rows(load: Workload, degree: int, times: dict[Variant, dict[int, Times | None]]) -> list[dict[str, Any]]:
    """The rows of a degree, in the order of the batches and then of the variants."""
    rows = []
    for batch in load.batches:
        same = [row(load, degree, batch, *variant, found[batch]) for variant, found in times.items()]
        for own in same:
            compare(own, same)
        rows += same
    return rows
