"""Writes the table of ``docs/REAL_MODELS.md`` from the stored runs: ``python -m studies.real.page``."""

import json
from pathlib import Path
from typing import Any

PAGE = Path("docs/REAL_MODELS.md")
RAW = Path("benchmarks/results/real_smollm2_10m_2xh100.json")
BEGIN, END = "<!-- runs -->\n", "<!-- end of runs -->\n"


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown with a row for each run that was measured to its end, and its divergence on both held-out texts."""
    lines = [
        "| wiring | layers | text | learning rate | tokens a step | KL, own text | KL, foreign text | tokens/s |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for run in runs:
        if "kl" in run:
            own, foreign = (_change(run, text) for text in ("own", "foreign"))
            lines.append(
                f"| {run['wiring']} | {run['layers']} | {run['text']} | {run['lr']:g} | {run.get('batch', 131072)} "
                f"| {own} | {foreign} | {run['tokens_per_second']:.0f} |"
            )
    return "\n".join(lines) + "\n"


def _change(run: dict[str, Any], text: str) -> str:
    healed = f"{run['kl'][text]['kl']:.3f}"
    return f"{run['untrained_kl'][text]['kl']:.2f} → {healed}" if "untrained_kl" in run else healed


def filled(page: str, raw: dict[str, Any]) -> str:
    """The page with the table of the stored runs."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(raw["runs"]) + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RAW.read_text())))
