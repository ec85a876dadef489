"""Writes the all-reduces that ``fcsd advise`` assumes of other machines: ``python -m benchmarks.comm.sums_of_advice``.

Those of a server's table, or of ``benchmarks/comm/host_sums.py``, on H200s: NCCL, with and without peer access,
and through the host the fastest exact way and the fastest with INT8.
"""

import json
from pathlib import Path
from typing import Any

RESULTS, FILE = Path("benchmarks/results"), Path("fcsd/advise/sums.json")
WITHOUT_PEERS = {2: "host_tables_2xh200", 4: "host_sums_4xh200"}
WITH_PEERS = {2: "host_sums_nvlink_2xh200_first"}
WAYS = {
    "stock": ("stock",),
    "host": ("one_shot", "in_blocks", "exchange"),
    "host:int8": ("one_shot", "in_blocks", "exchange", "in_blocks:int8", "exchange:int8"),
}


def methods(repo: Path, files: dict[int, str], names: tuple[str, ...]) -> dict[str, Any]:
    """Microseconds by method, number of ranks and bytes."""
    found: dict[str, Any] = {name: {} for name in names}
    for ranks, file in files.items():
        raw = json.loads((repo / RESULTS / f"{file}.json").read_text())
        times = raw.get("microseconds") or raw["sums"]
        for name in names:
            rows = {size: [row[way] for way in WAYS[name] if way in row] for size, row in times.items()}
            found[name][str(ranks)] = {size: min(row) for size, row in rows.items()}
    return found


def content(repo: Path = Path()) -> dict[str, Any]:
    """What the file holds."""
    return {
        "no peers": {
            "where": "H200s of one host with NCCL_P2P_DISABLE=1",
            "methods": methods(repo, WITHOUT_PEERS, ("stock", "host", "host:int8")),
        },
        "peers": {"where": "H200s of one host with NVLink", "methods": methods(repo, WITH_PEERS, ("stock",))},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(content(), indent=1) + "\n")
