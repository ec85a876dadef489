"""The times of an all-reduce by method, ranks and bytes: a table that was measured, here or elsewhere.

``sums.json`` beside this file was measured on H200s of one host, with peer access and with ``NCCL_P2P_DISABLE=1``. A
machine file of ``fcsd bench links`` has the same table of its own machine, which goes first.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fcsd.parallel.machine import Machine

Points = Sequence[tuple[float, float]]  # (bytes, seconds), ascending

_PCIE = 64  # GB/s in one direction of the H200s of sums.json


class Sums(NamedTuple):
    """The methods with which the ranks of a machine can sum.

    Attributes:
        methods: ``stock`` is what vLLM would take; ``host`` is exact, through the memory of the host; ``host:int8`` is
            the same in 8 bits; ``NAME=VALUE`` is stock with a variable of the environment. For each the points by the
            number of ranks.
        measured: whether this was measured on this machine.
        where: the machine, for the reader.
        slower: the bandwidth of that machine's links over that of the GPUs that are meant; 1 if they are the same.
    """

    methods: Mapping[str, Mapping[int, Points]]
    measured: bool
    where: str
    slower: float = 1.0

    @property
    def told(self) -> str:
        """One line: where the times of sums come from."""
        if self.measured:
            return f"Sums are those of {self.where}."
        scaled = f", their bytes scaled by {self.slower:g} to slower PCIe" if self.slower != 1 else ""
        return f"Sums were measured elsewhere, on {self.where}{scaled}. `fcsd bench links` measures yours."

    def seconds(self, method: str, ranks: int, size: float) -> float:
        """The seconds of a sum of ``size`` bytes over ``ranks`` ranks; what the bytes take is scaled to the links.

        Between two measured sizes the logarithms are interpolated; beyond the last one a sum takes time by its bytes.
        Ranks that were not measured take the time of the nearest number that was, by the bytes that a ring sends.
        """
        table = self.methods[method]
        known = min(table, key=lambda count: abs(count - ranks))
        points = table[known]
        scale = self.slower * (ranks - 1) / ranks / ((known - 1) / known)
        (first, fastest), (last, slowest) = points[0], points[-1]
        if size <= first:
            return fastest
        found = slowest * size / last if size >= last else math.exp(np.interp(math.log(size), *np.log(points).T))
        return fastest + (found - fastest) * scale

    def of(self, method: str, ranks: int) -> Callable[[float], float]:
        """``seconds`` of one method and number of ranks; never slower than vLLM's own choice, which ``auto`` keeps."""
        return lambda size: min(self.seconds(name, ranks, size) for name in {method, "stock"})


def elsewhere(peers: bool, pcie_gb_per_s: float) -> Sums:
    """What was measured on H200s, with peer access or without; without it the bytes are scaled to the GPUs' PCIe."""
    content = json.loads(Path(__file__).with_name("sums.json").read_text(encoding="utf-8"))
    part = content["peers" if peers else "no peers"]
    slower = 1.0 if peers else _PCIE / pcie_gb_per_s
    return Sums(_methods(part["methods"]), False, part["where"], slower)


def of_machine(machine: Machine, name: str) -> Sums:
    """What a machine file says: its all-reduces, or its links, over which an all-reduce is counted as a ring."""
    if machine.all_reduce_us:
        table = {str(ranks): times for ranks, times in machine.all_reduce_us.items()}
        others = {way: {str(ranks): row for ranks, row in own.items()} for way, own in machine.sums_us.items()}
        return Sums(_methods({"stock": table, **others}), True, name)
    ranks, line = machine.gpus_per_node, machine.near.line
    points = [(float(2**power), line.seconds(2 * (ranks - 1) / ranks * 2**power)) for power in range(12, 29)]
    return Sums({"stock": {ranks: points}}, True, name)


def _methods(content: Any) -> dict[str, dict[int, Points]]:
    """Microseconds by bytes, as the file has them, in seconds."""
    return {
        method: {
            int(ranks): sorted((float(size), 1e-6 * value) for size, value in points.items())
            for ranks, points in table.items()
        }
        for method, table in content.items()
    }
