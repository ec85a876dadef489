"""The `fcsd bench` commands that measure something else than training steps: inference, links and quantised wires."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from fcsd.bundled import located
from fcsd.cli.bench import app
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, DataMirror, Device, Dtype, Gpus, Limit, Model, NoCompile, numbers
from fcsd.disk import write_text
from fcsd.errors import ConfigError
from fcsd.extras import require_extra
from fcsd.launch.world import first_rank


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
        str | None,
        typer.Option(
            metavar="KIND[,KIND...]",
            help="How ranks sum; none is the bound, with wrong results. The default is nccl,none, or vllm,none with "
            "--engine vllm.",
        ),
    ] = None,
    bounds: Annotated[
        str | None, typer.Option(metavar="WIRING[,WIRING...]", help="The wirings whose bound is timed; default: all.")
    ] = None,
    experts: Annotated[
        str, typer.Option(metavar="sliced|whole", help="Give each rank a slice of every expert, or some whole experts.")
    ] = "sliced",
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of a SHAPE.")] = 8,
    dtype: Annotated[str, typer.Option(metavar="bfloat16|float32", help="Data type of the weights.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(min=1, help="How often each variant is timed.")] = 3,
    engine: Annotated[
        str, typer.Option(metavar="own|vllm", help="Time fcsd's own engine, or vLLM with fcsd's plugin.")
    ] = "own",
    no_compile: NoCompile = False,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="grouped|split",
            help="How fcsd's engine attends in a step: by torch's kernel, or by kernels that divide the keys of a slot "
            "between programs and read no others; default: split on a GPU, except for gpt-oss.",
        ),
    ] = None,
    no_graphs: Annotated[
        bool, typer.Option("--no-graphs", help="Decode without CUDA graphs; vLLM does not compile then, either.")
    ] = False,
    no_nvlink: Annotated[
        bool, typer.Option("--no-nvlink", help="Let NCCL send through host memory, as on machines without NVLink.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Directory for infer.json and infer.png.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time prefill and decoding in fcsd's tensor-parallel engine or in vLLM, beside the bound without reductions."""
    degrees = tuple(numbers(tp))
    if engine == "own":
        require_extra("eval", "fcsd bench infer", "accelerate", "matplotlib", "triton")
        from fcsd.launch.world import ensure_world

        if no_nvlink:
            os.environ["NCCL_P2P_DISABLE"] = "1"  # NCCL reads it when the processes start
        ensure_world(max(degrees))

        from benchmarks.infer.own_engine import bench
    else:
        if no_nvlink:
            raise ConfigError("--no-nvlink needs --engine own: vLLM's own all-reduces use NVLink without NCCL")
        from benchmarks.infer.vllm_engine import bench  # vLLM starts its own processes

    from benchmarks.infer.workload import Workload

    load = Workload(
        located(model),
        layers,
        degrees,
        tuple(numbers(batch)),
        prompt,
        new,
        tuple(wirings.split(",")),
        None if reduce is None else tuple(reduce.split(",")),
        experts,  # type: ignore[arg-type]
        dtype,
        graphs=not no_graphs,
        rounds=rounds,
        bounds=None if bounds is None else tuple(bounds.split(",")),
        engine=engine,
        compile=not no_compile,
        attention=attention,
    )
    found = bench(load, out)
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))


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


@command(app, "wires")
def wires(
    model: Model,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The held-out text: .jsonl, .jsonl.gz or .parquet.")],
    out: Annotated[
        Path, typer.Option(help="Directory for wires.json, tables.md and pareto.png; a killed study resumes from it.")
    ],
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Read every N-th document of the text.")] = 1,
    max_length: Annotated[int, typer.Option(min=1, help="The length of the windows of text, in tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in one forward pass.")] = 4,
    tp_degree: Annotated[int, typer.Option(min=2, help="The tensor-parallel degree of the all-reduce.")] = 4,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The tasks of table 7; none for an empty name.")
    ] = None,
    limit: Limit = None,
    data_mirror: DataMirror = None,
    device: Device = None,
    dtype: Dtype = None,
    processes: Annotated[
        int, typer.Option(min=1, help="How many formats are measured at a time, each by a process of its own.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure what each format of the wire costs MODEL, by direction. FlashCommunication V2's tables of quality."""
    require_extra("eval", "fcsd bench wires")
    import torch
    from studies.wires import study, tables
    from studies.wires.plan import TASKS

    from fcsd.models.load_options import check_device, check_dtype, default_dtype

    check_dtype(dtype)
    check_device(device)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = study.Study(
        model,
        text,
        every=every,
        max_length=max_length,
        batch_size=batch_size,
        tp_degree=tp_degree,
        tasks=TASKS if tasks is None else tuple(filter(None, tasks.replace(" ", "").split(","))),
        limit=limit,
        data_mirror=data_mirror,
        device=device,
        dtype=dtype or default_dtype(device == "cpu"),
        processes=processes,
    )
    found = study.run(settings, out)
    report = tables.to_text(found)
    write_text(out / "tables.md", report + "\n")
    tables.draw(found, out / "pareto.png")
    emit(json.dumps(found, indent=2) if as_json else report)
