"""Measures the whole distillation step, teacher included: the speed of its variants and how the time is spent.

Student and teacher have random weights. Their dimensions are those of a published model or of a checkpoint's config.
The recipe, the packed rows, the feed, the loss, the engine and the optimizer step are those of ``fcsd distill``. All
variants run in turns on the same two models and in one process group, so that changes of the GPUs' clocks and memory
affect all of them alike.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.bench.account import phase, read_account, to_text
from fcsd.bench.memory import random_corpus, random_recipe
from fcsd.bench.shapes import SHAPES
from fcsd.bench.training.ceilings import NoWire
from fcsd.bench.training.model import evenly_routed
from fcsd.bench.training.record import record
from fcsd.config import Recipe
from fcsd.distill import graphs, update
from fcsd.distill.dtypes import DTYPES
from fcsd.distill.engine import build_engine, import_deepspeed
from fcsd.distill.expert_parallel import check, dispatcher_for, quantiser_of, randomise, wire_sharded
from fcsd.distill.feed import feeding
from fcsd.distill.metrics import full_speed, gpu_peak
from fcsd.distill.prepare import training_rows
from fcsd.distill.step import launch_step, train_step
from fcsd.distill.teacher.original import compile_layers, needs_teacher, pack_attention
from fcsd.distill.teacher.targets import live_teacher
from fcsd.errors import ConfigError, unknown_value
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, barrier, join_world
from fcsd.models.build import converted_config, register, wiring_of
from fcsd.models.wiring import Wiring
from fcsd.parallel.attention import join_attention
from fcsd.parallel.expert.formats import check_formats
from fcsd.parallel.overlap import overlap
from fcsd.parallel.wire import Quantiser, WireFormats

OVERLAPPED, APART, MASKED, BLOCKING, BOUND = "overlapped", "apart", "masked", "blocking", "comm-free"
VARIANTS = (OVERLAPPED, APART, MASKED, BLOCKING, BOUND)


@dataclass(frozen=True)
class Load:
    """The workload that is timed.

    Attributes:
        shape: a name in ``fcsd.bench.shapes``, or the directory of a checkpoint, of which only the config is read.
        layers: decoder layers of a shape; for a checkpoint, its config gives the number.
        micro_batch: rows of ``seq`` tokens in a forward pass of each process.
        seq: tokens of a row.
        accumulation: micro-batches in a step of each process.
        router: ``initialised`` keeps the random router; ``uniform`` sends equally many tokens to every expert.
        variants: which variants are timed:
            ``overlapped`` is the step of ``fcsd distill``;
            ``apart`` runs the teacher's pass before the student's instead of in turns with it;
            ``masked`` is ``apart`` with a mask instead of packed attention;
            ``blocking`` awaits every collective where it starts;
            ``comm-free`` sends no rows and is the bound.
        wires: formats of the student's rows, as ``WireFormats.parse`` reads them. Each of them is timed as a variant
            ``overlapped+FORMAT``.
        sets: ``--set`` assignments to the recipe. By default the recipe has KL from a teacher, ZeRO-1, and experts
            spread over all processes.
        rounds: how often each variant is timed; in a round, each variant runs once.
        steps: timed steps of a variant in each round, which follow one another without a pause.
    """

    shape: str
    layers: int
    micro_batch: int
    seq: int
    accumulation: int = 1
    router: str = "initialised"
    variants: tuple[str, ...] = VARIANTS
    sets: tuple[str, ...] = ()
    rounds: int = 3
    steps: int = 3
    wires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for wire in self.wires:
            WireFormats.parse(wire)
        known = {"router": ("initialised", "uniform"), "variant": VARIANTS}
        for what, given in (("router", (self.router,)), ("variant", self.variants)):
            for name in given:
                if name not in known[what]:
                    raise unknown_value(what, name, known[what])
        if self.shape not in SHAPES and not Path(self.shape, "config.json").is_file():
            raise ConfigError(f"{self.shape}: neither a shape ({', '.join(SHAPES)}) nor a checkpoint's directory")

    @property
    def timed(self) -> tuple[str, ...]:
        """All variants that are timed."""
        return (*self.variants, *(f"{OVERLAPPED}+{wire}" for wire in self.wires))

    @property
    def config(self) -> PretrainedConfig:
        """The teacher's config."""
        if self.shape in SHAPES:
            return SHAPES[self.shape](self.layers)
        return AutoConfig.from_pretrained(self.shape, trust_remote_code=False)


