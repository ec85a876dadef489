"""The `fcsd bench` commands that measure training steps: their time, their memory, and what hides communication."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fcsd.bundled import located
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Gpus, Sets
from fcsd.disk import write_json
from fcsd.errors import ConfigError, DoesNotFitError
from fcsd.extras import require_extra
from fcsd.launch.world import first_rank

if TYPE_CHECKING:
    from fcsd.bench.training.workload import Workload

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

# Options of commands that take steps.
Wires = Annotated[
    list[str],
    typer.Option(
        "--wire",
        metavar="FORMAT",
        help="Also time overlapped steps whose rows are rounded to this format (docs/wires.md): int8, or "
        "dispatch=int8,combine=int8; repeatable.",
    ),
]
Layers = Annotated[int, typer.Option(min=1, help="Decoder layers.")]
MicroBatch = Annotated[int, typer.Option(min=1, help="Sequences per GPU and step.")]
Seq = Annotated[int, typer.Option(min=1, help="Tokens per sequence.")]


@command(app, "train")
def train(
    shape: Annotated[str, typer.Argument(help="deepseek-v2-lite, deepseek-v3, qwen3-30b-a3b or tiny.")],
    layers: Layers = 8,
    micro_batch: MicroBatch = 4,
    seq: Seq = 4096,
    routers: Annotated[
        str, typer.Option(help="initialised, uniform (as many tokens for every expert), or both.")
    ] = "initialised,uniform",
    variants: Annotated[
        str | None,
        typer.Option(
            help="Names from docs/overlap.md, separated by commas. The default is stock, standard, eager-sync, "
            "overlapped and comm-free; on GPUs all but stock are fused, as in a training run."
        ),
    ] = None,
    wires: Wires = [],  # noqa: B006
    recompute: Annotated[bool, typer.Option("--recompute", help="Activation checkpointing.")] = False,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Forward and backward alone.")] = False,
    dedup: Annotated[
        list[str],
        typer.Option(
            metavar="LEVEL",
            help="off, rank or node: how often the row of a token is sent, as parallel.dedup in a recipe. Repeatable: "
            "the first one holds for all variants, and overlapped steps are also timed with the others, alone and with "
            "each --wire.",
        ),
    ] = ["off"],  # noqa: B006
    node_size: Annotated[
        int | None,
        typer.Option(min=2, help="GPUs that form a node, for --dedup node and for variants with copies."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a variant in each round.")] = 3,
    gpus: Gpus = None,
    out: Annotated[Path | None, typer.Option(help="Directory for train.json and traces.")] = None,
    trace: Annotated[
        bool,
        typer.Option("--trace", help="Trace a step of the last overlapped variant under the first router into --out."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Time a training step of random weights: stock AutoEP, standard, eager-sync, overlapped, and without a wire."""
    require_extra("train", "fcsd bench train")
    from fcsd.bench.training.workload import Workload, usual_variants

    load = Workload(
        shape,
        layers,
        micro_batch,
        seq,
        routers=tuple(routers.split(",")),
        variants=usual_variants() if variants is None else tuple(variants.split(",")),
        recompute=recompute,
        optimizer=not no_optimizer,
        rounds=rounds,
        steps=steps,
        dedup=dedup[0],  # pyright: ignore[reportArgumentType]: checked by Workload
        node_size=node_size,
        wires=tuple(wires),
        more_dedups=tuple(dedup[1:]),  # pyright: ignore[reportArgumentType]
    )
    result = _bench(load, gpus, out, traced=trace)
    if as_json and first_rank():
        emit(json.dumps(result, indent=2))


def _bench(load: "Workload", gpus: int | None, out: Path | None, *, traced: bool) -> dict[str, Any]:
    """Start a process per GPU where that is needed, and return the result of ``fcsd.bench.training.step.bench``."""
    if traced and out is None:
        raise ConfigError("--trace writes its files into the directory --out, which is not given")
    if traced and not load.overlapped:
        raise ConfigError(
            "only a step that overlaps can be traced, and none of the variants overlaps",
            hint="Add one: --variants overlapped,...",
        )
    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.bench.training.step import bench

    return bench(load, out, traced=traced)


