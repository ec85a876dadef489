"""vLLM's engines: with the lab's options, in forks of the program that measures them, bounded in time.

A program imports vLLM once and forks its engines, which saves each of them an import of 10 to 20 s. It must not touch a
GPU before.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_FORK = multiprocessing.get_context("fork")
_NOTHING: Mapping[str, str] = MappingProxyType({})


def llm(path: Path | str, **options: Any) -> Any:
    """vLLM's engine. It needs no tokenizer, because requests are ids, and computes every prompt anew."""
    from vllm import LLM  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    if os.environ.get("NCCL_P2P_DISABLE") == "1":  # vLLM's own all-reduce does not read it, and would use peer access
        options["disable_custom_all_reduce"] = True
    return LLM(str(path), skip_tokenizer_init=True, enable_prefix_caching=False, **options)


def sampling(new: int, **options: Any) -> Any:
    """The likeliest tokens, ``new`` of them unless ``options`` say otherwise, as ids."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    return SamplingParams(**{"max_tokens": new, "temperature": 0, "detokenize": False, "ignore_eos": True, **options})


def generate(engine: Any, prompts: Sequence[list[int]], how: Any) -> list[Any]:
    """vLLM's outputs for prompts of ids; ``how`` is a ``sampling``, or one for each prompt."""
    return engine.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)


def version() -> str:
    """That of vLLM, which is imported here, before the forks."""
    from vllm import LLM, __version__  # noqa: F401  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    return __version__


class Failed(RuntimeError):
    """An engine could not be started, did not answer in time, or has ended; its log may say more."""


class Fork(NamedTuple):
    """An engine in a process of its own, the first of its group, and the end of a pipe to it."""

    process: Any
    turns: Connection


@contextmanager
def forks() -> Iterator[Callable[..., Fork]]:
    """What starts a fork (see ``_serve``). At the end of the block, and on SIGTERM, all that was started is killed."""
    started: list[Fork] = []

    def start(opened: Callable[..., Any], *given: Any, log: Path | None = None, environment: Any = _NOTHING) -> Fork:
        turns, other = _FORK.Pipe()
        held = [*(fork.turns for fork in started), turns]
        process = _FORK.Process(target=_serve, args=(other, held, opened, given, log, environment))
        process.start()
        other.close()  # or its end would not be seen here
        started.append(Fork(process, turns))
        return started[-1]

    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield start
    finally:
        for fork in started:
            end(fork)
        signal.signal(signal.SIGTERM, before)


def end(fork: Fork) -> None:
    """Kill a fork and what it has started. A second call does nothing: its number may be that of another process."""
    if fork.turns.closed:
        return
    fork.process.kill()  # which may not have come to a group of its own
    with suppress(ProcessLookupError):
        os.killpg(fork.process.pid, signal.SIGKILL)
    fork.process.join()
    fork.turns.close()


def _serve(turns: Connection, held: Any, opened: Callable[..., Any], given: Any, log: Path | None, more: Any) -> None:
    """In the fork: what the generator ``opened`` yields goes to the parent, and each request comes back to it."""
    for end_of_parent in held:  # or the end of the parent would not be seen here
        end_of_parent.close()
    os.setsid()  # what it starts ends with its group
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(more)
    if log is not None:
        with log.open("w") as messages:
            os.dup2(messages.fileno(), 1)
            os.dup2(messages.fileno(), 2)
    try:
        work = opened(*given)
        reply = next(work)
        while True:
            turns.send((True, reply))
            reply = work.send(turns.recv())
    except (EOFError, StopIteration):  # the parent has ended, or the work
        pass
    except BaseException as error:
        traceback.print_exc()
        turns.send((False, f"{type(error).__name__}: {error}"[:500]))


def ask(forks: Mapping[str, Fork], request: Any) -> None:
    """Send a request to forks, which work on it at the same time."""
    for fork in forks.values():
        with suppress(BrokenPipeError):  # ``replies`` says that it has ended
            fork.turns.send(request)


def replies(forks: Mapping[str, Fork], until: float = float("inf")) -> Iterator[tuple[str, Any]]:
    """The next reply of each fork, or why there is none as a ``Failed``, in the order in which they come.

    Args:
        until: ``time.monotonic()`` at which all have to be there.
    """
    waiting = dict(forks)
    while waiting:
        seconds = None if until == float("inf") else max(0.0, until - time.monotonic())
        ready = wait([fork.turns for fork in waiting.values()], seconds)
        for name, fork in list(waiting.items()):
            if fork.turns in ready or not ready:
                del waiting[name]
                yield name, _reply(fork) if ready else Failed("no answer in time")


def _reply(fork: Fork) -> Any:
    try:
        right, told = fork.turns.recv()
    except (EOFError, ConnectionResetError):
        return Failed("it has ended without a word")
    return told if right else Failed(told)


def in_a_fork(work: Callable[..., Any], *given: Any) -> Any:
    """What ``work`` returns in a fork of this process.

    A process that has touched a GPU cannot fork an engine. After an engine and its reference this process would have.
    """
    version()
    with ProcessPoolExecutor(1, _FORK) as pool:
        return pool.submit(work, *given).result()


def measure_host_sums(environment: Mapping[str, str], counts: Iterable[int]) -> None:
    """Measure the tables of sums through the host for engines of so many ranks that will ask for them.

    Engines that start together would measure each other.

    Raises:
        ConfigError: they cannot be measured here.
    """
    if ranks := sorted(set(counts) - {1}):
        in_a_fork(_measure_host_sums, {**os.environ, **environment}, ranks)


def _measure_host_sums(environment: Mapping[str, str], counts: Sequence[int]) -> None:
    from fcsd.bench.serve.host_ways import prepare, through_host

    os.environ.update(environment)
    for ranks in counts if through_host() else ():
        prepare(ranks)


def inspect_here() -> None:
    """Let vLLM look at model classes in this process.

    By itself it starts a process for each class, which imports everything again, in 15 to 30 s. vLLM 0.24 does not
    touch a GPU when it looks at the classes of these models, so this process can still fork an engine afterwards.
    """
    import vllm.model_executor.models.registry as registry  # pyright: ignore[reportMissingImports]

    registry._run_in_subprocess = lambda work: work()
