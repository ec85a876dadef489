"""What healed models lost, for ``fcsd advise``.

``fcsd/advise/losses.json`` has rows of the papers, which stay as they are, and rows of our own runs, which are made
here from the raw files. A row has the scores of a benchmark before and after, in percent.
"""

import json
from pathlib import Path
from typing import Any

from fcsd.models.selection import select_layers

FILE = Path("fcsd/advise/losses.json")
RESULTS = Path("benchmarks/results")
NAMES = {"PIQA": "PIQA", "ARC-E": "ARC-E", "HS": "HellaSwag", "OBook": "OBQA"}
# File, run, what was healed, its parameters in 10^9 (all, active), its layers, and whose scores are those before: of a
# model of experts, that which was trained as long in the standard wiring.
RUNS = (
    ("real_smollm2_converted_2xh100", "half-converted-125m", "SmolLM2-135M-Instruct", 0.135, 0.135, 30, "original"),
    ("real_smollm2_converted_2xh100", "far-converted-85m", "SmolLM2-135M-Instruct", 0.135, 0.135, 30, "original"),
    ("real_smollm2_all_layers_longer_1xh100", "all-358m", "SmolLM2-135M-Instruct", 0.135, 0.135, 30, "original"),
    ("real_gemma3_1xh100", "gemma-half-15m", "Gemma-3-270m", 0.268, 0.268, 18, "original"),
    ("real_gemma3_1xh100", "gemma-far-15m", "Gemma-3-270m", 0.268, 0.268, 18, "original"),
    ("real_experts_smollm2_2xh100", "farskip-2-29", "SmolLM2-135M as 8 experts", 0.135, 0.108, 30, "moe-again"),
)


def own_rows(repo: Path = Path()) -> list[dict[str, Any]]:
    """The rows of our own runs."""
    rows = []
    for name, run_name, model, parameters, active, depth, whole in RUNS:
        raw = json.loads((repo / RESULTS / f"{name}.json").read_text())
        run = next(run for run in raw["runs"] if run["name"] == run_name)
        before, after = (
            {told: round(100 * raw["scores"][which][column]["value"], 1) for column, told in NAMES.items()}
            for which in (whole, run_name)
        )
        rows.append(
            {
                "model": model,
                "parameters_b": parameters,
                "active_b": active,
                "wiring": run["wiring"],
                "share": round(len(select_layers(run["layers"], depth)) / depth, 2),
                "tokens_b": round(run["tokens"] / 1e9, 3),
                "source": f"fcsd, benchmarks/results/{name}.json",
                "before": before,
                "after": after,
            }
        )
    return rows


def updated(repo: Path = Path()) -> list[dict[str, Any]]:
    """All rows of the file, with our own made anew."""
    rows = json.loads((repo / FILE).read_text())
    return [row for row in rows if not row["source"].startswith("fcsd, ")] + own_rows(repo)
