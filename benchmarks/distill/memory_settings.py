"""Compares runs of ``fcsd bench memory`` that differ in where AdamW keeps its states: ``python -m`` this module.

``benchmarks/distill/memory.sh`` takes the runs, several of each setting in turns. This module collects their JSON
files.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.out_file import out_file

from fcsd.plan.setup import GIB

SIZES = ("peak", "gpu", "host")
PLACES = {"none": "on the GPU", "moments": "on the host", "host": "and AdamW on the host"}


def compare(files: Sequence[Path]) -> dict[str, Any]:
    """Collects the runs of each setting.

    Args:
        files: what ``fcsd bench memory --out`` wrote, of one workload.

    Returns: by setting, such as ``bf16 moments on the GPU, 75 GiB`` with the cap at the end: the largest measured and
        the predicted sizes in GiB; the ``seconds`` of all steps but the first one of each run, their ``median``, the
        median ``update`` and the predicted values of both; and the ratio ``times`` of the median to that of fp32
        moments on the GPU, measured and predicted. What was not measured is null: sizes without a GPU, and everything
        of a setting whose GPU memory was exhausted. ``out_of_memory`` is torch's message then.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in sorted((json.loads(file.read_text()) for file in files), key=_order):
        optim, cap = run["recipe"]["optim"], run["cap"]
        name = f"{optim['moments']} moments {PLACES[optim['offload']]}" + (f", {cap:g} GiB" if cap else "")
        runs.setdefault(name, []).append(run)
    found = {name: _collect(taken) for name, taken in runs.items()}
    plain = f"fp32 moments {PLACES['none']}"
    reference = next((one for name, one in found.items() if name.startswith(plain) and one["median"]), None)
    for one in found.values():
        for ratio, value in (("times", "median"), ("times_predicted", "median_predicted")):
            one[ratio] = one[value] / reference[value] if reference is not None and one[value] is not None else None
    return found


def _order(run: dict[str, Any]) -> tuple[int, bool, float]:
    """The fastest settings come first."""
    optim = run["recipe"]["optim"]
    return list(PLACES).index(optim["offload"]), optim["moments"] == "bf16", run["cap"] or 0


def _collect(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the runs of one setting."""
    told, recipe = runs[0]["predicted"], runs[0]["recipe"]
    exhausted = [run["measured"]["out_of_memory"] for run in runs if "out_of_memory" in run["measured"]]
    whole = [run["measured"] for run in runs if "out_of_memory" not in run["measured"]]
    sizes = {}
    for name in SIZES:
        measured = [run[name] for run in whole if name in run]
        sizes[f"{name}_gib"] = max(measured) / GIB if measured else None
        sizes[f"{name}_predicted_gib"] = told[name] / GIB
    seconds, updates = ([second for run in whole for second in run[key][1:]] for key in ("seconds", "update_seconds"))
    return {
        "cap_gib": runs[0]["cap"],
        "out_of_memory": exhausted[0] if exhausted else None,
        **sizes,
        "seconds": seconds,
        "median": statistics.median(seconds) if seconds else None,
        "median_predicted": recipe["train"]["batch_tokens"] / told["tokens_per_second"],
        "update": statistics.median(updates) if updates else None,
        "update_predicted": told["update_seconds"],
    }


def to_text(settings: dict[str, Any]) -> str:
    """Formats the settings as a table with a line for each; each ``plan`` is the prediction of the value before it."""
    names = ("peak GiB", "GPU GiB", "step ms", "update ms", "times")
    width = max(map(len, settings))
    lines = [" " * width + f"{'cap GiB':>10s}" + "".join(f"{name:>10s}{'plan':>8s}" for name in names)]
    for setting, one in settings.items():
        line = f"{setting:{width}s}{_number(one['cap_gib']):>10s}"
        for scale, key, told in (
            (1, "peak_gib", "peak_predicted_gib"),
            (1, "gpu_gib", "gpu_predicted_gib"),
            (1000, "median", "median_predicted"),
            (1000, "update", "update_predicted"),
            (1, "times", "times_predicted"),
        ):
            line += f"{_number(one[key], scale):>10s}{_number(one[told], scale):>8s}"
        lines.append(line + ("  out of memory" if one["out_of_memory"] else ""))
    return "\n".join(lines)


def _number(value: float | None, scale: int = 1) -> str:
    return "-" if value is None else f"{scale * value:.3g}" if scale * value < 100 else f"{scale * value:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the files of runs, prints the table, and writes the comparison as JSON."""
    parser = argparse.ArgumentParser(description="Compare runs of `fcsd bench memory` by the optimizer's setting.")
    parser.add_argument("files", nargs="+", type=Path, help="JSON files that `fcsd bench memory --out` wrote")
    parser.add_argument("--out", type=out_file, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    settings = compare(options.files)
    options.out.write_text(json.dumps(settings, indent=1) + "\n")
    print(to_text(settings))


if __name__ == "__main__":
    main()
