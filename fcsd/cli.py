"""The command line: parse, call one library function, print.

Data goes to stdout, people's text to stderr. Library functions are imported when their command runs, so that
`fcsd --help` answers at once.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from fcsd import __version__
from fcsd.bench.cli import app as bench_app
from fcsd.command import command, emit
from fcsd.errors import ConfigError
from fcsd.launch import leave

EXAMPLES = """\b
Examples:
  fcsd inspect org/model
  fcsd convert org/model model-farskip --wiring farskip --layers all
  fcsd distill recipe.yaml --set train.lr=1e-5 --gpus 8
  fcsd distill --sweep qwen3-30b-a3b-sweep --gpus 8
  fcsd eval model-farskip runs/mine/final --baseline org/model --tasks piqa,arc_easy
  fcsd choose-layers org/model --text sample.jsonl --budget 2%
  fcsd export runs/mine final
  fcsd chat final --baseline org/model
  fcsd push final org/model-farskip --private

\b
Exit codes: 0 ok, 1 failure, 2 usage or recipe, 3 bad input, 4 checkpoint, 5 non-finite, 6 peer lost,
7 disk, 8 does not fit, 9 verdict not met, 130 interrupted, 143 preempted.
"""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=EXAMPLES,
)
recipes_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(recipes_app, name="recipes", help="List, show or copy the packaged recipes.")
app.add_typer(bench_app, name="bench", help="Measure training steps, their memory and traces.")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, or a hub id: org/name[@revision].")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must be empty or not exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, stop.")]
UnsafeExec = Annotated[
    bool, typer.Option("--accept-unsafe-exec", help="Run generated programs even without a sandbox.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is not empty.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Allow Python code that MODEL brings along.")]
Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a value; repeatable.")]
Private = Annotated[bool, typer.Option("--private", help="Create the hub repository as private.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
Revision = Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch of the hub repository.")]
Rewiring = Annotated[str, typer.Option(help="farskip, ladder or parallel.")]
Variant = Annotated[str, typer.Option(help="full, attn-only or mlp-only.")]
RecipeName = Annotated[str, typer.Argument(metavar="NAME", help="See `fcsd recipes list`.")]


def main() -> None:
    """The console script."""
    if sys.argv[1:3] == ["eval", "sweep-layers"]:  # the same command; a model of that name is ./sweep-layers
        del sys.argv[1]
    if not sys.stderr.isatty():  # the libraries draw their bars into files, too
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        app()
    except SystemExit as end:
        leave(end)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rewire a Hugging Face checkpoint so that communication no longer blocks; heal, prove and export it."""


@command(app, "inspect")
def inspect(model: Model, trust_remote_code: Trust = False, as_json: AsJson = False) -> None:
    """Say what MODEL is. Reads headers only: layers, experts, size, possible wirings, what is missing."""
    from fcsd import checkpoint

    found = checkpoint.inspect(model, trust_remote_code=trust_remote_code)
    emit(found.to_json() if as_json else found.to_text())


