"""The commands `fcsd eval`, `sweep-layers`, `choose-layers` and `chat`."""

import json
import logging
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import (
    ApplyChatTemplate,
    AsJson,
    BatchSize,
    DataMirror,
    Device,
    Dtype,
    HeldOut,
    Limit,
    Model,
    NumFewshot,
    Rewiring,
    Suite,
    Tasks,
    UnsafeExec,
    Variant,
)
from fcsd.errors import ConfigError

log = logging.getLogger(__name__)


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Directories or hub ids.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that the others are compared with.")
    ] = None,
    untrained: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="The MODEL that is the untrained conversion: it shows what was lost."),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, help="How many points below the baseline are accepted in the verdict.")
    ] = 1.0,
    require: Annotated[
        str | None,
        typer.Option(
            metavar='"within POINTS[, each within POINTS]"',
            help="Exit with 9 unless the mean of every MODEL is shown to be so close to the baseline. The second part "
            "also refuses a MODEL of which a single task is shown to be further below.",
        ),
    ] = None,
    suite: Suite = "paper",
    tasks: Tasks = None,
    num_fewshot: NumFewshot = None,
    apply_chat_template: ApplyChatTemplate = None,
    data_mirror: DataMirror = None,
    held_out: HeldOut = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="The longest input in tokens; the default is the model's own limit.")
    ] = None,
    backend: Annotated[str, typer.Option(metavar="hf|vllm", help="What runs the models.")] = "hf",
    device: Annotated[
        str | None,
        typer.Option(metavar="cuda|cpu|auto", help="auto spreads a model that is too large for one GPU."),
    ] = None,
    dtype: Dtype = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="The number of processes, one per GPU; under vLLM, the tensor-parallel degree."),
    ] = None,
    ep_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Divide the experts of every layer among N of the processes.")
    ] = 1,
    generation: Annotated[
        str | None,
        typer.Option(metavar="batches|slots|graphs", help="How to generate; the default is the fastest way."),
    ] = None,
    wire: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTION=FORMAT,...",
            help="Score the models as if their communication were quantised: dispatch, combine, or all-reduce with "
            "--tp-degree. The baseline is scored without it, and may be the same MODEL.",
        ),
    ] = None,
    tp_degree: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="The tensor-parallel degree of --wire all-reduce=FORMAT.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The directory for results; an evaluation that was killed resumes from it. The default for a MODEL "
            "in a run directory is its folder eval, from which `fcsd export` takes the scores of the model card."
        ),
    ] = None,
    accept_unsafe_exec: UnsafeExec = False,
    as_json: AsJson = False,
) -> None:
    """Score models on benchmarks. Prints a table; with --baseline also the differences and a verdict.

    `fcsd eval sweep-layers` and `fcsd eval choose-layers` are the commands of these names.
    """
    if baseline is None and (require or untrained):
        raise ConfigError("--require and --untrained compare with a --baseline, which is missing")
    if tp_degree is not None and wire is None:
        raise ConfigError("--tp-degree is for --wire all-reduce=FORMAT, which is missing")

    from fcsd.launch.world import ensure_world

    if backend != "vllm":  # vLLM starts its processes itself
        ensure_world(gpus)

    from fcsd.eval import compare, tables
    from fcsd.eval.engines.engine import Engine
    from fcsd.eval.engines.wire import QuantisedWire
    from fcsd.eval.harness import evaluate_models, named_models

    required = None if require is None else compare.Requirement.parse(require)  # refused before hours of work
    if untrained is not None and (untrained not in models or untrained == baseline):
        raise ConfigError(f"--untrained {untrained} is not one of the models", "name it as a MODEL too")
    out = out or _folder_for_scores(models)
    engine = Engine(
        backend=backend,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        max_length=max_length,
        generation=generation,
        ep_size=ep_size,
        gpus=gpus or 1 if backend == "vllm" else 1,  # answers do not depend on the number of processes
        wire=None if wire is None else QuantisedWire.parse(wire, tp_degree),
    )
    results = evaluate_models(
        models,
        suite=suite,
        tasks=_names(tasks),
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
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
        named = named_models(models, baseline, engine)[1:]
        name = next((name for name, model, _ in named if model == untrained), None)
        comparisons = compare.compare_models(results, untrained=name)
        if out:
            tables.report(results, out, comparisons, margin=margin)
    if as_json:  # the results of single questions are long; they are in --out
        scores = [{key: value for key, value in result.items() if key != "items"} for result in results]
        emit(json.dumps({"rows": scores, "comparisons": [c.to_json(margin) for c in comparisons]}, indent=2))
    else:
        parts = [tables.plain_table(results, comparisons)]
        if comparisons:
            parts += [tables.difference_table(comparisons, margin), *(c.sentence(margin) for c in comparisons)]
        emit("\n\n".join(filter(None, parts)))
    if required is not None:
        required.check(comparisons)


def _folder_for_scores(models: list[str]) -> Path | None:
    """The folder ``eval`` of the run that a model lies in; None if the models lie in no run, or in several."""
    from fcsd.eval.results import run_of

    runs = {run for model in models if (run := run_of(model)) is not None}
    if len(runs) != 1:
        return None
    folder = runs.pop() / "eval"
    log.info("results go to %s, from which `fcsd export` takes the scores of the model card", folder)
    return folder


def sweep_layers(
    model: Model,
    out: Annotated[Path, typer.Option(help="The directory for results; a sweep that was killed resumes from it.")],
    wiring: Rewiring = "farskip",
    variant: Variant = "full",
    points: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="The numbers of layers to convert; the default spreads them.")
    ] = None,
    suite: Suite = "paper",
    tasks: Tasks = None,
    num_fewshot: NumFewshot = None,
    apply_chat_template: ApplyChatTemplate = None,
    data_mirror: DataMirror = None,
    held_out: HeldOut = None,
    limit: Limit = None,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = None,
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
        tasks=_names(tasks),
        num_fewshot=num_fewshot,
        apply_chat_template=apply_chat_template,
        data_mirror=data_mirror,
        held_out=held_out,
        limit=limit,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
    )
    emit(json.dumps(sweep, indent=2) if as_json else sweeping.to_text(sweep))


def choose_layers(
    model: Model,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text on which the loss is measured.")],
    layers: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="How many layers to convert; a choice for each number.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="PERCENT%", help="Or: convert as many layers as raise the loss by this.")
    ] = None,
    held_out_check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare the choice with first, last and random layers on this text."),
    ] = None,
    wiring: Rewiring = "farskip",
    variant: Variant = "full",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens of each text one measurement reads.")] = 16384,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option(help="The directory for results; a search that was killed resumes from it.")
    ] = None,
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
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        out=out,
    )
    emit(json.dumps(choice, indent=2) if as_json else choosing.to_text(choice))


def chat(
    model: Model,
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Show the answers of this model beside those of MODEL.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='A file with a prompt per line, or .jsonl with a "prompt" per line.')
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the sampling, the same for every answer.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer, in tokens.")] = None,
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


def _names(text: str | None) -> list[str] | None:
    """The names in a list such as ``piqa, boolq``."""
    return [name.strip() for name in text.split(",") if name.strip()] if text else None


def _numbers(text: str | None) -> list[int] | None:
    """The numbers in a list such as ``2,5,8``."""
    if text is None:
        return None
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"{text!r} is not a list of numbers", "separate them by commas: 2,5,8")
    return [int(number) for number in text.split(",")]
