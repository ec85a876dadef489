"""The whole distillation step, teacher included: the speed of its variants, their bound, and where the time goes.

Student and teacher have random weights of a real shape; recipe, packed rows, loss, engine
and optimizer step are those of ``fcsd distill``. All variants run on the same two models in one process group,
interleaved, so that clocks and memory drift alike for all.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.bench.account import Account, phase, read_account, to_text
from fcsd.bench.memory import random_corpus, random_recipe
from fcsd.bench.shapes import SHAPES
from fcsd.bench.training.ceilings import NoWire
from fcsd.bench.training.model import evenly_routed
from fcsd.bench.training.record import record
from fcsd.config import Recipe
from fcsd.distill.engine import DTYPES, build_engine, import_deepspeed
from fcsd.distill.expert_parallel import check, randomise, wire_sharded
from fcsd.distill.prepare import training_rows
from fcsd.distill.step import train_step
from fcsd.distill.teacher.original import needs_teacher
from fcsd.distill.teacher.targets import live_teacher
from fcsd.errors import ConfigError
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, join_world
from fcsd.models.build import converted_config, register, wiring_of
from fcsd.models.wiring import Wiring
from fcsd.parallel.overlap import overlap

OVERLAPPED, BLOCKING, BOUND = "overlapped", "blocking", "comm-free"
VARIANTS = (OVERLAPPED, BLOCKING, BOUND)


@dataclass(frozen=True)
class Load:
    """What is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``.
        micro_batch: rows of ``seq`` tokens in a forward pass, on each process; ``accumulation`` of them make a step.
        router: ``initialised`` as the random weights have it, or ``uniform``: every expert gets as many tokens.
        sets: ``--set`` assignments to the recipe; without them KL from a teacher, ZeRO-1, experts over all processes.
        rounds, steps: timed steps of each variant are ``rounds`` times ``steps``, interleaved by round.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    accumulation: int = 1
    router: str = "initialised"
    sets: tuple[str, ...] = ()
    rounds: int = 3
    steps: int = 3


def bench(load: Load, out: Path | None = None, *, traced: bool = False) -> dict[str, Any]:
    """Measures, prints to stderr on rank 0, and gives what ``distill.json`` holds; every process of the run calls it.

    Args:
        out: directory for ``distill.json`` and, with ``traced``, for a Chrome trace of one step of each rank under each
            variant but the bound, from which the account of rank 0 is made.

    Raises:
        ConfigError: no such shape or router, or a recipe that cannot be.
    """
    if load.shape not in SHAPES:
        raise ConfigError(f"{load.shape}: shapes are {', '.join(SHAPES)}")
    if load.router not in ("initialised", "uniform"):
        raise ConfigError(f"no router {load.router}", hint="known: initialised, uniform")
    world = join_world()
    import_deepspeed()
    original = SHAPES[load.shape](load.layers)
    wiring = Wiring("farskip", tuple(range(load.layers)))
    register()
    rewired = converted_config(original, wiring.to_block(base_model="random", base_revision=None, base_sha256=None))
    with tempfile.TemporaryDirectory() as folder:
        rewired.save_pretrained(f"{folder}/student")
        original.save_pretrained(f"{folder}/teacher")
        batch_tokens = world.size * load.micro_batch * load.accumulation * load.seq
        timed = len(VARIANTS) * (load.rounds * (load.steps + 1) + 2)
        recipe = random_recipe(
            Path(folder), load.shape, load.seq, load.micro_batch, batch_tokens, timed, world, load.sets
        )
        check(recipe, world.size)
    with ExitStack() as held:
        step = _Step(recipe, rewired, original, world)
        if load.router == "uniform":
            for model in step.models:
                held.enter_context(evenly_routed(model))
        result: dict[str, Any] = {
            "load": asdict(load),
            "world": world.size,
            "batch_tokens": recipe.train.batch_tokens,
            "environment": snapshot(),
            "variants": _time(step, load, world),
        }
        if traced and out is not None and world.device.type == "cuda":
            result["accounts"] = _accounts(step, out, world)
    if world.rank == 0:
        print(table(result), file=sys.stderr, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "distill.json").write_text(json.dumps(result, indent=1))
    return result


