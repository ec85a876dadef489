"""Compares runs of ``fcsd bench memory`` that differ in where AdamW keeps its states: ``python -m`` this module.

``scripts/h200_memory.sh`` takes the runs, several of each setting in turns. This module collects their JSON files.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fcsd.plan.setup import GIB

SIZES = ("peak", "gpu", "host")
REFERENCE = ("fp32", "none")


def compare(files: Sequence[Path]) -> dict[str, Any]:
    """Collects the runs of each setting.

    Args:
        files: what ``fcsd bench memory --out`` wrote, of one workload.

    Returns: by setting, such as ``bf16 moments, on the GPU``: the cap, the largest measured and the predicted sizes in
        GiB, the ``seconds`` of all steps but the first one of each run, their ``median``, and its ratio ``times`` to
        that of fp32 moments on the GPU. Sizes that a run without a GPU has not measured are null.
    """
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for file in files:
        run = json.loads(file.read_text())
        optim = run["recipe"]["optim"]
        runs.setdefault((optim["moments"], optim["offload"]), []).append(run)
    found = {setting: _collect(taken) for setting, taken in runs.items()}
    reference = found.get(REFERENCE)
    for one in found.values():
        one["times"] = one["median"] / reference["median"] if reference else None
    return {f"{moments} moments, on the {_place(offload)}": one for (moments, offload), one in found.items()}


def _place(offload: str) -> str:
    return "GPU" if offload == "none" else offload


def _collect(runs: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = [second for run in runs for second in run["measured"]["seconds"][1:]]
    sizes = {}
    for name in SIZES:
        measured = [run["measured"][name] for run in runs if name in run["measured"]]
        sizes[f"{name}_gib"] = max(measured) / GIB if measured else None
        sizes[f"{name}_predicted_gib"] = runs[0]["predicted"][name] / GIB
    return {"cap_gib": runs[0]["cap"], **sizes, "seconds": seconds, "median": statistics.median(seconds)}


def to_text(settings: dict[str, Any]) -> str:
    """Formats the settings as a table with a line for each; ``of plan`` is the plan's figure."""
    lines = [f"{'':28s}" + "".join(f"{name:>12s}" for name in ("cap GiB", "GPU GiB", "of plan", "step s", "times"))]
    for name, one in settings.items():
        cells = [one["cap_gib"], one["gpu_gib"], one["gpu_predicted_gib"], one["median"], one["times"]]
        lines.append(f"{name:28s}" + "".join(f"{'-' if cell is None else f'{cell:.3g}':>12s}" for cell in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the files of runs, prints the table, and writes the comparison as JSON."""
    parser = argparse.ArgumentParser(description="Compare runs of `fcsd bench memory` by the optimizer's setting.")
    parser.add_argument("files", nargs="+", type=Path, help="JSON files that `fcsd bench memory --out` wrote")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    settings = compare(options.files)
    options.out.write_text(json.dumps(settings, indent=1) + "\n")
    print(to_text(settings))


if __name__ == "__main__":
    main()