def bench(load: Load, out: Path | None = None, *, traced: bool = False) -> dict[str, Any]:
    """Measures all variants, prints a table to stderr on rank 0, and returns the content of ``distill.json``.

    Every process of the run must call this function.

    Args:
        out: directory for ``distill.json``.
        traced: also writes to ``out`` a Chrome trace of one step of each rank under each variant except the bound, and
            computes the account of rank 0 from it.

    Raises:
        ConfigError: the recipe is invalid for this model or this number of processes, or the rows of the model cannot
            be rounded to a format.
    """
    world = join_world()
    import_deepspeed()
    register()
    original = load.config
    layers = original.get_text_config().num_hidden_layers
    wiring = Wiring("farskip", tuple(range(layers)))
    rewired = converted_config(original, wiring.to_block(base_model="random", base_revision=None, base_sha256=None))
    with tempfile.TemporaryDirectory() as folder:
        rewired.save_pretrained(f"{folder}/student")
        original.save_pretrained(f"{folder}/teacher")
        tokens = world.size * load.micro_batch * load.accumulation * load.seq
        most = len(load.timed) * (load.rounds * (load.steps + 1) + 2)
        recipe = random_recipe(Path(folder), "bench", load.seq, load.micro_batch, tokens, most, world, load.sets)
        check(recipe, world.size)
        if load.wires and recipe.parallel.ep_size == 1:
            raise ConfigError("--wire needs experts that are divided among several processes", hint="add --gpus 2")
        for wire in load.wires:
            check_formats(WireFormats.parse(wire), rewired, load.shape)
        full = _full_speed(recipe, world)
    with ExitStack() as held:
        steps = _Steps(recipe, rewired, original, world)
        if load.router == "uniform":
            for model in steps.models:
                held.enter_context(evenly_routed(model))
        result: dict[str, Any] = {
            "load": asdict(load),
            "world": world.size,
            "batch_tokens": tokens,
            "full_speed": full,
            "environment": snapshot(),
            "variants": _time(steps, load, world),
        }
        if traced and out is not None and world.device.type == "cuda":
            result["accounts"] = _accounts(steps, load, out, world)
    if world.rank == 0:
        print(table(result), file=sys.stderr, flush=True)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            (out / "distill.json").write_text(json.dumps(result, indent=1))
    return result


def _full_speed(recipe: Recipe, world: World) -> float | None:
    """Tokens per second at the GPUs' peak FLOP/s, by which MFU is computed; None if the GPUs' peak is not known."""
    if world.device.type != "cuda":
        return None
    peak = gpu_peak(torch.cuda.get_device_name(world.device), recipe.train.dtype)
    return None if peak is None else full_speed(recipe, world.size, peak)


class _Steps:
    """One student and one teacher, with functions to choose a variant and to run steps of it."""

    def __init__(self, recipe: Recipe, rewired: PretrainedConfig, original: PretrainedConfig, world: World) -> None:
        self.recipe, self._chosen, self._world, self._taken = recipe, recipe, world, 0
        draw: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "seed": recipe.seed}
        student = randomise(rewired, recipe.parallel.ep_size, **draw, dispatched=recipe.parallel.wire.any)
        self.models: list[PreTrainedModel] = [student]
        self._teacher = None
        if needs_teacher(recipe):
            teacher = randomise(original, recipe.parallel.teacher_ep_size, **draw).requires_grad_(False)
            compile_layers(teacher, recipe)
            self.models.append(teacher)
            self._teacher = _in_phase("teacher", live_teacher(teacher, recipe.objective))
        engine = build_engine(student, recipe, world)
        update.install(engine, recipe)
        self._engine = _Phases(engine)
        self._rows = training_rows(recipe, [random_corpus(student.config.vocab_size, recipe.data.seq_len)])

    def choose(self, variant: str) -> None:
        """Wires both models for a variant."""
        parallel = self.recipe.parallel
        variant, _, wire = variant.partition("+")
        quantiser = Quantiser(WireFormats.parse(wire), self.recipe.seed) if wire else quantiser_of(self.recipe)
        self._engine.module.quantiser = quantiser
        apart = self.recipe.model_copy(update={"parallel": parallel.model_copy(update={"overlap": "off"})})
        # The recipe decides whether the passes of teacher and student run in turns.
        self._chosen = self.recipe if variant in (OVERLAPPED, BOUND) else apart
        on_cuda = self._world.device.type == "cuda"
        for model, ep_size, own in zip(
            self.models, (parallel.ep_size, parallel.teacher_ep_size), (quantiser, None), strict=False
        ):
            join_attention(model)
            model.set_attn_implementation("sdpa")
            if variant != MASKED:
                pack_attention(model, self.recipe)
            if variant in (OVERLAPPED, APART, MASKED) or ep_size == 1:
                wire_sharded(model, ep_size, parallel, own)
            elif variant == BLOCKING:
                dispatcher = dispatcher_for(parallel, ep_size)
                fused = parallel.fused and on_cuda
                overlap(model, wiring_of(model.config), "off", fused=fused, dispatcher=dispatcher, quantiser=own)
            else:
                overlap(model, wiring_of(model.config), fused=parallel.fused and on_cuda, transport=NoWire())
        graphs.install(self._engine.module, self._teacher, self.recipe, self.models)  # captured passes do not change

    def one(self) -> None:
        """Runs one step and waits until it is complete."""
        self._taken += 1
        train_step(self._engine, self._teacher, self._rows, self._chosen, self._world, self._taken)

    def several(self, count: int) -> dict[str, float]:
        """Runs one step that is not timed, then ``count`` timed steps in the way of ``fcsd distill``.

        Returns: mean ``seconds`` of a step, the share ``data_wait`` of them spent waiting for data, and the ``loss`` of
            the last step.
        """
        first, last = self._taken + 1, self._taken + 1 + count
        self._taken = last
        wait: Callable[[], None] = torch.cuda.synchronize if self._world.device.type == "cuda" else (lambda: None)
        began = waited = 0.0
        metrics: dict[str, float] = {}
        with feeding(self._rows, self.recipe, self._world, first, last) as feed:
            for step in range(first, last + 1):
                launched = launch_step(self._engine, self._teacher, feed.take(), self._chosen, self._world, step)
                if step in (first, last):
                    metrics = launched.metrics()
                    wait()
                if step == first:
                    barrier()
                    began, waited = time.perf_counter(), feed.waited
            seconds = time.perf_counter() - began
            return {"seconds": seconds / count, "data_wait": (feed.waited - waited) / seconds, "loss": metrics["loss"]}


