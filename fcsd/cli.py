"""The command line: parse, call one library function, print.

Data goes to stdout, people's text to stderr. Library functions are imported when their command runs, so that
`fcsd --help` answers at once.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fcsd import __version__
from fcsd.bench.cli import app as bench_app
from fcsd.command import command, emit
from fcsd.distill.cli import cache_teacher, distill, plan
from fcsd.eval.cli import chat, choose_layers, evaluate, sweep_layers
from fcsd.launch import leave
from fcsd.options import AsJson, CreatePr, DryRun, Force, Model, Out, Private, RecipeName, Revision, Sets, Trust

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
        str, typer.Option(help="farskip, ladder, parallel, standard, desync-2x, desync-4x or desync.")
    ] = "farskip",
    layers: Annotated[str, typer.Option(help="all, last:24, first:8, 50%, 12-27 or 0,2,5-7.")] = "all",
    variant: Annotated[str, typer.Option(help="full, attn-only or mlp-only.")] = "full",
    border: Annotated[
        str | None,
        typer.Option(
            help="full or partial: the stream that a converted layer reads after one that is not converted. "
            "The default is full for farskip and partial for ladder."
        ),
    ] = None,
    distance: Annotated[int, typer.Option(min=1, help="Sub-blocks whose outputs may be in flight.")] = 1,
    tp_degree: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree, for desync.")] = 1,
    reduce: Annotated[
        str | None,
        typer.Option(
            help="Reductions that desync keeps: 2x, 4x, another Nx, last, or a pattern by layer such as '-,m'."
        ),
    ] = None,
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
        border=border,
        tp_degree=tp_degree,
        reduce=reduce,
        distance=distance,
        check=not no_check,
        dry_run=dry_run,
        force=force,
        trust_remote_code=trust_remote_code,
    )
    emit(done.to_json() if as_json else done.to_text())


command(app, "distill")(distill)
command(app, "cache-teacher")(cache_teacher)
command(app, "plan")(plan)
command(app, "eval")(evaluate)
command(app, "sweep-layers")(sweep_layers)
command(app, "choose-layers")(choose_layers)
command(app, "chat")(chat)


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
