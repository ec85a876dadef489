"""Writes the tables of ``docs/REAL_MODELS.md`` from the stored runs: ``python -m studies.real.page``."""

import json
from pathlib import Path
from typing import Any

PAGE = Path("docs/REAL_MODELS.md")
RAW = (
    Path("benchmarks/results/real_smollm2_100m_2xh100.json"),
    Path("benchmarks/results/real_smollm2_10m_2xh100.json"),
)


def runs(raw: list[dict[str, Any]]) -> str:
    """Markdown with a row for each run that was measured to its end, and its divergence on both held-out texts."""
    lines = [
        "| wiring | layers | text | tokens | learning rate | tokens a step "
        "| KL, own text | KL, foreign text | tokens/s |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for run in (run for file in raw for run in file["runs"] if "kl" in run):
        own, foreign = (_change(run, text) for text in ("own", "foreign"))
        lines.append(
            f"| {run['wiring']} | {run['layers']} | {run['text']} | {run['tokens'] / 1e6:g} M | {run['lr']:g} "
            f"| {run.get('batch', 131072)} | {own} | {foreign} | {run['tokens_per_second']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def scores(raw: list[dict[str, Any]]) -> str:
    """Markdown with the scores of the original and of every model, and the mean difference with its standard error."""
    (file,) = (file for file in raw if "scores" in file)
    differences = {found["model"]: found["overall"] for found in file["differences"]}
    (baseline,) = file["scores"].keys() - differences.keys()
    columns = list(file["scores"][baseline])
    lines = [f"| model | {' | '.join(columns)} | mean minus original |", "|---|" + "--:|" * (len(columns) + 1)]
    for name in (baseline, *differences):
        values = " | ".join(f"{100 * file['scores'][name][column]['value']:.1f}" for column in columns)
        found = differences.get(name)
        mean = "" if found is None else f"{found['points']:+.1f} ± {found['stderr']:.1f}"
        lines.append(f"| {'original' if found is None else name} | {values} | {mean} |")
    return "\n".join(lines) + "\n"


def _change(run: dict[str, Any], text: str) -> str:
    healed = f"{run['kl'][text]['kl']:.3f}"
    return f"{run['untrained_kl'][text]['kl']:.2f} → {healed}" if "untrained_kl" in run else healed


def filled(page: str, raw: list[dict[str, Any]]) -> str:
    """The page with both tables of the stored runs."""
    for name, table in (("runs", runs), ("scores", scores)):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, rest = page.split(begin)
        page = before + begin + table(raw) + end + rest.split(end)[1]
    return page


def read(repo: Path = Path()) -> list[dict[str, Any]]:
    """The stored runs."""
    return [json.loads((repo / file).read_text()) for file in RAW]


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), read()))