class _Phases:
    """Wraps an engine so that each of its passes is recorded as a phase of the step."""

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


def _time(steps: _Steps, load: Load, world: World) -> dict[str, dict[str, Any]]:
    """Times every variant.

    Returns: for each variant, per round the ``seconds`` of a step and the share ``data_wait`` of them spent waiting for
        data; the last ``loss``; and on GPUs the peak memory ``peak_gib``.
    """
    measured: dict[str, dict[str, Any]] = {name: {"seconds": [], "data_wait": []} for name in load.timed}
    for _ in range(load.rounds):
        for name, found in measured.items():
            steps.choose(name)
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            taken = steps.several(load.steps)
            found["seconds"].append(taken["seconds"])
            found["data_wait"].append(taken["data_wait"])
            found["loss"] = taken["loss"]
            if world.device.type == "cuda":
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return measured


def _accounts(steps: _Steps, load: Load, out: Path, world: World) -> dict[str, Any]:
    """Traces a step of each variant except the bound on every rank; returns rank 0's account of each variant."""
    accounts: dict[str, Any] = {}
    for name in load.timed:
        if name == BOUND:
            continue
        steps.choose(name)
        steps.one()
        path = out / f"{name}-rank-{world.rank}.json.gz"
        out.mkdir(parents=True, exist_ok=True)
        barrier()
        record(steps.one, path, world)
        barrier()
        if world.rank == 0:
            account = read_account(path)
            accounts[name] = asdict(account)
            print(f"\n{name}, a traced step of rank 0\n{to_text(account)}", file=sys.stderr, flush=True)
    return accounts


def table(result: dict[str, Any]) -> str:
    """Formats the result as a table with a line for each variant.

    The columns are the median step, half its range, tokens per second, the share of the bound's speed, MFU, the share
    of time spent waiting for data, and peak memory.
    """
    medians = {name: statistics.median(found["seconds"]) for name, found in result["variants"].items()}
    titles = ("step ms", "± ms", "tokens/s", "of bound", "MFU", "data", "peak GiB")
    width = max(12, *map(len, medians))
    lines = [f"{'':{width}s} " + " ".join(f"{title:>9s}" for title in titles)]
    for name, found in result["variants"].items():
        bound = f"{medians[BOUND] / medians[name]:9.1%}" if BOUND in medians else f"{'-':>9s}"
        speed = result["batch_tokens"] / medians[name]
        spread = (max(found["seconds"]) - min(found["seconds"])) / 2 * 1e3
        mfu = f"{speed / result['full_speed']:9.1%}" if result["full_speed"] else f"{'-':>9s}"
        data = statistics.median(found["data_wait"])
        peak = f"{found['peak_gib']:9.1f}" if "peak_gib" in found else f"{'-':>9s}"
        lines.append(
            f"{name:{width}s} {medians[name] * 1e3:9.1f} {spread:9.1f} {speed:9,.0f} {bound} {mfu} {data:9.1%} {peak}"
        )
    return "\n".join(lines)