@command(app, "convert")
def convert(
    model: Model,
    out: Out,
    wiring: Annotated[
        str, typer.Option(help="farskip, ladder, parallel, standard, desync-2x or desync-4x.")
    ] = "farskip",
    layers: Annotated[str, typer.Option(help="all, last:24, first:8, 50%, 12-27 or 0,2,5-7.")] = "all",
    variant: Annotated[str, typer.Option(help="full, attn-only or mlp-only.")] = "full",
    distance: Annotated[int, typer.Option(min=1, help="Sub-blocks whose outputs may be in flight.")] = 1,
    tp_degree: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree, for desync.")] = 1,
    no_check: Annotated[bool, typer.Option("--no-check", help="Skip the proof that off is off.")] = False,
    dry_run: DryRun = False,
    force: Force = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Rewire MODEL into OUT. Links the weights, writes config and code, proves parity with the original."""
    from fcsd import convert as conversion

    done = conversion.convert(
        model,
        out,
        wiring=wiring,
        layers=layers,
        variant=variant,
        tp_degree=tp_degree,
        distance=distance,
        check=not no_check,
        dry_run=dry_run,
        force=force,
        trust_remote_code=trust_remote_code,
    )
    emit(done.to_json() if as_json else done.to_text())


@command(app, "distill")
def distill(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="A YAML file, or a packaged name.")] = None,
    recipe_name: Annotated[str | None, typer.Option("--recipe", metavar="NAME", help="A packaged recipe.")] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A recipe with a sweep: try its values, then run the best.")
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer reads the default and never changes it)
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines; prints what each must run, unless one is named.")] = 1,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the nodes this is, from 0.")] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where nodes meet, on node 0.")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a script for sbatch instead of running.")] = False,
    join_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the other processes.")] = 300,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to continue from.")] = "auto",
    output_dir: Annotated[str | None, typer.Option(help="Overrides output_dir.")] = None,
    seed: Annotated[int | None, typer.Option(help="Overrides seed.")] = None,
    accept_unsafe_exec: UnsafeExec = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Heal a converted checkpoint by self-distillation. Prints the run directory, of a sweep the table."""
    from fcsd.config import load_recipe

    if [recipe, recipe_name, sweep].count(None) != 2:
        raise ConfigError("give one of RECIPE, --recipe NAME and --sweep NAME", "`fcsd recipes list` shows the names")
    flags = {"output_dir": output_dir, "seed": seed}
    given = {key: value for key, value in flags.items() if value is not None}
    resolved = load_recipe(recipe or recipe_name or sweep or "", sets, given)
    if resolved.recipe.sweep is not None and sweep is None:
        raise ConfigError(f"{recipe or recipe_name} is a sweep", f"fcsd distill --sweep {recipe or recipe_name}")

    from fcsd import nodes as several
    from fcsd.distill.sweep_plan import plan_of

    if sweep is not None:
        plan_of(resolved)
    if slurm:
        options = ["--resume", resume, *(["--accept-unsafe-exec"] if accept_unsafe_exec else [])]
        emit(several.slurm_script(resolved, nodes=nodes, gpus=gpus or 1, options=options))
        print("save it and hand it to sbatch, where output_dir is shared by all nodes", file=sys.stderr)
        return
    if sweep is not None:
        from fcsd.distill import sweep as sweeping
        from fcsd.distill.sweep_process import launcher
        from fcsd.distill.sweep_report import to_text

        launch = launcher(gpus, accept_unsafe_exec, 1 if dry_run else nodes)
        found = sweeping.sweep(resolved, launch, dry_run=dry_run)
        emit(json.dumps(found, indent=2) if as_json else to_text(found))
        sweeping.require_complete(found)
        return

    from fcsd.launch import ensure_world

    if nodes > 1 and node_rank is None and not dry_run:
        emit(several.node_commands(sys.argv[1:], nodes, rendezvous))
        return
    if not dry_run:
        node = None if node_rank is None else several.node_of(nodes, node_rank, rendezvous)
        ensure_world(gpus, node, timeout=join_timeout, grace_seconds=resolved.recipe.train.grace_seconds)

    scorer = None
    if resolved.recipe.early_stop.benchmark:
        from fcsd.eval.early_score import scorer as benchmark

        scorer = benchmark(resolved.recipe.early_stop, accept_unsafe_exec=accept_unsafe_exec)

    from fcsd.distill.loop import distill as run

    processes = (gpus or 1) * nodes
    directory = run(
        resolved, resume=resume, dry_run=dry_run, processes=processes, scorer=scorer, join_timeout=join_timeout
    )
    if os.environ.get("RANK", "0") == "0":
        emit(json.dumps({"run": str(directory)}) if as_json else directory)


@command(app, "cache-teacher")
def cache_teacher(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a packaged name.")],
    sets: Sets = [],  # noqa: B006
    gpus: Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")] = None,
) -> None:
    """Write the teacher cache of a recipe. What is there already stays; prints its directory."""
    from fcsd.config import load_recipe

    resolved = load_recipe(recipe, sets)

    from fcsd.launch import ensure_world

    ensure_world(gpus)

    from fcsd.distill.cache_teacher import cache_teacher as run

    directory = run(resolved)
    if os.environ.get("RANK", "0") == "0":
        emit(directory)


@command(app, "plan")
def plan(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a packaged name.")],
    sets: Sets = [],  # noqa: B006
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpu_mem: Annotated[float, typer.Option(min=1, metavar="GIB", help="Memory of a GPU, as sold.")] = 141.0,
    price: Annotated[float | None, typer.Option(min=0, help="Of one GPU for an hour.")] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="Share of the GPUs' peak reached; default: as measured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a recipe fits, how long it takes and what it costs. Reads no weight; exit 8 if it does not fit."""
    from fcsd.config import load_recipe
    from fcsd.plan import Hardware
    from fcsd.plan import plan as run
    from fcsd.plan.report import to_json, to_text

    planned = run(load_recipe(recipe, sets).recipe, Hardware(gpus, nodes, gpu_mem, price), mfu)
    emit(json.dumps(to_json(planned), indent=2) if as_json else to_text(planned))
    planned.check()


@command(app, "eval")
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
    suite: Annotated[str, typer.Option(help="Which settings of the benchmarks.")] = "paper",
    tasks: Annotated[str | None, typer.Option(help="Some of the suite, separated by commas.")] = None,
    data_mirror: Annotated[Path | None, typer.Option(help="Data sets on disk, instead of the hub.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Text file for the held-out loss.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N documents of a task.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Most sequences in one forward.")] = None,
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
    expert_parallel: Annotated[
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

    from fcsd.launch import ensure_world

    if backend != "vllm":  # which starts its processes itself
        ensure_world(gpus)

    from fcsd.eval import compare, tables
    from fcsd.eval.harness import evaluate as run
    from fcsd.eval.harness import names_of
    from fcsd.eval.opening import Engine

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
        expert_parallel=expert_parallel,
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


@command(app, "sweep-layers")
def sweep_layers(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory for results; a killed sweep resumes.")],
    wiring: Rewiring = "farskip",
    variant: Variant = "full",
    points: Annotated[str | None, typer.Option(metavar="N,N,...", help="Numbers of layers; default: evenly.")] = None,
    suite: Annotated[str, typer.Option(help="Which settings of the benchmarks.")] = "paper",
    tasks: Annotated[str | None, typer.Option(help="Some of the suite, separated by commas.")] = None,
    data_mirror: Annotated[Path | None, typer.Option(help="Data sets on disk, instead of the hub.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="Text file for the held-out loss.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N documents of a task or text.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Most sequences in one forward.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score untrained conversions of the first N and the last N layers of MODEL, over N. FarSkip Figure 3."""
    from fcsd.eval import sweep_layers as sweeping

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


@command(app, "choose-layers")
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
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for results; a killed search resumes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Choose which layers of MODEL to convert, by measured loss. Prints what `fcsd convert --layers` takes."""
    from fcsd.eval import choose_layers as choosing

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


@command(app, "chat")
def chat(
    model: Model,
    baseline: Annotated[str | None, typer.Option(metavar="MODEL", help="Show this one's answers beside.")] = None,
    prompts: Annotated[Path | None, typer.Option(help='A prompt per line, or .jsonl with a "prompt" each.')] = None,
    seed: Annotated[int, typer.Option(help="Of the sampling, the same for every answer.")] = 0,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if there is one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let MODEL answer prompts: those of a file, those you type, or a fixed few."""
    import shutil
    from dataclasses import asdict

    from fcsd import chat as chatting

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


@command(app, "export")
def export(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory or a converted model.")],
    out: Out,
    checkpoint: Annotated[str, typer.Option(help="Which one of a run: latest, best or step-N.")] = "latest",
    force: Force = False,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Then push to the hub.")] = None,
    private: Private = False,
    create_pr: CreatePr = False,
    revision: Revision = None,
) -> None:
    """Write the final directory. With its card, and proof that a fresh process reloads it. Prints OUT."""
    from fcsd import export as exporting

    target = {"private": private, "create_pr": create_pr, "revision": revision}
    emit(exporting.export(run, out, checkpoint=checkpoint, force=force, push=push, **target))


@command(app, "push")
def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What `fcsd export` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The hub repository.")],
    private: Private = False,
    create_pr: CreatePr = False,
    revision: Revision = None,
) -> None:
    """Upload an exported directory to the hub. Prints its address."""
    from fcsd import push as pushing

    emit(pushing.push(directory, repo, private=private, create_pr=create_pr, revision=revision))


@command(recipes_app, "list")
def recipes_list(as_json: AsJson = False) -> None:
    """Name the packaged recipes."""
    from fcsd import recipes

    summaries = {name: recipes.summary(name) for name in recipes.names()}
    width = max(map(len, summaries))
    lines = [f"{name:<{width}}  {text}" for name, text in summaries.items()]
    emit(json.dumps(summaries, indent=2) if as_json else "\n".join(lines))


@command(recipes_app, "show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe's name or a YAML file.")],
    sets: Sets = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Print a recipe in full. Every default is filled in, the origin of each value noted."""
    from fcsd.config import load_recipe

    resolved = load_recipe(name, sets)
    emit(resolved.recipe.model_dump_json(indent=2) if as_json else resolved.to_yaml(), end="")


@command(recipes_app, "copy")
def recipes_copy(
    name: RecipeName, out: Annotated[Path, typer.Option(help="File or directory to write.")] = Path(".")
) -> None:
    """Write a packaged recipe to a file. Prints its path."""
    from fcsd import recipes

    emit(recipes.copy(name, out))


@command(app, "env")
def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs. Versions, processors, memory, settings."""
    from fcsd import environment

    facts = environment.snapshot()
    emit(json.dumps(facts, indent=2) if as_json else environment.to_text(facts))
