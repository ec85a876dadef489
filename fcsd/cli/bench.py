"""The `fcsd bench` commands, which measure a user's own machine: its links, the memory of a step, and its time."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fcsd.bundled import located
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Gpus, Sets
from fcsd.disk import write_json
from fcsd.errors import ConfigError, DoesNotFitError
from fcsd.extras import require_extra
from fcsd.launch.world import first_rank

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

# Options of commands that take steps.
Layers = Annotated[int, typer.Option(min=1, help="Decoder layers of a SHAPE.")]
Seq = Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")]


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
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory", hint="create it, or choose another --out")
    if out.exists():
        raise ConfigError(f"{out} exists", hint="Choose another --out. Nothing was overwritten.")
    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.bench.links import bench, write

    size = node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    write(bench(size), out, int(os.environ.get("RANK", 0)))
    if as_json and first_rank():
        emit(json.dumps({"file": str(out)}))


@command(app, "memory")
def memory(
    shape: Annotated[str, typer.Argument(help="deepseek-v2-lite, qwen3-30b-a3b, llama4-scout, ... or tiny.")],
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
            "GPUs all but stock are fused), or with --teacher overlapped, masked, blocking and comm-free.",
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
    out: Annotated[Path | None, typer.Option(help="Directory for step.json and traces.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Trace a step into --out, and account for its time.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time a training step (with --teacher, distillation) of random weights beside the communication-free bound."""
    require_extra("train", "fcsd bench step")
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
    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.bench.step.measure import bench

    found = bench(load, out, traced=trace)
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))
