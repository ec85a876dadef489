"""``python -m benchmarks.train.memory SHAPE``: a step's memory and speed beside what ``fcsd plan`` predicts of them.

Memory is compared by part and by moment. Student and teacher have random weights and the dimensions of a published
model. The recipe, the packed rows, the loss, the engine and the step are those of ``fcsd distill``. The benchmark reads
no checkpoint and writes only its result.
"""

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from benchmarks.train.random_run import random_corpus, random_run, require_all_trained
from benchmarks.turns import ratio
from transformers import PretrainedConfig

from fcsd.bench.runner import finished, table
from fcsd.bench.shapes import SHAPES
from fcsd.cli.bench import require_new
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Gpus, Sets
from fcsd.config import Recipe
from fcsd.disk import write_json
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.experts.expert_parallel import randomise, wire_sharded
from fcsd.distill.optim import update
from fcsd.distill.step.engine import build_training
from fcsd.distill.step.one_step import train_step
from fcsd.distill.student import DTYPES
from fcsd.distill.teacher.targets import LiveTeacher, TeacherSource, compile_layers, pack_attention
from fcsd.distill.train_engine import TrainEngine
from fcsd.errors import DoesNotFitError, unknown_value
from fcsd.extras import require_extra
from fcsd.foreign_errors import reason_of
from fcsd.launch.environment import snapshot
from fcsd.launch.world import World, ensure_world, first_rank, join_world, leave
from fcsd.plan import Hardware, Plan, plan_run
from fcsd.plan.setup import GIB

app = typer.Typer(rich_markup_mode=None)

# Parts of a step. Each has the prefixes of the names that its moments have in ``fcsd.plan.memory``.
FORWARD, BACKWARD, STEP = "forward", "backward", "step"
MOMENTS = {
    FORWARD: ("teacher's forward pass", "forward pass", "loss"),
    BACKWARD: ("backward pass", "gradient reduction"),
    STEP: ("optimizer step",),
}


def bench(
    shape: str,
    layers: int,
    *,
    seq: int,
    micro_batch: int,
    accumulation: int,
    steps: int,
    sets: Sequence[str] = (),
    cap: float | None = None,
) -> dict[str, Any]:
    """Plans a run, takes its steps, and returns the comparison; every process of the run must call it.

    Args:
        shape: a name in ``fcsd.bench.shapes``.
        seq: tokens of a row.
        micro_batch: rows in a forward pass of each process.
        accumulation: micro-batches in a step of each process.
        steps: optimizer steps to take.
        sets: ``--set`` assignments to the recipe. By default the recipe has KL, ZeRO-1, and experts spread over all
            processes.
        cap: GiB of a GPU's memory that torch may take, so that a large GPU stands for a smaller one. None sets no
            limit. It is ignored without a GPU.

    Returns: the recipe without its directories, and the predicted and the measured sizes in bytes, speeds and losses.
        ``measured`` also has the ``seconds`` of every step, those of its update alone (``update_seconds``), and
        ``host``, the largest resident memory of a process. If this rank's GPU memory was exhausted, ``measured`` has
        nothing but ``out_of_memory``, the message of torch; the other ranks may wait for this one without end.

    Raises:
        ConfigError: the shape is unknown, or the recipe is invalid for this model or this number of processes.
    """
    if shape not in SHAPES:
        raise unknown_value("shape", shape, SHAPES)
    world = join_world()
    if cap is not None and world.device.type == "cuda":
        there = torch.cuda.get_device_properties(world.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / there))
    original = SHAPES[shape](layers)
    size: Any = {"seq": seq, "micro_batch": micro_batch, "accumulation": accumulation, "steps": steps}
    with random_run(original, shape, **size, world=world, sets=sets) as (recipe, rewired):
        require_all_trained(recipe)
        planned = plan_run(recipe, Hardware(world.size))
    try:
        measured = _measure(recipe, rewired, original, world)
    except torch.OutOfMemoryError as error:
        measured = {"out_of_memory": reason_of(error)}
    settings = recipe.model_dump(exclude={"model", "teacher", "output_dir"})  # these directories no longer exist
    result: dict[str, Any] = {"shape": shape, "layers": layers, "processes": world.size, "cap": cap}
    result |= {"recipe": settings, "environment": snapshot()}
    result |= {"predicted": predicted(planned), "measured": measured}
    return result


def predicted(planned: Plan) -> dict[str, Any]:
    """The sizes in bytes and the speed that the plan predicts, under the same names as the measured ones."""
    memory = planned.memory
    held = {name: memory.peak.parts[name] for name in ("weights", "teacher", "optimizer")}
    peaks = {
        part: max(moment.total for moment in memory.moments if moment.name.startswith(names))
        for part, names in MOMENTS.items()
    }
    return {
        **held,
        **peaks,
        "peak": memory.peak.total,
        "gpu": memory.total,
        "host": planned.host,
        "tokens_per_second": planned.speed.tokens_per_second,
        "update_seconds": 3600 * planned.speed.parts["optimizer"] / planned.setup.steps,
    }


