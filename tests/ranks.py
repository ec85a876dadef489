"""Starts the processes of tests: ranks, commands and scripts, forked from a process that has made the slow imports."""

import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import random
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from fcsd.cli.command import report_error
from fcsd.models.archs import ARCHS

_context = multiprocessing.get_context("forkserver")
# Set by tests that look at curves.png. To draw it takes as long as to train a tiny model, so other runs do not.
DRAW_CURVES = "DRAW_CURVES"

_FOLDERS = {model_type.removesuffix("_text") for model_type in ARCHS}  # of transformers' modeling files
_SLOW_IMPORTS = [
    "deepspeed.module_inject.auto_ep",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "peft.tuners.lora",
    "setuptools",
    "fcsd.distill.loop",
    "fcsd.eval.harness",
    "lm_eval.tasks",
    "pytest",
    *(f"transformers.models.{folder}.modeling_{folder}" for folder in sorted(_FOLDERS)),
    "runs",
    "family_tables",
]
if not torch.cuda.is_available():  # some of them begin to use a GPU, which a forked process then cannot
    _context.set_forkserver_preload(_SLOW_IMPORTS)


def start(function: Callable[..., Any], *arguments: Any, **environment: str) -> BaseProcess:
    """Start a process that runs ``function(*arguments)``. ``environment`` is added to the environment variables."""
    _start_server()
    process = _context.Process(target=_enter, args=({**os.environ, **environment}, function, arguments))
    process.start()
    return process


@cache
def _start_server() -> None:
    """Starts the process that forks. It finds the modules of this folder by the path that is set while it starts."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        multiprocessing.forkserver.ensure_running()


def exit_code(function: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a process that runs ``function(*arguments)``."""
    return _end(start(function, *arguments))


def exit_codes(size: int, function: Callable[..., Any], *arguments: Any) -> tuple[list[int], str]:
    """The exit codes of ``size`` ranks that run ``function(*arguments)``, and their text on stderr."""
    with tempfile.TemporaryDirectory() as told:
        said = [Path(told, str(rank)) for rank in range(size)]  # a file per rank: stacks are written letter by letter
        worlds = zip(said, _worlds(size), strict=True)
        ranks = [start(_as_command, path, function, arguments, **world) for path, world in worlds]
        return [_end(rank) for rank in ranks], "".join(path.read_text() for path in said)


def on_ranks(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(*arguments)`` by rank. The result of a rank that failed is its exception.

    Raises:
        ChildProcessError: a rank ended without a result, as when it was killed. The others, which may wait for it, are
            killed at once.
    """
    pipes = [_context.Pipe(duplex=False) for _ in range(size)]
    ranks = [start(_answer, pipes[rank][1], function, arguments, **world) for rank, world in enumerate(_worlds(size))]
    for _, sending in pipes:
        sending.close()  # only its rank holds it now, so the pipe ends with the rank
    waiting = {receiving: rank for rank, (receiving, _) in enumerate(pipes)}
    found: dict[int, bytes] = {}
    try:
        while waiting:
            ready = wait(list(waiting), timeout=300)
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} have no result after 300 s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    found[rank] = pipe.recv_bytes()
                except EOFError:
                    ranks[rank].join(10)
                    code = ranks[rank].exitcode
                    raise ChildProcessError(f"rank {rank} ended without a result, with exit code {code}") from None
    except BaseException:
        for process in ranks:
            process.kill()
        raise
    finally:
        for process in ranks:
            _end(process)
    return [pickle.loads(found[rank]) for rank in range(size)]


def results(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """As ``on_ranks``, but the error of a rank is raised."""
    found = on_ranks(size, function, *arguments)
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def in_group(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results of ``function(rank, *arguments)`` by rank, in DeepSpeed's process group over gloo, as ``results``."""
    return results(size, _joined, function, arguments)


def fcsd(
    *arguments: object, cwd: Path | None = None, size: int | None = None, module: str = "fcsd", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``fcsd ARGUMENTS`` and return its exit code and output.

    Args:
        module: what runs in place of fcsd, as ``python -m MODULE ARGUMENTS``.
        size: as how many ranks it runs, as if torchrun had started them; None for one process, which may call torchrun.
            The exit code is then that of rank 0, and the output that of all ranks.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as told:
        out, err = Path(told, "out"), Path(told, "err")
        worlds = _worlds(size) if size else [{}]
        given = module, cwd or Path.cwd(), out, err, words
        started = [start(_command, *given, **environment, **world) for world in worlds]
        code, *_ = [_end(process) for process in started]
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def script(file: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python script in its own directory, as ``python FILE`` would, and return its exit code and output."""
    with tempfile.TemporaryDirectory() as told:
        out, err = Path(told, "out"), Path(told, "err")
        code = exit_code(_script, file, out, err)
        return subprocess.CompletedProcess([str(file)], code, out.read_text(), err.read_text())


def free_port() -> int:
    """The number of a port that is not in use.

    The system gives ports above 32767 to outgoing connections, so such a port could be taken before it is used.
    """
    for port in random.Random().sample(range(10_000, 32_768), 100):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port between 10000 and 32767")


def _worlds(size: int) -> list[dict[str, str]]:
    """The environment variables that torchrun would set for each rank."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    where |= {"WORLD_SIZE": str(size), "LOCAL_SIZE": str(size)}
    return [{**where, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _end(process: BaseProcess) -> int:
    process.join(300)
    process.kill()  # otherwise the end of the session would wait for a process that hangs
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _enter(environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    from fcsd.distill.run import report

    gc.freeze()  # the collector need not visit the imported objects
    os.environ.clear()
    os.environ.update(environment)
    os.fsync = lambda descriptor: None  # as in conftest.py
    if DRAW_CURVES not in environment:
        report.draw_curves = lambda run: run / report.CURVES
    function(*arguments)


def _answer(result: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        answer = pickle.dumps(function(*arguments))
    except Exception as error:
        traceback.print_exc()
        answer = pickle.dumps(error)
    result.send_bytes(answer)  # a tensor would be read from this process, which may have ended


def _joined(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    from fcsd.distill.step.engine import import_deepspeed
    from fcsd.launch.world import join_world

    rank = join_world().rank
    import_deepspeed()
    return function(rank, *arguments)


def _as_command(said: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    try:
        function(*arguments)
    except Exception as error:
        sys.exit(report_error(error))


def _tell(out: Path, err: Path) -> None:
    """From here on this process writes its output to two files."""
    for stream, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)


def _script(file: Path, out: Path, err: Path) -> None:
    os.chdir(file.parent)
    _tell(out, err)
    sys.argv = [str(file)]
    runpy.run_path(str(file), run_name="__main__")


def _command(module: str, cwd: Path, out: Path, err: Path, arguments: list[str]) -> None:
    from fcsd.cli.main import main

    os.chdir(cwd)
    _tell(out, err)
    sys.argv = [module, *arguments]
    if module == "fcsd":
        main()
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
