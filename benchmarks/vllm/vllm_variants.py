"""Engines of vLLM that take turns on the same GPUs: each in a process of its own, which says when its tokens came."""

import asyncio
import contextlib
import json
import multiprocessing
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm_cases import inspect_here
from vllm_report import Row

Times = tuple[float, float]  # of one request: seconds to its first token, and to its last one


# The weights of DeepSeek-V3's own checkpoint: fp8 with a scale for each block of 128 x 128.
FP8 = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128], activation_scheme="dynamic")


def make(folder: Path, shape: str, layers: int, wiring: str, fp8: bool = False) -> tuple[Path, Path]:
    """Two directories with a config.json and without weights: the original, and one with all layers rewired.

    Args:
        folder: where the directories are made.
        shape: a name in ``fcsd.bench.shapes``.
        layers: decoder layers.
        wiring: the name of a wiring.
        fp8: whether config.json says that the weights are fp8, see ``FP8``.
    """
    from fcsd.bench.shapes import SHAPES
    from fcsd.models.archs import ARCHS
    from fcsd.models.wiring_block import Wiring

    config = SHAPES[shape](layers)
    base = ARCHS[config.model_type].causal_lm
    name = f"{shape}-{layers}{'-fp8' * fp8}"
    original, converted = folder / f"{name}.base", folder / f"{name}-{wiring}"
    config.architectures = [base]
    config.save_pretrained(original)
    fields = json.loads((original / "config.json").read_text())
    if fp8:
        fields["quantization_config"] = FP8
        (original / "config.json").write_text(json.dumps(fields))
    converted.mkdir(parents=True, exist_ok=True)
    names = {"model_type": f"fcsd_{config.model_type}", "architectures": [f"Fcsd{base}"]}
    block = Wiring(wiring, layers=tuple(range(layers))).to_block()
    (converted / "config.json").write_text(json.dumps({**fields, **names, "fcsd": block}))
    return original, converted


def serve_variant(pipe: Connection, path: Path, options: Row) -> None:
    """In a process of its own: start an engine, say what it chose, and answer until ``None`` arrives."""
    try:
        asyncio.run(_serve(pipe, path, options))
    except Exception as error:
        traceback.print_exc()
        pipe.send(RuntimeError(f"{type(error).__name__}: {str(error)[:500]}"))


async def _serve(pipe: Connection, path: Path, options: Row) -> None:
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.usage.usage_lib import UsageContext  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    inspect_here()
    arguments = AsyncEngineArgs(model=str(path), **options)
    llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)  # a server's defaults
    config = llm.vllm_config
    facts = dict(
        runner="v2" if config.use_v2_model_runner else "v1",
        graphs=str(config.compilation_config.cudagraph_mode),
        compiled=str(config.compilation_config.mode),
        budget=config.scheduler_config.max_num_batched_tokens,
        backend=str(config.attention_config.backend),
        fused_allreduce_norm=bool(config.compilation_config.pass_config.fuse_allreduce_rms),
    )
    pipe.send(facts)
    number = 0

    async def ask(ids: list[int], due: float, new: int, name: str) -> Times:
        sampling = SamplingParams(
            max_tokens=new, temperature=0, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        await asyncio.sleep(due - time.perf_counter())
        first = None
        async for _ in llm.generate({"prompt_token_ids": ids}, sampling, name):
            first = first or time.perf_counter()
        assert first is not None, "a request without an answer"
        return first - due, time.perf_counter() - due

    while (work := await asyncio.to_thread(pipe.recv)) is not None:
        prompts, arrivals, new = work
        start = time.perf_counter()
        number += 1
        asked = [
            ask(ids, start + wait, new, f"{number}-{n}")
            for n, (ids, wait) in enumerate(zip(prompts, arrivals, strict=True))
        ]
        pipe.send(list(await asyncio.gather(*asked)))
    llm.shutdown()


class Variant:
    """An engine in a process of its own."""

    def __init__(self, name: str, path: Path, options: Row) -> None:
        self.name = name
        self.pipe, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process
        self.process = process(target=serve_variant, args=(theirs, path, options))
        self.process.start()
        theirs.close()

    def receive(self, deadline: float) -> Any:
        """What the engine says next. Raises TimeoutError after the deadline, and what the engine failed with."""
        if not self.pipe.poll(max(0.0, deadline - time.perf_counter())):
            raise TimeoutError(f"{self.name}: no answer before the time limit")
        try:
            found = self.pipe.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}: its process ended") from None
        if isinstance(found, Exception):
            raise RuntimeError(f"{self.name}: {found}")
        return found

    def ask(self, prompts: list[list[int]], arrivals: Sequence[float], new: int, deadline: float) -> list[Times]:
        """Send the prompts, each at its time in seconds from now, and wait until all are answered."""
        self.pipe.send((prompts, arrivals, new))
        return self.receive(deadline)


def close(variants: list[Variant], seconds: float) -> None:
    """Let all engines end, and end what is left of them after some seconds."""
    for variant in variants:
        with contextlib.suppress(OSError):  # its process has ended
            variant.pipe.send(None)
    deadline = time.perf_counter() + seconds
    for variant in variants:
        variant.process.join(max(0.0, deadline - time.perf_counter()))
        if variant.process.is_alive():
            variant.process.terminate()
