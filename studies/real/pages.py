"""Writes what is made of stored runs: REAL_MODELS, its picture, PREDICTIONS, its law, adapters, advised losses."""

import json
from typing import Any

from studies.blocks import between_marks
from studies.real import frontier, law, losses, page, ranks, speeds

ARGUMENTS: dict[str, Any] = {}


def main(_: Any) -> None:
    """Write them from the raw files in benchmarks/results."""
    fitted = law.law()
    law.OUT.write_text(json.dumps(fitted, indent=1) + "\n")  # read by what follows
    told = law.filled(law.PAGE.read_text(), fitted, law.checks(law.stored()))
    law.PAGE.write_text(between_marks(told, {"served": speeds.served()}))
    raw, cells = page.read(), page.read_cells()
    page.PAGE.write_text(page.filled(page.PAGE.read_text(), raw))
    frontier.draw(page.PICTURE, page.cells(cells), page.healed(list(raw.values())), page.tokens_of(cells))
    ranks.PAGE.write_text(ranks.filled(ranks.PAGE.read_text(), ranks.read()))
    losses.FILE.write_text(json.dumps(losses.updated(), indent=1) + "\n")