def _measure(recipe: Recipe, rewired: PretrainedConfig, original: PretrainedConfig, world: World) -> dict[str, Any]:
    """Takes the steps, and returns the largest sizes of any rank under the names of ``predicted``, speed and losses.

    On a CPU, only the speed and the losses are measured.
    """
    used = [0]

    def since() -> int:
        used.append(torch.cuda.memory_allocated() if world.device.type == "cuda" else 0)
        return used[-1] - used[-2]

    train, parallel = recipe.train, recipe.parallel
    draw: Any = {"dtype": DTYPES[train.dtype], "device": world.device, "seed": recipe.seed}
    model = randomise(rewired, parallel.ep_size, **draw, dispatched=parallel.quantised.any)
    sizes, source = {"weights": since(), "teacher": 0}, TeacherSource()
    if recipe.objective.needs_teacher:
        teacher = randomise(original, parallel.teacher_ep_size, **draw)
        pack_attention(teacher, recipe)
        compile_layers(teacher, recipe)
        wire_sharded(teacher, parallel.teacher_ep_size, parallel)
        source = LiveTeacher(teacher.requires_grad_(False), recipe.objective)
        sizes["teacher"] = since()
    built = build_training(model, source, recipe, world)
    update.install(built.engine, recipe)
    engine = _Watched(built.engine, world)
    training = replace(built, engine=engine)
    rows = training_rows(recipe, [random_corpus(model.config.vocab_size, recipe.data.seq_len)])
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(1, train.steps + 1):
        engine.peaks.clear()  # only the last step counts, because the first one allocates buffers and tunes kernels
        began = time.perf_counter()
        losses.append(train_step(training, rows, recipe, world, step)["loss"])
        seconds.append(time.perf_counter() - began)
    sizes |= {"optimizer": since(), **engine.peaks, "peak": max(engine.peaks.values(), default=0)}
    if world.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        sizes["gpu"] = total - free
    every = world.everywhere(lambda: sizes | {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
    named = [*sizes, "host"] if world.device.type == "cuda" else ["host"]
    largest = {name: max(own[name] for own in every) for name in named}
    speed = {"tokens_per_second": train.batch_tokens / seconds[-1], "seconds": seconds}
    return {**largest, **speed, "update_seconds": engine.updates, "losses": losses}


class _Watched:
    """Wraps an engine and measures its passes.

    Attributes:
        peaks: for each kind of pass, the peak memory since the previous pass, in bytes.
        updates: the seconds of each optimizer step, from the end of the backward pass on.
    """

    def __init__(self, engine: TrainEngine, world: World) -> None:
        self._engine, self._device = engine, world.device
        self.peaks: dict[str, int] = {}
        self.updates: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, *arguments: Any) -> Any:
        return self._after(FORWARD, lambda: self._engine(*arguments))

    def backward(self, *arguments: Any, **options: Any) -> Any:
        return self._after(BACKWARD, lambda: self._engine.backward(*arguments, **options))

    def step(self) -> Any:
        if not self._engine.is_gradient_accumulation_boundary():  # only counts the micro-batch
            return self._after(STEP, self._engine.step)
        began = finished(self._device)
        result = self._after(STEP, self._engine.step)
        self.updates.append(finished(self._device) - began)
        return result

    def _after(self, part: str, run: Callable[[], Any]) -> Any:
        result = run()
        if self._device.type == "cuda":
            self.peaks[part] = max(self.peaks.get(part, 0), torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
        return result


def to_text(result: dict[str, Any]) -> str:
    """Formats the comparison as a table with a line for each part, and the losses below it."""
    told, seen, recipe = result["predicted"], result["measured"], result["recipe"]
    train, parallel = recipe["train"], recipe["parallel"]
    title = (
        f"{result['shape']}, {result['layers']} layers, {result['processes']} processes, expert-parallel "
        f"{parallel['ep_size']}, ZeRO-{parallel['zero_stage']}, {train['dtype']}, {train['batch_tokens']} tokens a "
        f"step in micro-batches of {train['micro_batch_size']} x {recipe['data']['seq_len']}"
    )
    rows = {}
    for part in ("weights", "teacher", "optimizer", *MOMENTS, "peak", "gpu"):
        one, other = told[part], seen.get(part)
        measured = "not measured" if other is None else f"{other / GIB:.2f}"
        rows[part] = {"predicted GiB": f"{one / GIB:.2f}", "measured GiB": measured, "ratio": ratio(one, other, ".3f")}
    one, other = told["tokens_per_second"], seen["tokens_per_second"]
    rates = {"predicted GiB": f"{one:,.0f}", "measured GiB": f"{other:,.0f}"}
    rows["tokens/s"] = {**rates, "ratio": ratio(one, other, ".3f")}
    return "\n".join([title, table(rows), "losses " + " ".join(f"{loss:.4g}" for loss in seen["losses"])])


@command(app, "memory")
def memory(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="deepseek-v2-lite, qwen3-30b-a3b, llama4-scout, ... or tiny.")
    ],
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of a SHAPE.")] = 4,
    seq: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows per forward pass and GPU.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forward passes per step and GPU.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take; the last one counts.")] = 2,
    sets: Sets = [],  # noqa: B006
    cap: Annotated[
        float | None, typer.Option("--cap", metavar="GIB", min=1, help="Memory of a GPU that torch may take.")
    ] = None,
    gpus: Gpus = None,
    out: Annotated[Path | None, typer.Option(help="The JSON file to write; it must not exist.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take distillation steps of random weights, and compare their memory and time with what `fcsd plan` predicts."""
    require_extra("train", "benchmarks.train.memory")
    if out is not None:
        require_new(out)
    ensure_world(gpus, module="benchmarks.train.memory")
    size: dict[str, int] = {"seq": seq, "micro_batch": micro_batch, "accumulation": accumulation}
    found = bench(shape, layers, **size, steps=steps, sets=sets, cap=cap)
    exhausted = found["measured"].get("out_of_memory")
    if out is not None and (first_rank() or exhausted):
        write_json(out, found)
    if exhausted:
        raise DoesNotFitError(f"out of GPU memory: {exhausted}", "take fewer layers, or a larger --cap")
    if first_rank():
        emit(json.dumps(found, indent=2) if as_json else to_text(found))


if __name__ == "__main__":
    try:
        app()
    except SystemExit as end:
        leave(end)
