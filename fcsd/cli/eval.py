"""The commands `fcsd eval` and `chat`."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import (
    AllReduce,
    AsJson,
    BatchSize,
    Device,
    Dtype,
    Gpus,
    Model,
    UnsafeExec,
    require_models,
)
from fcsd.errors import ConfigError
from fcsd.extras import EXTRAS, require_extra
from fcsd.launch.world import first_rank

log = logging.getLogger(__name__)


def evaluate(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Directories or hub ids.")],
    suite: Annotated[
        str,
        typer.Option(
            help="The benchmarks: paper, strict, ladder, pretrain-farskip, pretrain-ladder, quickstart, or a YAML file "
            "of your own."
        ),
    ] = "paper",
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Only these tasks: some of the suite, or any others that lm-eval has."),
    ] = None,
    num_fewshot: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Show N examples in each prompt of the tasks named by --tasks."),
    ] = None,
    apply_chat_template: Annotated[
        bool | None,
        typer.Option(
            "--apply-chat-template/--no-apply-chat-template",
            help="Whether to put the prompts of the tasks named by --tasks into the tokenizer's chat template.",
        ),
    ] = None,
    data_mirror: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Read data sets from this directory instead of from the hub.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Measure the loss on this text or token ids (column input_ids), too: .jsonl, .jsonl.gz or .parquet "
            "files.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Use only N questions of every benchmark, spread evenly over its tasks and over each task.",
        ),
    ] = None,
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
    batch_size: BatchSize = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="The longest input in tokens; the default is the model's own limit.")
    ] = None,
    backend: Annotated[
        str,
        typer.Option(metavar="hf|vllm|own", help="What runs the models; own is fcsd's tensor-parallel engine."),
    ] = "hf",
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="cuda|cpu|auto", help="auto spreads a model that is too large for one GPU."),
    ] = None,
    dtype: Dtype = None,
    gpus: Gpus = None,
    ep_size: Annotated[
        int, typer.Option(min=1, metavar="N", help="Divide the experts of every layer among N of the processes.")
    ] = 1,
    generation: Annotated[
        str | None,
        typer.Option(metavar="batches|slots|graphs", help="How to generate; the default is the fastest way."),
    ] = None,
    all_reduce: AllReduce = "nccl",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The directory for results; an evaluation that was killed resumes from it. The default for a MODEL "
            "in a run directory is its folder eval, from which `fcsd export` takes the scores of the model card."
        ),
    ] = None,
    log_samples: Annotated[
        bool, typer.Option("--log-samples", help="Also write every prompt, answer and score to OUT/samples.")
    ] = False,
    accept_unsafe_exec: UnsafeExec = False,
    as_json: AsJson = False,
) -> None:
    """Score models on benchmarks. Prints a table; with --baseline also the differences and a verdict."""
    if baseline is None and (require or untrained):
        raise ConfigError("--require and --untrained compare with a baseline, and no --baseline is given")
    require_extra("eval", "fcsd eval", *(package for package in EXTRAS["eval"] if package != "evalplus"))

    from fcsd.eval.suite import EVALPLUS, LM_EVAL, select_any

    # What follows is checked before torch and scipy are imported, which takes seconds.
    require_models(*models, baseline)
    names = None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()]
    prompts: dict[str, Any] = {"num_fewshot": num_fewshot, "apply_chat_template": apply_chat_template}
    benchmarks = select_any(suite, names, **prompts)
    if any(benchmark.harness == EVALPLUS for benchmark in benchmarks):
        require_extra("eval", "fcsd eval of HumanEval+ and MBPP+", "evalplus")
    if unlisted := [each.task for each in benchmarks if each.harness == LM_EVAL and not each.directory]:
        from fcsd.eval.task_files import folders_of

        folders_of(unlisted)

    from fcsd.eval import compare
    from fcsd.eval.engines.engine import Engine
    from fcsd.launch.preflight import launched
    from fcsd.launch.world import ensure_world, gpus_here

    required = None if require is None else compare.Requirement.parse(require)
    if untrained is not None and (untrained not in models or untrained == baseline):
        raise ConfigError(f"--untrained {untrained} is not one of the models", "name it as a MODEL too")
    alone = device not in (None, "cuda")  # one device, or all of them for one process
    engine = Engine(
        backend=backend,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        max_length=max_length,
        generation=generation,
        ep_size=ep_size,
        # Under hf the answers do not depend on the number of processes.
        gpus=gpus or 1 if backend in ("vllm", "own") else 1,
        reduce=all_reduce,
    )
    engine.check(1 if backend == "vllm" else max(gpus or (1 if backend == "own" else ep_size), launched()[1]))
    if gpus is None:
        gpus = 1 if alone else gpus_here(lambda count: count % ep_size == 0)
        engine = engine if backend == "hf" else replace(engine, gpus=gpus)
    if backend != "vllm":  # vLLM starts its processes itself
        ensure_world(gpus)

    from fcsd.eval import tables
    from fcsd.eval.harness import evaluate_models, named_models

    out = out or _folder_for_scores(models)
    results = evaluate_models(
        models,
        suite=suite,
        tasks=names,
        baseline=baseline,
        engine=engine,
        data_mirror=data_mirror,
        held_out=held_out,
        limit=limit,
        out=out,
        log_samples=log_samples,
        accept_unsafe_exec=accept_unsafe_exec,
        verdict=required is not None,
        **prompts,
    )
    if not first_rank():
        return
    comparisons = []
    if baseline:
        named = named_models(models, baseline)[1:]
        name = next((name for name, model in named if model == untrained), None)
        comparisons = compare.compare_models(results, untrained=name)
        if out:
            tables.report(results, out, comparisons, margin=margin)
    if as_json:  # the results of single questions are long; they are in --out
        scores = [{key: value for key, value in result.items() if key != "items"} for result in results]
        emit(json.dumps({"rows": scores, "comparisons": [c.to_json(margin) for c in comparisons]}, indent=2))
    else:
        parts = [*filter(None, (tables.plain_table(results), tables.answer_table(results)))]
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


def chat(
    model: Model,
    baseline: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Show the answers of this model beside those of MODEL.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='A file with a prompt per line, or .jsonl with a "prompt" per line.')
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the sampling, the same for every answer.")] = 0,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="The longest answer, in tokens; the default is the model's own.")
    ] = None,
    device: Device = None,
    dtype: Dtype = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Divide the models over N processes, one per GPU, in fcsd's tensor-parallel engine."),
    ] = None,
    all_reduce: AllReduce = "nccl",
    as_json: AsJson = False,
) -> None:
    """Let MODEL answer prompts: those of a file, those you type, or a fixed few.

    With --json, the answers to each prompt are one line of JSON.
    """
    import shutil
    from dataclasses import asdict

    if gpus is not None and device is not None:
        raise ConfigError("--device is for a model in one process; leave it out with --gpus")
    if gpus is not None:
        require_extra("eval", "fcsd chat --gpus", "accelerate")
    from fcsd.launch.world import ensure_world
    from fcsd.load_options import check_device, check_dtype

    check_dtype(dtype)
    check_device(device)
    require_models(model, baseline)
    if gpus is not None:  # else the model is in this process alone, whatever a launcher has left in the environment
        ensure_world(gpus)

    from fcsd.serve import chat as chatting

    options = {"prompts": prompts, "seed": seed, "max_new_tokens": max_new_tokens, "device": device, "dtype": dtype}
    divided: dict[str, Any] = {"divided": gpus is not None, "reduce": all_reduce}
    for answers in chatting.chat(model, baseline=baseline, **options, **divided):
        if not first_rank():
            continue
        columns = shutil.get_terminal_size((120, 24)).columns
        text = json.dumps([asdict(a) for a in answers]) if as_json else chatting.side_by_side(answers, columns)
        emit(text)
