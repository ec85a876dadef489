"""`fcsd eval`, `sweep-layers`, `choose-layers` and `chat`."""

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import (
    AsJson,
    BatchSize,
    DataMirror,
    Device,
    HeldOut,
    Model,
    Rewiring,
    Suite,
    Tasks,
    UnsafeExec,
    Variant,
)
from fcsd.errors import ConfigError


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Directories or hub ids.")],
    baseline: Annotated[str | None, typer.Option(metavar="MODEL", help="Compare with this one.")] = None,
    untrained: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Which MODEL is the untrained conversion: what was lost.")
    ] = None,
    margin: Annotated[float, typer.Option(min=0, help="Points below the baseline that are accepted.")] = 1.0,
    require: Annotated[
        str | None, typer.Option(metavar='"within POINTS"', help="Exit 9 unless every MODEL is so close.")
    ] = None,
    suite: Suite = "paper",
    tasks: Tasks = None,
    data_mirror: DataMirror = None,
    held_out: HeldOut = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N documents of a task.")] = None,
    batch_size: BatchSize = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest input in tokens; default: the model's.")
    ] = None,
    backend: Annotated[str, typer.Option(metavar="hf|vllm", help="What runs the models.")] = "hf",
    device: Annotated[
        str | None, typer.Option(metavar="cuda|cpu|auto", help="auto spreads a model too large for one GPU.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Processes, one per GPU; vLLM: the tensor parallelism.")
    ] = None,
    ep_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Spread every layer's experts over N of the processes.")
    ] = 1,
    generation: Annotated[
        str | None,
        typer.Option(metavar="batches|slots|graphs", help="How to generate; default: the fastest."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for results; a killed run resumes.")] = None,
    accept_unsafe_exec: UnsafeExec = False,
    as_json: AsJson = False,
) -> None:
    """Score models on the benchmarks. Prints a table; with --baseline also the differences and a verdict."""
    if baseline is None and (require or untrained):
        raise ConfigError("--require and --untrained compare with a --baseline, which is missing")

    from fcsd.launch.world import ensure_world

    if backend != "vllm":  # which starts its processes itself
        ensure_world(gpus)

    from fcsd.eval import compare, tables
    from fcsd.eval.engines.engine import Engine
    from fcsd.eval.harness import evaluate as run
    from fcsd.eval.harness import names_of

    if require is not None:
        compare.margin_of(require)  # better refused now than after hours
    others = [model for model in models if model != baseline]
    if untrained is not None and untrained not in others:
        raise ConfigError(f"--untrained {untrained} is not one of the models", "name it as a MODEL too")
    engine = Engine(
        backend=backend,
        device=device,
        batch_size=batch_size,
        max_length=max_length,
        generation=generation,
        ep_size=ep_size,
        gpus=gpus or 1 if backend == "vllm" else 1,  # answers do not depend on the number of processes
    )
    rows = run(
        models,
        suite=suite,
        tasks=tasks.split(",") if tasks else None,
        baseline=baseline,
        data_mirror=data_mirror,
        held_out=held_out,
        limit=limit,
        engine=engine,
        out=out,
        accept_unsafe_exec=accept_unsafe_exec,
    )
    if os.environ.get("RANK", "0") != "0":
        return
    comparisons = []
    if baseline:
        names = dict(zip(others, names_of([*others, baseline]), strict=False))
        name = names.get(untrained) if untrained else None
        comparisons = compare.compare(rows, untrained=name)
        if out:
            tables.report(rows, out, untrained=name, margin=margin)
    if as_json:  # per-question results are long; they are in --out
        scores = [{k: v for k, v in row.items() if k != "items"} for row in rows]
        emit(json.dumps({"rows": scores, "comparisons": [c.to_json(margin) for c in comparisons]}, indent=2))
    else:
        parts = [tables.plain_table(rows, comparisons)]
        if comparisons:
            parts += [tables.difference_table(comparisons, margin), *(c.sentence(margin) for c in comparisons)]
        emit("\n\n".join(filter(None, parts)))
    if require is not None:
        compare.require(require, comparisons)


def sweep_layers(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory for results; a killed sweep resumes.")],
    wiring: Rewiring = "farskip",
    variant: Variant = "full",
    points: Annotated[str | None, typer.Option(metavar="N,N,...", help="Numbers of layers; default: evenly.")] = None,
    suite: Suite = "paper",
    tasks: Tasks = None,
    data_mirror: DataMirror = None,
    held_out: HeldOut = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N documents of a task or text.")] = None,
    batch_size: BatchSize = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Score untrained conversions of the first N and the last N layers of MODEL, over N. FarSkip Figure 3."""
    from fcsd.eval.layers import sweep as sweeping

    sweep = sweeping.sweep_layers(
        model,
        out=out,
        wiring=wiring,
        variant=variant,
        points=_numbers(points),
        suite=suite,
        tasks=tasks.split(",") if tasks else None,
        data_mirror=data_mirror,
        held_out=held_out,
        limit=limit,
        batch_size=batch_size,
        device=device,
    )
    emit(json.dumps(sweep, indent=2) if as_json else sweeping.to_text(sweep))


def choose_layers(
    model: Model,
    text: Annotated[Path, typer.Option(help="Text file to measure the loss on.")],
    layers: Annotated[str | None, typer.Option(metavar="N[,N...]", help="How many layers to convert.")] = None,
    budget: Annotated[str | None, typer.Option(metavar="PERCENT%", help="Or how much the loss may rise.")] = None,
    held_out_check: Annotated[
        Path | None, typer.Option(help="Compare with first, last and random layers on this text.")
    ] = None,
    wiring: Rewiring = "farskip",
    variant: Variant = "full",
    tokens: Annotated[int, typer.Option(min=1, help="How much of each text one measurement reads.")] = 16384,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="Directory for results; a killed search resumes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose which layers of MODEL to convert, by measured loss. Prints what `fcsd convert --layers` takes."""
    from fcsd.eval.layers import choose as choosing

    choice = choosing.choose_layers(
        model,
        text=text,
        layers=_numbers(layers),
        budget=budget,
        check=held_out_check,
        wiring=wiring,
        variant=variant,
        tokens=tokens,
        device=device,
        out=out,
    )
    emit(json.dumps(choice, indent=2) if as_json else choosing.to_text(choice))


def chat(
    model: Model,
    baseline: Annotated[str | None, typer.Option(metavar="MODEL", help="Show this one's answers beside.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='A prompt per line, or .jsonl with a "prompt" each.')] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling, the same for every answer.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Let MODEL answer prompts: those of a file, those you type, or a fixed few."""
    import shutil
    from dataclasses import asdict

    from fcsd.serve import chat as chatting

    options = {"prompts": prompts, "seed": seed, "max_new_tokens": max_new_tokens, "device": device}
    for answers in chatting.chat(model, baseline=baseline, **options):
        columns = shutil.get_terminal_size((120, 24)).columns
        text = json.dumps([asdict(a) for a in answers]) if as_json else chatting.side_by_side(answers, columns)
        emit(text)


def _numbers(text: str | None) -> list[int] | None:
    """``2,5,8`` as numbers."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"{text!r} is not a list of numbers", "separate them by commas: 2,5,8")
    return [int(number) for number in text.split(",")]
