"""Options and arguments that several commands share, one definition for each."""

import re
from pathlib import Path
from typing import Annotated

import typer

from fcsd.errors import ConfigError
from fcsd.load_options import long_name
from fcsd.parallel.all_reduce.backends import described

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, or a hub id: org/name[@revision].")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must be empty or not exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would be done, but do nothing.")]
UnsafeExec = Annotated[
    bool, typer.Option("--accept-unsafe-exec", help="Run generated programs even without a sandbox.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is not empty.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Accept a MODEL with code of its own; it is not run.")]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; repeatable.")
]
Private = Annotated[bool, typer.Option("--private", help="Create the hub repository as private.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
Revision = Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch of the hub repository.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="The most sequences in one forward pass.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        callback=long_name,
        metavar="float32|bfloat16|float16",
        help="Data type of the weights; the default is float32 on the CPU, else bfloat16.",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="GPUs of each machine that take part; the default is those that are here."),
]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Requests at once.")]
AllReduce = Annotated[
    str,
    typer.Option(
        "--all-reduce",
        metavar="KIND",
        help=f"How the ranks of fcsd's engine sum partial results: {described('engine')}. See docs/engine.md.",
    ),
]
Device = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="The default is cuda if there is a GPU.")]


def _recipes() -> list[str]:
    from fcsd import recipes

    return recipes.names()


def _wirings() -> list[str]:
    from fcsd.models.wiring_block import NAMES

    return list(NAMES)


def _shapes() -> list[str]:
    from fcsd.bench.shapes import SHAPES

    return list(SHAPES)


Recipe = Annotated[
    str | None,
    typer.Argument(metavar="RECIPE", help="A YAML file, or a packaged name.", autocompletion=_recipes),
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="The recipe, if it is not given as RECIPE.",
        autocompletion=_recipes,
    ),
]
Wiring = Annotated[
    str,
    typer.Option(help="farskip, ladder, parallel, standard, desync-2x, desync-4x or desync.", autocompletion=_wirings),
]
Shape = Annotated[
    str,
    typer.Argument(
        metavar="MODEL|SHAPE",
        help="A directory in which config.json is enough, or llama3-8b, qwen3-30b-a3b, ...",
        autocompletion=_shapes,
    ),
]


def one_recipe(*given: str | None) -> str:
    """The only recipe that was given.

    Raises:
        ConfigError: there is none, or there are several.
    """
    names = [name for name in given if name is not None]
    if len(names) != 1:
        raise ConfigError(
            "Give one recipe: as RECIPE, by --recipe, or a sweep by --sweep of `fcsd distill`.",
            "`fcsd recipes list` shows the names.",
        )
    return names[0]


def require_models(*models: str | None, weights: bool = True) -> None:
    """Looks at those models that are directories before torch is imported, which takes seconds.

    Args:
        weights: whether config.json alone is not enough.

    Raises:
        BadInputError: one of them does not exist, or holds no checkpoint.
    """
    from fcsd.checkpoint.location import directory_of

    for model in filter(None, models):
        directory_of(model, weights=weights)


def gpu_memory(text: str) -> float:
    """The memory of a GPU in GiB. What is sold as 80 GB has 80 GiB, so that ``80``, ``80GB``, ``80GiB`` and ``80G`` are
    the same.

    Raises:
        ConfigError: the text has another form, or is less than 1.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:Gi?B?)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) < 1:
        raise ConfigError(f"--gpu-mem {text}: expected a number of GiB, at least 1: 80, 80GB, 80GiB or 80G")
    return float(match[1])


def names(text: str | None) -> tuple[str, ...]:
    """The names in a list such as ``ladder,farskip``; none of no text."""
    return () if text is None else tuple(text.split(","))


def numbers(text: str) -> list[int]:
    """The numbers in a list such as ``2,5,8``.

    Raises:
        ConfigError: the text is not such a list.
    """
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ConfigError(f"{text!r} is not a list of numbers.", "Separate the numbers by commas: 2,5,8")
    return [int(number) for number in text.split(",")]


def shares(text: str) -> tuple[float, ...]:
    """The numbers in a list such as ``0.3,0.6``.

    Raises:
        ConfigError: the text is not such a list.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of numbers.", "Separate the numbers by commas: 0.3,0.6") from None