class _Step:
    """One student, one teacher, and the steps they take under any variant."""

    def __init__(self, recipe: Recipe, rewired: PretrainedConfig, original: PretrainedConfig, world: World) -> None:
        self._recipe, self._world, self._taken = recipe, world, 0
        draw: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
        student = randomise(rewired, recipe.parallel.ep_size, **draw)
        self.models: list[PreTrainedModel] = [student]
        self._teacher = None
        if needs_teacher(recipe):
            teacher = randomise(original, recipe.parallel.teacher_ep_size, **draw).requires_grad_(False)
            self.models.append(teacher)
            targets = live_teacher(teacher, recipe.objective)
            self._teacher = _in_phase("teacher", targets)
        self._engine = _Phases(build_engine(student, recipe, world))
        self._rows = training_rows(recipe, [random_corpus(student.config.vocab_size, recipe.data.seq_len)])

    @property
    def variants(self) -> tuple[str, ...]:
        """Those that differ: with all experts on every process nothing is sent between layers."""
        return VARIANTS if self._recipe.parallel.ep_size > 1 else (OVERLAPPED,)

    def choose(self, variant: str) -> None:
        """Wires both models as a variant wants them."""
        parallel = self._recipe.parallel
        for model, ep_size in zip(self.models, (parallel.ep_size, parallel.teacher_ep_size), strict=False):
            if ep_size == 1:
                continue
            fused = parallel.fused and self._world.device.type == "cuda"
            if variant == OVERLAPPED:
                wire_sharded(model, ep_size, parallel)
            elif variant == BLOCKING:
                overlap(model, wiring_of(model.config), "off", fused=fused)
            else:
                overlap(model, wiring_of(model.config), fused=fused, transport=NoWire())

    def take(self) -> dict[str, float]:
        """One step, and what ``train_step`` says of it."""
        self._taken += 1
        return train_step(self._engine, self._teacher, self._rows, self._recipe, self._world, self._taken)


class _Phases:
    """An engine whose passes are phases of the step."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *arguments: Any) -> Any:
        with phase("student and loss"):
            return self._engine(*arguments)

    def backward(self, *arguments: Any, **options: Any) -> Any:
        with phase("backward"):
            return self._engine.backward(*arguments, **options)

    def step(self) -> Any:
        with phase("optimizer"):
            return self._engine.step()


def _in_phase(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with phase(name):
            return function(*arguments)

    return run


def _time(step: _Step, load: Load, world: World) -> dict[str, dict[str, Any]]:
    """By variant: seconds of every timed step, peak memory in GiB, and the last loss."""
    measured: dict[str, dict[str, Any]] = {name: {"seconds": [], "peak_gib": 0.0} for name in step.variants}
    for _ in range(load.rounds):
        for name, found in measured.items():
            step.choose(name)
            step.take()  # allocates and tunes
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for _ in range(load.steps):
                with _timed(found["seconds"], world):
                    found["loss"] = step.take()["loss"]
            if world.device.type == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return measured


@contextmanager
def _timed(seconds: list[float], world: World) -> Iterator[None]:
    """Appends how long the block took, with the device done before and after."""
    wait: Callable[[], None] = torch.cuda.synchronize if world.device.type == "cuda" else (lambda: None)
    wait()
    dist.barrier()
    began = time.perf_counter()
    yield
    wait()
    seconds.append(time.perf_counter() - began)


def _accounts(step: _Step, out: Path, world: World) -> dict[str, Any]:
    """Traces a step of each variant but the bound on every rank; rank 0's account of each."""
    accounts: dict[str, Any] = {}
    for name in step.variants:
        if name == BOUND:
            continue
        step.choose(name)
        step.take()
        path = out / f"{name}-rank-{world.rank}.json.gz"
        out.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        record(step.take, path, world)
        dist.barrier()
        if world.rank == 0:
            account: Account = read_account(path)
            accounts[name] = asdict(account)
            print(f"\n{name}, a traced step of rank 0\n{to_text(account)}", file=sys.stderr, flush=True)
    return accounts


def table(result: dict[str, Any]) -> str:
    """A line for each variant: the median step, tokens per second, and the share of the bound's speed."""
    medians = {name: statistics.median(found["seconds"]) for name, found in result["variants"].items()}
    lines = [f"{'':12s} {'step ms':>9s} {'min':>9s} {'tokens/s':>10s} {'of bound':>9s} {'peak GiB':>9s}"]
    for name, found in result["variants"].items():
        bound = f"{medians[BOUND] / medians[name]:9.1%}" if BOUND in medians else f"{'-':>9s}"
        speed = result["batch_tokens"] / medians[name]
        least = min(found["seconds"]) * 1e3
        lines.append(
            f"{name:12s} {medians[name] * 1e3:9.1f} {least:9.1f} {speed:10,.0f} {bound} {found['peak_gib']:9.1f}"
        )
    return "\n".join(lines)
