"""The `fcsd bench` commands, which measure a user's own machine: links, a step's memory and time, and serving."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fcsd.bundled import located
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Gpus, Sets, numbers, shares
from fcsd.cli.panels import Commands
from fcsd.disk import read_input, require_folder, write_json
from fcsd.errors import ConfigError, DoesNotFitError, FcsdError
from fcsd.extras import require_extra
from fcsd.launch.world import first_rank

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)

# Options of commands that take steps.
Layers = Annotated[int, typer.Option(min=1, help="Decoder layers of a SHAPE.")]
Seq = Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")]


def _require_new(out: Path) -> None:
    """Refuses a file that exists or has no directory, before anything is measured."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory", hint="create it, or choose another --out")
    if out.exists():
        raise ConfigError(f"{out} exists", hint="Choose another --out. Nothing was overwritten.")


def _require_new_in(folder: Path, result: str, *names: str) -> None:
    """Refuses a directory that cannot be written, or that has one of these files or folders already.

    What a run has left that was cut short, as its result says, does not count: the next run keeps it under a new name.
    """
    require_folder(folder, "--out")
    if _cut_short(folder / result):
        return
    names = (result, *names)
    for name in names:
        if (folder / name).exists():
            _require_new(folder / name)


def _cut_short(path: Path) -> bool:
    """Whether a result says of itself that its run did not come to its end."""
    try:
        return json.loads(read_input(path)).get("complete") is False
    except (OSError, ValueError, AttributeError, RecursionError):
        return False  # nothing that may be moved


@command(app, "links")
def links(
    out: Annotated[Path, typer.Option(help="The machine file to write; it must not exist.")],
    node_size: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a node; default: those of this machine that take part.")
    ] = None,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Measure the links inside of a node and between nodes, for `fcsd plan --machine`. On several nodes: torchrun."""
    require_extra("train", "fcsd bench links", "scipy")
    _require_new(out)
    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.bench.links import bench, write

    size = node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    write(bench(size), out, int(os.environ.get("RANK", 0)))
    if as_json and first_rank():
        emit(json.dumps({"file": str(out)}))


@command(app, "memory")
def memory(
    shape: Annotated[
        str, typer.Argument(metavar="SHAPE", help="deepseek-v2-lite, qwen3-30b-a3b, llama4-scout, ... or tiny.")
    ],
    layers: Layers = 4,
    seq: Seq = 4096,
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
    require_extra("train", "fcsd bench memory")
    if out is not None:
        _require_new(out)
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


@command(app, "step")
def step(
    shape: Annotated[
        str,
        typer.Argument(
            metavar="SHAPE|MODEL",
            help="deepseek-v2-lite, qwen3-30b-a3b, ...; with --teacher also dense-1.5b or a checkpoint's directory.",
        ),
    ],
    teacher: Annotated[
        bool, typer.Option("--teacher", help="The whole step of `fcsd distill`: teacher, loss and optimizer, too.")
    ] = False,
    layers: Layers = 8,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per GPU and forward pass.")] = 4,
    seq: Seq = 4096,
    accumulation: Annotated[int, typer.Option(min=1, help="With --teacher: forward passes per step and GPU.")] = 1,
    routers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="initialised, uniform (as many tokens for every expert), or both, which is the default without "
            "--teacher; with it, the default is uniform.",
        ),
    ] = None,
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Names from docs/overlap.md. The default is stock, standard, eager-sync, overlapped and comm-free (on "
            "GPUs stock-tuned, too, and all but these two are fused), or with --teacher overlapped, masked, blocking "
            "and comm-free.",
        ),
    ] = None,
    quantised: Annotated[
        list[str],
        typer.Option(
            "--quantised",
            metavar="FORMAT",
            help="Also time overlapped steps whose rows are rounded to this format (docs/quantised_communication.md): "
            "int8, or dispatch=int8,combine=int8; repeatable.",
        ),
    ] = [],  # noqa: B006
    recompute: Annotated[bool, typer.Option("--recompute", help="Activation checkpointing.")] = False,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Forward and backward alone.")] = False,
    dedup: Annotated[
        list[str],
        typer.Option(
            metavar="LEVEL",
            help="off, rank or node: how often the row of a token is sent, as parallel.dedup in a recipe. Repeatable: "
            "the first one holds for all variants, and overlapped steps are also timed with the others, alone and with "
            "each --quantised.",
        ),
    ] = ["off"],  # noqa: B006
    node_size: Annotated[
        int | None,
        typer.Option(min=2, help="GPUs that form a node, for --dedup node and for variants with copies."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a variant in each round.")] = 3,
    sets: Sets = [],  # noqa: B006
    gpus: Gpus = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for step.json and traces, which must not exist there. Those of an interrupted run are kept "
            "as step.1.json and so on."
        ),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Trace a step into --out, and account for its time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time a training step (with --teacher, distillation) of random weights beside the communication-free bound."""
    require_extra("train", "fcsd bench step")
    if out is not None:
        _require_new_in(out, "step.json")
    from fcsd.bench.step.workload import Workload

    load = Workload(
        located(shape),
        layers,
        micro_batch,
        seq,
        teacher=teacher,
        routers=() if routers is None else tuple(routers.split(",")),
        variants=() if variants is None else tuple(variants.split(",")),
        formats=tuple(quantised),
        rounds=rounds,
        steps=steps,
        accumulation=accumulation,
        sets=tuple(sets),
        recompute=recompute,
        optimizer=not no_optimizer,
        dedup=dedup[0],  # pyright: ignore[reportArgumentType]: checked by Workload
        node_size=node_size,
        more_dedups=tuple(dedup[1:]),  # pyright: ignore[reportArgumentType]
    )
    if trace and out is None:
        raise ConfigError("--trace writes its files into the directory --out, which is not given")
    if trace and not load.traced:
        raise ConfigError(
            "only a step that overlaps can be traced, and none of the variants overlaps",
            hint="Add one: --variants overlapped,...",
        )
    if trace and out is not None:
        _require_new_in(out, "step.json", *load.traced)
    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.bench.step.measure import bench

    found = bench(load, out, traced=trace)
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))


