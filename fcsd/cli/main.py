"""The entry point of the command line. A command parses its arguments, calls one library function and prints a result.

Results go to stdout, and messages go to stderr. Library functions are imported when their command runs, so that
`fcsd --help` answers at once.
"""

import json
import os
import sys
from typing import Annotated

import typer

from fcsd.cli.advise import advise
from fcsd.cli.bench import app as bench_app
from fcsd.cli.command import command, emit, report_error, show_no_bars
from fcsd.cli.distill import distill, plan, write
from fcsd.cli.eval import chat, evaluate
from fcsd.cli.models import convert, export, inspect, push
from fcsd.cli.options import AsJson
from fcsd.cli.panels import Commands
from fcsd.cli.recipes import app as recipes_app
from fcsd.cli.serve import serve
from fcsd.launch.world import leave
from fcsd.terminal import lasting
from fcsd.version import __version__

EXAMPLES = """\b
Examples:
  fcsd advise org/model --gpu 'RTX 4090' --gpus 4
  fcsd inspect org/model
  fcsd convert org/model model-farskip --wiring farskip --layers all
  fcsd distill recipe.yaml --set optim.lr=1e-5 --gpus 8
  fcsd distill --sweep qwen3-30b-a3b-sweep --gpus 8
  fcsd eval model-farskip runs/mine/final --baseline org/model --tasks piqa,arc_easy
  fcsd export runs/mine final
  fcsd chat final --baseline org/model
  fcsd serve final --gpus 4 -- --max-model-len 8192
  fcsd push final org/model-farskip --private

\b
Exit codes: 0 ok, 1 failure, 2 usage or recipe, 3 bad input, 4 checkpoint, 5 non-finite, 6 peer lost,
7 disk, 8 does not fit, 9 verdict not met, 130 interrupted, 143 preempted.
"""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
    epilog=EXAMPLES,
)
app.add_typer(recipes_app, name="recipes", help="List, show or copy the packaged recipes, or print their schema.")
app.add_typer(bench_app, name="bench", help="Measure this machine: its links, and serving.")


def main() -> None:
    """The console script."""
    sys.stderr = lasting(sys.stderr)
    if not sys.stderr.isatty():  # the libraries would write their progress bars into log files, too
        show_no_bars()
    os.environ["MPLBACKEND"] = "agg"  # pictures are files; a notebook names a backend that may not be installed here
    try:
        app()
    except SystemExit as end:
        leave(end)
    except OSError as error:  # a help text could not be printed, for example into a file on a full disk
        leave(SystemExit(report_error(error)))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Rewire a Hugging Face checkpoint so that communication no longer blocks; heal, prove and export it."""


command(app, "advise")(advise)
command(app, "inspect")(inspect)
command(app, "convert")(convert)
command(app, "distill")(distill)
command(app, "write")(write)
command(app, "plan")(plan)
command(app, "eval")(evaluate)
command(app, "chat")(chat)
command(app, "serve")(serve)
command(app, "export")(export)
command(app, "push")(push)


@command(app, "env")
def env(as_json: AsJson = False) -> None:
    """Print what a bug report needs. Versions, processors, memory, settings."""
    from fcsd.launch import environment

    facts = environment.snapshot()
    emit(json.dumps(facts, indent=2) if as_json else environment.to_text(facts))