@command(app, "memory")
def memory(
    shape: Annotated[str, typer.Argument(help="deepseek-v2-lite, qwen3-30b-a3b, llama4-scout, ... or tiny.")],
    layers: Layers = 4,
    seq: Annotated[int, typer.Option(min=8, help="Tokens per row.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows per forward pass and GPU.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forward passes per step and GPU.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take; the last one counts.")] = 2,
    sets: Sets = [],  # noqa: B006
    cap: Annotated[
        float | None, typer.Option("--cap", metavar="GIB", min=1, help="Memory of a GPU that torch may take.")
    ] = None,
    gpus: Gpus = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the figures to.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take distillation steps of random weights, and compare their memory and time with what `fcsd plan` predicts."""
    require_extra("train", "fcsd bench memory")
    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.bench.memory import bench

    size: dict[str, int] = {"seq": seq, "micro_batch": micro_batch, "accumulation": accumulation}
    found = bench(shape, layers, **size, steps=steps, sets=sets, cap=cap)
    exhausted = found["measured"].get("out_of_memory")
    if out is not None and (first_rank() or exhausted):
        write_json(out, found)
    if exhausted:
        raise DoesNotFitError(f"out of GPU memory: {exhausted}", "take fewer layers, or a larger --cap")
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))


@command(app, "distill")
def distill(
    shape: Annotated[
        str,
        typer.Argument(metavar="SHAPE|MODEL", help="deepseek-v2-lite, dense-1.5b, ... or a checkpoint's directory."),
    ],
    layers: Layers = 8,
    micro_batch: MicroBatch = 4,
    seq: Seq = 4096,
    accumulation: Annotated[int, typer.Option(min=1, help="Forward passes per step and GPU.")] = 1,
    router: Annotated[str, typer.Option(help="initialised, or uniform: as many tokens for every expert.")] = "uniform",
    variants: Annotated[
        str, typer.Option(help="Some of these, separated by commas.")
    ] = "overlapped,masked,blocking,comm-free",
    wires: Wires = [],  # noqa: B006
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a variant in each round.")] = 3,
    sets: Sets = [],  # noqa: B006
    gpus: Gpus = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for distill.json and traces, or for baselines.json.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace a step of each variant and account for its time.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="BASELINES",
            help="Instead of variants, compare with public trainers on one device, each at its best micro-batch of all "
            "that divide --micro-batch: trl (GKDTrainer), trl-bf16 (its logits in bf16), loop-liger and loop-trl "
            "(a plain loop with a fused divergence), fcsd-plain (without its kernels), separated by commas.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time the whole distillation step of random weights, teacher included, beside its bound."""
    require_extra("train", "fcsd bench distill")
    if against is not None and (trace or wires):
        raise ConfigError("--against compares whole steps; leave --trace and --wire out")
    if trace and out is None:
        raise ConfigError("--trace writes its files into the directory --out, which is not given")
    from fcsd.bench.distill.workload import Load

    chosen = tuple(variants.split(","))
    load = Load(
        located(shape), layers, micro_batch, seq, accumulation, router, chosen, tuple(sets), rounds, steps, tuple(wires)
    )
    from fcsd.launch.world import ensure_world

    if against is not None:
        from benchmarks.distill.baselines.compare import bench as compare

        if gpus not in (None, 1):
            raise ConfigError("--against compares the steps of one process", hint="leave --gpus out")
        compared = compare(load, tuple(against.split(",")), out)
        if as_json:
            emit(json.dumps(compared, indent=2))
        return
    ensure_world(gpus)

    from fcsd.bench.distill.measure import bench

    found = bench(load, out, traced=trace)
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))


@command(app, "trace")
def trace(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="TRACE...", help="Chrome traces, one of each rank, or a directory.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="First take a step of this shape and trace it into --out.")
    ] = None,
    variant: Annotated[str, typer.Option(help="For --run: a variant of `train` that overlaps.")] = "overlapped",
    layers: Layers = 8,
    micro_batch: MicroBatch = 4,
    seq: Seq = 4096,
    gpus: Gpus = None,
    out: Annotated[Path | None, typer.Option(help="Directory for train.json and the traces of --run.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw one layer's forward and backward into this PNG.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Which layer to draw; default: the middle one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say how much of dispatch and combine is hidden by computation, in traces or in a step that --run takes."""
    if bool(files) == (run is not None):
        raise ConfigError("name either traces or, with --run, the shape whose step to trace")
    if picture is not None:
        require_extra("train", "fcsd bench trace --picture", "matplotlib")
    if run is not None:
        require_extra("train", "fcsd bench trace --run")
        from fcsd.bench.training.workload import Workload

        once = Workload(run, layers, micro_batch, seq, ("initialised",), (variant,), rounds=1, steps=1)
        world = _bench(once, gpus, out, traced=True)["world"]
        if out is None or not first_rank():
            return
        files = [out / f"rank-{rank}.json.gz" for rank in range(world)]

    from fcsd.parallel import trace as tracing

    traces = [tracing.read(path) for path in tracing.files(files or [])]
    if picture is not None:
        from benchmarks.train.trace_picture import draw

        draw(traces[0], picture, layer)
    emit(json.dumps(tracing.to_json(traces), indent=2) if as_json else tracing.to_text(traces))


@command(app, "scaling")
def scaling(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="TRAIN_JSON...", help="The files that `train` wrote, one for each world size."),
    ],
    picture: Annotated[Path | None, typer.Option(help="Draw speed-up over world size into this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the speed-up of several world sizes at one global batch. FarSkip Figure 5."""
    from benchmarks.train import scaling as sizes

    conditions, points = sizes.read(files)
    emit(json.dumps(sizes.to_json(conditions, points), indent=2) if as_json else sizes.to_text(conditions, points))
    if picture is not None:
        sizes.draw(conditions, points, picture)