@command(app, "serve")
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|SHAPE", help="A directory in which config.json is enough, or llama3-8b, qwen3-30b-a3b, ..."
        ),
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTION...", help="Options of `vllm serve` for every variant, behind `--`."),
    ] = None,
    wirings: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="ladder, farskip, parallel, desync-2x, ..., each over all layers; own is that of a converted MODEL. "
            "The default is own, farskip for an original with experts, and ladder for any other.",
        ),
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="The tensor-parallel degree.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Give each rank whole experts.")] = False,
    dp: Annotated[int, typer.Option(min=1, help="Replicas of --tp GPUs each, behind one address.")] = 1,
    lengths: Annotated[
        str, typer.Option("--prompts", metavar="N[,N...]", help="Tokens of a prompt.")
    ] = "512,2048,8192",
    arrivals: Annotated[int, typer.Option(min=1, help="Prompts that arrive at once.")] = 16,
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    batches: Annotated[str, typer.Option(metavar="N[,N...]", help="Answers that are decoded at once.")] = "1,16,64",
    loads: Annotated[
        str, typer.Option(metavar="X[,X...]", help="Rates of random arrivals, as shares of the measured peak; or none.")
    ] = "0.3,0.6,0.9",
    layers: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers of a SHAPE; the default is all of its model.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 3,
    minutes: Annotated[float, typer.Option(help="The time that everything may take.")] = 10.0,
    engine: Annotated[
        str, typer.Option(metavar="vllm|own", help="Servers of vLLM, or fcsd's own engine where there is no vLLM.")
    ] = "vllm",
    sums: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND...]",
            help="The backends of --reduce with which a wiring is timed, in flight and at once, such as "
            "nccl,quantised:int8; a quantised one changes results. The default is nccl, and symmetric where it works; "
            "under vLLM it is vllm.",
        ),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the fastest way to sum for each size to this new .json file."),
    ] = None,
    heal_hours: Annotated[
        float | None,
        typer.Option(
            metavar="H", min=0, help="GPU-hours of healing (hours of `fcsd plan` x GPUs), for the break-even."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for serve.json and serve.png, which must not exist there. An interrupted run's file is "
            "kept as serve.1.json."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast MODEL would be served if it were converted, beside the original at its best and the bound."""
    if out is not None:
        _require_new_in(out, "serve.json", "serve.png")
    from fcsd.bench.serve.workload import Workload

    load = Workload(
        located(model),
        layers,
        () if wirings is None else tuple(wirings.split(",")),
        tp,
        dp,
        ep,
        tuple(numbers(lengths)),
        arrivals,
        answer,
        tuple(numbers(batches)),
        () if loads == "none" else shares(loads),
        rounds,
        minutes,
        engine,
        tuple(options or ()),
        () if sums is None else tuple(sums.split(",")),
    )
    if table is not None:
        from fcsd.bench.serve.choice import check_table

        check_table(load, table)
    if engine == "own":
        require_extra("eval", "fcsd bench serve --engine own", "accelerate", "matplotlib")
        from fcsd.launch.world import ensure_world

        ensure_world(tp)

    from fcsd.bench.serve.measure import bench

    found, text = bench(load, out, heal_hours, table)
    if first_rank():
        emit(json.dumps(found, indent=2) if as_json else text)
    if table is not None and not found["tables"]:
        raise FcsdError("no table was written: the wiring was not timed in two ways", "The result says what failed.")
    if not found["ratios"]:
        raise FcsdError(
            "no converted model was compared with the original", "The result says which variants failed, and of what."
        )
