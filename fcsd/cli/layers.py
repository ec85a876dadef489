"""The command `fcsd sweep-layers` (also `fcsd eval sweep-layers`), which measures conversions of some of the layers."""

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
