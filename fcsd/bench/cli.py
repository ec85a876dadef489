"""`fcsd bench`: where the time and the memory of a training step go."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fcsd.command import command, emit

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@command(app, "train")
def train(
    shape: Annotated[str, typer.Argument(help="deepseek-v2-lite, deepseek-v3, qwen3-30b-a3b or tiny.")],
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 8,
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per GPU and step.")] = 4,
    seq: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 4096,
    routers: Annotated[
        str, typer.Option(help="initialised, uniform (as many tokens for every expert), or both.")
    ] = "initialised,uniform",
    variants: Annotated[
        str,
        typer.Option(
            help="Some of these, separated by commas; also before-core, and each but stock with -fused behind it."
        ),
    ] = "stock,standard,eager-sync,overlapped,comm-free",
    recompute: Annotated[bool, typer.Option("--recompute", help="Activation checkpointing.")] = False,
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Forward and backward alone.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 5,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a variant in each round.")] = 3,
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for train.json and traces.")] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Trace an overlapped step of every rank under the first router into --out.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what train.json holds to stdout.")] = False,
) -> None:
    """Time a training step of random weights: stock AutoEP, standard, eager-sync, overlapped, and without a wire."""
    from fcsd.bench.workload import Workload
    from fcsd.launch import ensure_world

    load = Workload(
        shape,
        layers,
        micro_batch,
        seq,
        routers=tuple(routers.split(",")),
        variants=tuple(variants.split(",")),
        recompute=recompute,
        optimizer=not no_optimizer,
        rounds=rounds,
        steps=steps,
    )
    ensure_world(gpus)

    from fcsd.bench.train import bench

    result = bench(load, out, traced=trace)
    if as_json and os.environ.get("RANK", "0") == "0":
        emit(json.dumps(result, indent=2))


@command(app, "memory")
def memory(
    shape: Annotated[str, typer.Argument(help="deepseek-v2-lite, qwen3-30b-a3b, llama4-scout, ... or tiny.")],
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    seq: Annotated[int, typer.Option(min=8, help="Tokens per row.")] = 4096,
    micro_batch: Annotated[int, typer.Option(min=1, help="Rows per forward pass and GPU.")] = 1,
    accumulation: Annotated[int, typer.Option(min=1, help="Forward passes per step and GPU.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps to take; the last one counts.")] = 2,
    sets: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Of the recipe; repeatable.")] = [],  # noqa: B006
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write the figures to.")] = None,
) -> None:
    """Take distillation steps of random weights, and hold what `fcsd plan` says of them against what they take."""
    from fcsd.launch import ensure_world

    ensure_world(gpus)

    from fcsd.bench.memory import bench

    found = bench(shape, layers, seq=seq, micro_batch=micro_batch, accumulation=accumulation, steps=steps, sets=sets)
    if out is not None and os.environ.get("RANK", "0") == "0":
        out.write_text(json.dumps(found, indent=1))


@command(app, "trace")
def trace(
    files: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Chrome traces, one of each rank, or their directory.")
    ],
    picture: Annotated[Path | None, typer.Option(help="Draw one layer's forward and backward into this PNG.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Which layer to draw; default: the middle one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say how much dispatch and combine time lies under computation. FarSkip Table 3."""
    from fcsd.bench import trace as tracing

    traces = [tracing.read(path) for path in tracing.files(files)]
    if picture is not None:
        from fcsd.bench.trace_picture import draw

        draw(traces[0], picture, layer)
    emit(json.dumps(tracing.to_json(traces), indent=2) if as_json else tracing.to_text(traces))
