"""The `fcsd bench` commands, which measure a user's own machine: its links, and serving."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Concurrency, Gpus, Shape, names, numbers, shares
from fcsd.cli.panels import Commands
from fcsd.disk import read_input, require_folder
from fcsd.errors import ConfigError, FcsdError
from fcsd.extras import require_extra
from fcsd.launch.world import ensure_world, first_rank, gpus_here

if TYPE_CHECKING:
    from fcsd.bench.serve.workload import Workload

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)


def require_new(out: Path) -> None:
    """Refuses a file that exists or has no directory, before anything is measured."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory", hint="create it, or choose another --out")
    if out.exists():
        raise ConfigError(f"{out} exists", hint="Choose another --out. Nothing was overwritten.")


def require_new_in(folder: Path, result: str, *names: str) -> None:
    """Refuses a directory that cannot be written, or that has one of these files or folders already.

    What a run has left that was cut short, as its result says, does not count: the next run keeps it under a new name.
    """
    require_folder(folder, "--out")
    if _cut_short(folder / result):
        return
    names = (result, *names)
    for name in names:
        if (folder / name).exists():
            require_new(folder / name)


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
    """Measure the links inside of a node and between nodes, and sums of a node. On several nodes: torchrun."""
    require_extra("train", "fcsd bench links", "scipy")
    require_new(out)
    from fcsd.bench.links import bench, counts_of, to_text, write

    if "WORLD_SIZE" not in os.environ:
        from fcsd.bench.serve.host_ways import measure

        gpus = gpus or gpus_here()
        measure(counts_of(node_size or gpus))  # by processes of its own, before NCCL of these has kernels on the GPUs
    ensure_world(gpus)

    machine = bench(node_size or int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    if first_rank():
        write(machine, out)
        emit(json.dumps({"file": str(out)}) if as_json else f"{to_text(machine)}\nwritten: {out}")


@dataclass(frozen=True)
class ServeOptions:
    """The options of `fcsd bench serve` that say what is timed, as they are written."""

    wirings: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="ladder, farskip, parallel, desync-2x, ..., each over all layers; own is that of a converted MODEL. "
            "The default is own, farskip for an original with experts, and ladder for any other.",
        ),
    ] = None
    gpus: Gpus = None
    ep: Annotated[bool, typer.Option("--ep", help="Give each rank whole experts.")] = False
    dp: Annotated[int, typer.Option(min=1, help="Replicas, behind one address, of so many GPUs each.")] = 1
    prompt_tokens: Annotated[str, typer.Option(metavar="N[,N...]", help="Tokens of a prompt.")] = "512,2048,8192"
    concurrency: Concurrency = 16
    answer: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64
    batches: Annotated[str, typer.Option(metavar="N[,N...]", help="Answers that are decoded at once.")] = "1,16,64"
    loads: Annotated[
        str, typer.Option(metavar="X[,X...]", help="Rates of random arrivals, as shares of the measured peak; or none.")
    ] = "0.3,0.6,0.9"
    depth: Annotated[
        int | None, typer.Option(min=1, help="Decoder layers of a SHAPE; the default is all of its model.")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 3
    minutes: Annotated[float, typer.Option(help="The time that everything may take.")] = 10.0
    all_reduce: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[,KIND...]",
            help="The ways to sum with which a wiring is timed, in flight and at once, such as "
            "vllm,quantised:int8; a quantised one changes results. The default is vllm.",
        ),
    ] = None

    def workload(self, model: str, options: list[str]) -> "Workload":
        """What they ask to time of a model, with further options of vLLM.

        Raises:
            ConfigError: a value is not a list of numbers, is unknown or out of range.
        """
        from fcsd.bench.serve.workload import Workload
        from fcsd.checkpoint.location import located

        return Workload(
            model=located(model),
            layers=self.depth,
            wirings=names(self.wirings),
            tp=self.gpus or 1,
            dp=self.dp,
            ep=self.ep,
            prompts=tuple(numbers(self.prompt_tokens)),
            arrivals=self.concurrency,
            answer=self.answer,
            batches=tuple(numbers(self.batches)),
            loads=() if self.loads == "none" else shares(self.loads),
            rounds=self.rounds,
            minutes=self.minutes,
            options=tuple(options),
            sums=names(self.all_reduce),
        )


@command(app, "serve")
def serve(
    model: Shape,
    asked: ServeOptions,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTION...", help="Options of `vllm serve` for every variant, behind `--`."),
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
        require_new_in(out, "serve.json", "serve.png")
    load = asked.workload(model, options or [])
    if table is not None:
        from fcsd.bench.serve.choice import check_table

        check_table(load, table)
    if asked.gpus is None:
        load = replace(load, tp=max(1, gpus_here(lambda count: count % load.dp == 0) // load.dp))

    from fcsd.bench.serve.measure import bench

    found, text = bench(load, out, heal_hours, table)
    emit(json.dumps(found, indent=2) if as_json else text)
    if table is not None and not found["tables"]:
        raise FcsdError("no table was written: the wiring was not timed in two ways", "The result says what failed.")
    if not found["ratios"]:
        raise FcsdError(
            "no converted model was compared with the original", "The result says which variants failed, and of what."
        )
