"""``python -m benchmarks.train.step SHAPE|MODEL``: a training step beside its bound without communication.

With ``--teacher`` it is the step of ``fcsd distill``. ``measure`` says what is written.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from benchmarks.train.step.workload import Workload

from fcsd.checkpoint.location import located
from fcsd.cli.bench import require_new_in
from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Gpus, Sets, names
from fcsd.errors import ConfigError
from fcsd.extras import require_extra
from fcsd.launch.world import ensure_world, first_rank, leave

app = typer.Typer(rich_markup_mode=None)


@dataclass(frozen=True)
class Options:
    """The options that say what is timed, as they are written."""

    teacher: Annotated[
        bool, typer.Option("--teacher", help="The whole step of `fcsd distill`: teacher, loss and optimizer, too.")
    ] = False
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers of a SHAPE.")] = 8
    micro_batch: Annotated[int, typer.Option(min=1, help="Sequences per GPU and forward pass.")] = 4
    seq: Annotated[int, typer.Option(min=8, help="Tokens of a sequence.")] = 4096
    accumulation: Annotated[int, typer.Option(min=1, help="With --teacher: forward passes per step and GPU.")] = 1
    routers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="initialised, uniform (as many tokens for every expert), or both, which is the default without "
            "--teacher; with it, the default is uniform.",
        ),
    ] = None
    variants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Names from benchmarks/results/overlap.md. The default is stock, standard, eager-sync, overlapped and "
            "comm-free (on GPUs stock-tuned, too, and all but these two are fused), or with --teacher overlapped, "
            "masked, blocking and comm-free.",
        ),
    ] = None
    quantised: Annotated[
        list[str],
        typer.Option(
            "--quantised",
            metavar="FORMAT",
            help="Also time overlapped steps whose rows are rounded to this format (docs/slow_links.md): "
            "int8, or dispatch=int8,combine=int8; repeatable.",
        ),
    ] = field(default_factory=list)
    recompute: Annotated[bool, typer.Option("--recompute", help="Activation checkpointing.")] = False
    no_optimizer: Annotated[bool, typer.Option("--no-optimizer", help="Forward and backward alone.")] = False
    dedup: Annotated[
        list[str],
        typer.Option(
            metavar="LEVEL",
            help="off, rank or node: how often the row of a token is sent, as parallel.dedup in a recipe. Repeatable: "
            "the first one holds for all variants, and overlapped steps are also timed with the others, alone and with "
            "each --quantised.",
        ),
    ] = field(default_factory=lambda: ["off"])
    node_size: Annotated[
        int | None,
        typer.Option(min=2, help="GPUs that form a node, for --dedup node."),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="How often the variants take turns.")] = 3
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a variant in each round.")] = 3
    sets: Sets = field(default_factory=list)

    def workload(self, shape: str) -> Workload:
        """What they ask to time of a shape, or of a checkpoint's directory.

        Raises:
            ConfigError: a value is unknown, or is for the other kind of step.
        """
        return Workload(
            shape=located(shape),
            layers=self.layers,
            micro_batch=self.micro_batch,
            seq=self.seq,
            teacher=self.teacher,
            routers=names(self.routers),
            variants=names(self.variants),
            formats=tuple(self.quantised),
            rounds=self.rounds,
            steps=self.steps,
            accumulation=self.accumulation,
            sets=tuple(self.sets),
            recompute=self.recompute,
            optimizer=not self.no_optimizer,
            dedup=self.dedup[0],  # type: ignore[arg-type]: checked by Workload
            node_size=self.node_size,
            more_dedups=tuple(self.dedup[1:]),  # type: ignore[arg-type]
        )


@command(app, "step")
def step(
    shape: Annotated[
        str,
        typer.Argument(
            metavar="SHAPE|MODEL",
            help="deepseek-v2-lite, qwen3-30b-a3b, ...; with --teacher also dense-1.5b or a checkpoint's directory.",
        ),
    ],
    asked: Options,
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
    require_extra("train", "benchmarks.train.step")
    if out is not None:
        require_new_in(out, "step.json")
    load = asked.workload(shape)
    if trace and out is None:
        raise ConfigError("--trace writes its files into the directory --out, which is not given")
    if trace and not load.traced:
        raise ConfigError(
            "only a step that overlaps can be traced, and none of the variants overlaps",
            hint="Add one: --variants overlapped,...",
        )
    if trace and out is not None:
        require_new_in(out, "step.json", *load.traced)
    ensure_world(gpus, module="benchmarks.train.step")

    from benchmarks.train.step.measure import bench

    found = bench(load, out, traced=trace, tell=None if as_json else emit)
    if as_json and first_rank():
        emit(json.dumps(found, indent=2))


if __name__ == "__main__":
    try:
        app()
    except SystemExit as end:
        leave(end)
