"""``python -m benchmarks.infer MODEL|SHAPE``: prefill and decoding in fcsd's engine, beside the bound."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fcsd.checkpoint.location import located
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, numbers
from fcsd.extras import require_extra
from fcsd.launch.world import first_rank

app = typer.Typer(rich_markup_mode=None)


@command(app, "infer")
def infer(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|SHAPE", help="A checkpoint's directory, or llama3-70b, qwen3-30b-a3b, ...")
    ],
    tp: Annotated[str, typer.Option(metavar="N[,N...]", help="Tensor-parallel degrees, one GPU for each rank.")] = "1",
    batch: Annotated[str, typer.Option(metavar="N[,N...]", help="How many prompts are answered at once.")] = "1",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 1024,
    new: Annotated[int, typer.Option(min=2, help="New tokens after each prompt.")] = 512,
    wirings: Annotated[
        str,
        typer.Option(
            help="standard, farskip, ladder, parallel, desync-2x, desync-4x, each over all layers; own is MODEL's."
        ),
    ] = "standard,ladder",
    reduce: Annotated[
        str,
        typer.Option(
            metavar="KIND[,KIND...]",
            help="How ranks sum; none is the bound, with wrong results.",
        ),
    ] = "nccl,none",
    bounds: Annotated[
        str | None, typer.Option(metavar="WIRING[,WIRING...]", help="The wirings whose bound is timed; default: all.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of a SHAPE.")] = 8,
    dtype: Annotated[str, typer.Option(metavar="bfloat16|float32", help="Data type of the weights.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant is timed.")] = 3,
    no_graphs: Annotated[bool, typer.Option("--no-graphs", help="Decode without CUDA graphs.")] = False,
    no_nvlink: Annotated[
        bool, typer.Option("--no-nvlink", help="Let NCCL send through host memory, as on machines without NVLink.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for infer.json and infer.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time prefill and decoding in fcsd's tensor-parallel engine, beside the bound without reductions."""
    degrees = tuple(numbers(tp))
    require_extra("eval", "benchmarks.infer", "accelerate", "matplotlib", "triton")
    from fcsd.launch.world import ensure_world

    if no_nvlink:
        os.environ["NCCL_P2P_DISABLE"] = "1"  # NCCL reads it when the processes start
    ensure_world(max(degrees), module="benchmarks.infer")

    from benchmarks.infer.own_engine import bench
    from benchmarks.infer.workload import Workload

    load = Workload(
        located(model),
        layers,
        degrees,
        tuple(numbers(batch)),
        prompt,
        new,
        tuple(wirings.split(",")),
        tuple(reduce.split(",")),
        dtype,
        graphs=not no_graphs,
        rounds=rounds,
        bounds=None if bounds is None else tuple(bounds.split(",")),
    )
    found = bench(load, out)
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))


if __name__ == "__main__":
    app()
