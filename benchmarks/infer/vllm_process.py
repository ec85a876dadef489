"""An engine of vLLM in a process of its own, which answers batches of prompts and says when their tokens came.

An engine does not give back all memory of a GPU before its process ends. The process starts a process group, in which
vLLM starts its own processes, and the whole group is ended with the engine.
"""

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from fcsd.errors import FcsdError
from fcsd.foreign_errors import reason_of

_GRACE = 20.0  # seconds that vLLM has to end its processes
_LAST_LINES = 40  # of vLLM's messages, which are shown if it fails
# The first error in vLLM's messages is the cause of the others.
_CAUSE = re.compile(r"ERROR [^]]*\] (\w[\w.]*(?:Error|Exception): .*)")
# What vLLM's messages hold if weights, activations or the keys and values of one prompt do not fit into memory.
_NO_MEMORY = (
    "OutOfMemoryError",
    "CUDA out of memory",
    "No available memory for the cache blocks",
    "larger than the available KV cache",
)


class Answer(NamedTuple):
    """How a batch was answered.

    Attributes:
        times: for each prompt, the seconds to its first and to its last token, from when all prompts were sent.
        preempted: how often vLLM put a prompt off, because the keys and values of all did not fit into memory.
    """

    times: list[tuple[float, float]]
    preempted: int


class Engine(NamedTuple):
    """An engine that is running.

    Attributes:
        chosen: what vLLM has chosen by itself: its ``version``, its model ``runner``, its CUDA ``graphs``, and its
            ``budget``, the most tokens of one step.
        ask: answers prompts, lists of token ids, with so many new tokens each.
    """

    chosen: dict[str, Any]
    ask: Callable[[list[list[int]], int], Answer]


@contextlib.contextmanager
def started(path: Path, options: dict[str, Any], log: Path) -> Iterator[Engine]:
    """Start an engine, and end all its processes when the context is left.

    Args:
        path: directory of the model.
        options: arguments of vLLM's ``AsyncEngineArgs``.
        log: the file that gets vLLM's messages; it is written over.

    Raises:
        MemoryError: the model or the keys and values of one prompt do not fit into memory.
        FcsdError: vLLM failed. The last of its messages were printed.
    """
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(theirs, path, options, log))
    log.write_text("")

    def receive() -> Any:
        while not pipe.poll(0.5) and (process.is_alive() or pipe.poll()):
            pass  # processes of vLLM may keep the other end open after this one has ended
        try:
            found = pipe.recv() if pipe.poll() else "its process ended"
        except EOFError:
            found = "its process ended"
        if isinstance(found, str):
            raise _failure(found, log)
        return found

    def ask(prompts: list[list[int]], new: int) -> Answer:
        with contextlib.suppress(BrokenPipeError):  # the engine has ended, and has said why
            pipe.send((prompts, new))
        return receive()

    process.start()
    assert process.pid is not None, "a started process has a number"
    theirs.close()
    try:
        yield Engine(receive(), ask)
        pipe.close()  # asks the engine to end
        process.join(_GRACE)
    finally:
        with contextlib.suppress(ProcessLookupError):  # no process of the group is left
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _failure(reason: str, log: Path) -> Exception:
    messages = log.read_text(errors="replace")
    if any(sign in messages for sign in _NO_MEMORY):
        return MemoryError(reason)
    print(*messages.splitlines()[-_LAST_LINES:], sep="\n", file=sys.stderr, flush=True)
    cause = _CAUSE.search(messages)
    return FcsdError(f"vLLM failed: {cause[1] if cause else reason}", "The last of its messages are above.")


def _run(pipe: Connection, path: Path, options: dict[str, Any], log: Path) -> None:
    """The process of an engine. It ends when the other end of the pipe is closed."""
    os.setsid()
    messages = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(messages, 1)
    os.dup2(messages, 2)
    try:
        asyncio.run(_serve(pipe, path, options))
    except Exception as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {reason_of(error)}")


async def _serve(pipe: Connection, path: Path, options: dict[str, Any]) -> None:
    from vllm import SamplingParams, __version__  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.usage.usage_lib import UsageContext  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]
    from vllm.v1.metrics.reader import get_metrics_snapshot  # pyright: ignore[reportMissingImports]

    def preemptions() -> int:
        return sum(found.value for found in get_metrics_snapshot() if found.name == "vllm:num_preemptions")

    async def answer(ids: list[int], new: int, name: str, start: float) -> tuple[float, float]:
        sampling = SamplingParams(
            max_tokens=new, temperature=0, detokenize=False, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        moments = [time.perf_counter() - start async for _ in llm.generate({"prompt_token_ids": ids}, sampling, name)]
        return moments[0], moments[-1]

    # With this context vLLM chooses the same token budget as its server does.
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(model=str(path), **options), usage_context=UsageContext.OPENAI_API_SERVER
    )
    try:
        config = llm.vllm_config
        chosen = {"version": __version__, "runner": "v2" if config.use_v2_model_runner else "v1"}
        chosen["graphs"] = str(config.compilation_config.cudagraph_mode)
        pipe.send({**chosen, "budget": config.scheduler_config.max_num_batched_tokens})
        for number in count():
            try:
                prompts, new = await asyncio.to_thread(pipe.recv)
            except EOFError:
                return
            before, start = preemptions(), time.perf_counter()
            answers = [answer(ids, new, f"{number}-{n}", start) for n, ids in enumerate(prompts)]
            times = list(await asyncio.gather(*answers))
            pipe.send(Answer(times, preemptions() - before))
    finally:
        llm.shutdown()
