"""Times a step under several variants, beside its bound without communication, and says where the time goes.

All variants run in turns on the same models, in one engine and one process group, so that changes of the GPUs' clocks
and memory affect all of them alike. ``training`` and ``distillation`` say what a step is.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from benchmarks.train.account import read_account, to_text
from benchmarks.train.step.model import evenly_routed
from benchmarks.train.step.record import record
from benchmarks.train.step.table import table
from benchmarks.train.step.workload import Workload
from benchmarks.train.trace import files, to_json
from benchmarks.train.trace import to_text as trace_to_text
from benchmarks.turns import peak_gib
from transformers import PreTrainedModel

from fcsd.bench.runner import say, set_aside, write
from fcsd.errors import FcsdError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, barrier, join_world
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.trace import read


class Steps(Protocol):
    """Models in an engine, wired for one variant after the other, and steps of them.

    Attributes:
        models: the student, or the model that is trained, and the teacher, if there is one.
        batch_tokens: tokens of a step, over all processes.
        full_speed: tokens per second at the GPUs' peak FLOP/s, by which MFU is computed; None if it is not known.
    """

    models: list[PreTrainedModel]
    batch_tokens: int
    full_speed: float | None

    def check(self) -> dict[str, Any]:
        """What is compared and counted before the variants are timed; ``equality`` says which are right."""
        ...

    def choose(self, variant: str) -> None:
        """Wires the models for a variant."""
        ...

    def one(self) -> None:
        """Runs one step."""
        ...

    def several(self, count: int) -> dict[str, Any]:
        """Runs a step that is not timed, then ``count`` timed ones. Lists of the result grow from round to round."""
        ...


def bench(
    load: Workload, out: Path | None = None, *, traced: bool = False, tell: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measures all variants, tells the results on rank 0, and returns the content of ``step.json``.

    Every process of the run must call this function.

    Args:
        out: directory for ``step.json``, which is written again after each router, with ``complete``. What
            an earlier run left there is kept as ``step.1.json``.
        traced: also writes to ``out``, under the first router, a Chrome trace of one step of each rank under each of
            ``load.traced``, and says from it where the time goes.
        tell: takes the table of each router; None prints it to stderr.

    Returns: ``workload``, ``world``, ``batch_tokens``, ``full_speed``, ``environment``, and for each of ``routers``
        what ``Steps.check`` says, ``traces``, and ``variants``: by name the ms of a ``step``, one for each timed step
        or, with a teacher, one for each round; ``peak_gib`` on GPUs; and what ``Steps.several`` adds.

    Raises:
        ConfigError: the workload is not possible on these processes and devices.
        FcsdError: an overlapped variant computed something else than under the eager-sync schedule.
    """
    begun = time.monotonic()
    world = join_world()
    steps = _steps(load, world)
    speeds = {"batch_tokens": steps.batch_tokens, "full_speed": steps.full_speed}
    routers: dict[str, dict[str, Any]] = {}
    head = {"workload": asdict(load), "world": world.size, **speeds, "environment": snapshot()}
    result: dict[str, Any] = {**head, "routers": routers, "complete": False}
    path = None if out is None else out / "step.json"
    set_aside(path, *(load.traced if traced else ()), rank=world.rank)
    for router in load.routers:
        say(world, f"\n{router} router, {time.monotonic() - begun:.0f} s after the start")
        with ExitStack() as held:
            if router == "uniform":
                for model in steps.models:
                    held.enter_context(evenly_routed(model))
            found = routers[router] = steps.check()
            found["variants"] = _in_turns(steps, load, world)
            write(result, path, world.rank)  # before traces, of which one may be unreadable
            if out is not None and traced and router == load.routers[0]:
                found["traces"] = {name: _trace(steps, name, out / name, world) for name in load.traced}
                write(result, path, world.rank)
        accounts = {name: told["account"] for name, told in found.get("traces", {}).items() if told}
        text = table(found["variants"], **speeds, accounts=accounts)
        if tell is None:
            say(world, text)
        elif world.rank == 0:
            tell(f"{router} router\n{text}")
    result["complete"] = True
    write(result, path, world.rank)
    wrong = [
        f"{name} under the {router} router"
        for router, found in routers.items()
        for name, held in found.get("equality", {}).items()
        if not held["equal"]
    ]
    if wrong:
        raise FcsdError(f"{', '.join(wrong)}: the schedule computes something else than its eager-sync self")
    return result


def _steps(load: Workload, world: World) -> Steps:
    if load.teacher:
        from benchmarks.train.step.distillation import Distillation

        return Distillation(load, world)
    from benchmarks.train.step.training import Training

    return Training(load, world)


def _in_turns(steps: Steps, load: Workload, world: World) -> dict[str, dict[str, Any]]:
    """What was measured of each variant."""
    measured: dict[str, dict[str, Any]] = {name: {} for name in load.timed}
    for _ in range(load.rounds):
        for name, found in measured.items():
            steps.choose(name)
            for key, value in steps.several(load.steps).items():
                found[key] = [*found.get(key, []), *value] if isinstance(value, list) else value
            found["peak_gib"] = peak_gib(world.device)
    return measured


def _trace(steps: Steps, name: str, folder: Path, world: World) -> dict[str, Any]:
    """Traces a step of every rank under a variant into ``folder``, as ``rank-R.json.gz``.

    Returns: on rank 0 and on GPUs, the ``account`` of rank 0's step and, if experts are divided, the share of
        communication that all ranks hid (``hidden``); otherwise nothing.
    """
    steps.choose(name)
    steps.one()
    folder.mkdir(parents=True, exist_ok=True)
    barrier()
    record(steps.one, folder / f"rank-{world.rank}.json.gz", world)
    barrier()
    if world.rank or world.device.type != "cuda":
        return {}
    account = read_account(folder / "rank-0.json.gz")
    say(world, f"\n{name}, a traced step of rank 0\n{to_text(account)}")
    told: dict[str, Any] = {"account": asdict(account)}
    if world.size > 1 and expert_blocks(steps.models[0]):
        paths = files([folder])
        traces = [read(path) for path in paths]
        say(world, trace_to_text(traces, paths))
        told["hidden"] = to_json(traces, paths)
    return told
