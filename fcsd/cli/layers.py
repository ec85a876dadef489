"""The commands `fcsd sweep-layers` and `choose-layers`, which measure conversions of some of a model's layers.

`fcsd eval sweep-layers` and `fcsd eval choose-layers` run the same commands.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, Model, Questions, Rewired, numbers
from fcsd.extras import require_extra


def sweep_layers(
    model: Model,
    out: Annotated[Path, typer.Option(help="The directory for results; a sweep that was killed resumes from it.")],
    rewired: Rewired,
    questions: Questions,
    points: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="The numbers of layers to convert; the default spreads them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Score untrained conversions of the first N and the last N layers of MODEL, over N. FarSkip Figure 3."""
    require_extra("eval", "fcsd sweep-layers")
    from fcsd.eval.layers import sweep as sweeping

    options = {**asdict(rewired), **questions.arguments()}
    sweep = sweeping.sweep_layers(model, out=out, points=None if points is None else numbers(points), **options)
    emit(json.dumps(sweep, indent=2) if as_json else sweeping.to_text(sweep))


def choose_layers(
    model: Model,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text on which the loss is measured.")],
    rewired: Rewired,
    layers: Annotated[
        str | None, typer.Option(metavar="N[,N...]", help="How many layers to convert; a choice for each number.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT%", help="Instead of --layers: convert as many layers as raise the loss by at most this."
        ),
    ] = None,
    held_out_check: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Compare the choice with first, last and random layers on this text."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens of each text one measurement reads.")] = 16384,
    out: Annotated[
        Path | None, typer.Option(help="The directory for results; a search that was killed resumes from it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose which layers of MODEL to convert, by measured loss. Prints what `fcsd convert --layers` takes."""
    require_extra("eval", "fcsd choose-layers")
    from fcsd.eval.layers import choose as choosing

    choice = choosing.choose_layers(
        model,
        text=text,
        layers=None if layers is None else numbers(layers),
        budget=budget,
        check=held_out_check,
        tokens=tokens,
        out=out,
        **asdict(rewired),
    )
    emit(json.dumps(choice, indent=2) if as_json else choosing.to_text(choice))
