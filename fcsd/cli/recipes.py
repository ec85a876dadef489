"""The `fcsd recipes` commands, which list, show and copy packaged recipes, and print their JSON Schema."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, Sets
from fcsd.cli.panels import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None)


@command(app, "list")
def recipes_list(as_json: AsJson = False) -> None:
    """List the packaged recipes."""
    from fcsd import recipes

    summaries = {name: recipes.summary(name) for name in recipes.names()}
    width = max(map(len, summaries))
    lines = [f"{name:<{width}}  {text}" for name, text in summaries.items()]
    emit(json.dumps(summaries, indent=2) if as_json else "\n".join(lines))


@command(app, "show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="RECIPE", help="A packaged recipe's name or a YAML file.")],
    sets: Sets = [],  # noqa: B006
    as_json: AsJson = False,
) -> None:
    """Print a recipe with all its values, defaults included, and the origin of each value."""
    from fcsd.config import load_recipe

    resolved = load_recipe(name, sets)
    emit(resolved.recipe.model_dump_json(indent=2) if as_json else resolved.to_yaml(), end="")


@command(app, "schema")
def recipes_schema(as_json: AsJson = False) -> None:
    """Print the JSON Schema of recipes, for editors. With --json, on one line."""
    from fcsd.config.recipe import recipe_schema

    emit(json.dumps(recipe_schema(), indent=None if as_json else 2))


@command(app, "copy")
def recipes_copy(
    name: Annotated[str, typer.Argument(metavar="NAME", help="See `fcsd recipes list`.")],
    out: Annotated[Path, typer.Option(help="File or directory to write.")] = Path("."),
    as_json: AsJson = False,
) -> None:
    """Write a packaged recipe, complete with what it takes from its base, to a file. Prints its path."""
    from fcsd.recipes.inherit import copy_recipe

    written = copy_recipe(name, out)
    emit(json.dumps({"file": str(written)}) if as_json else written)
