"""Draws docs/wiring.svg from the table in fcsd.models.wiring_block: ``python docs/draw_wiring.py``."""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from fcsd.models.wiring_block import READS

COMPUTE, WIRE = "#cfe2f3", "#f6b26b"
EXPERTS = {
    "standard": "every read waits; both collectives are exposed",
    "parallel": "the MoE reads without the attention's output; only dispatch is covered",
    "farskip": "the attention, too, reads without the routed output; both are covered",
}
SHARDS = {
    "standard": "every read waits for an all-reduce",
    "ladder": "every read goes without the last output; all-reduces are covered",
}


def experts(wiring: str) -> list[tuple[str, str, float, float]]:
    """``(row, label, start, length)`` of two layers of expert-parallel execution, unit lengths for illustration."""
    attn_depth, mlp_depth = READS[wiring]
    bars, compute, landed = [], 0.0, 0.0
    for k in ("k", "k+1"):
        start = compute if attn_depth else max(compute, landed)
        sent = start if mlp_depth else start + 2.0  # Dispatch starts once what the MoE reads is there
        if mlp_depth and k == "k+1":
            sent = max(sent, landed)
        bars.append(("compute", f"attention {k}", start, 2.0))
        bars.append(("wire", "dispatch", sent, 1.2))
        compute = max(start + 2.0, sent + 1.2)
        bars.append(("compute", f"experts {k}", compute, 1.6))
        bars.append(("wire", "combine", compute + 1.6, 1.2))
        landed = compute + 2.8
        bars.append(("compute", "shared", compute + 1.6, 0.7))
        compute += 2.3
    return bars


def shards(wiring: str) -> list[tuple[str, str, float, float]]:
    """The same of tensor-parallel execution, in which every sub-block ends with an all-reduce."""
    bars: list[tuple[str, str, float, float]] = []
    compute, landed = 0.0, [0.0]  # when each output is there; the first is what the layers get
    for k in ("k", "k+1"):
        for name, depth in zip(("attention", "MLP"), READS[wiring], strict=True):
            start = max([compute, *landed[: len(landed) - depth]])
            compute = start + 2.0
            sent = max(compute, landed[-1])
            landed.append(sent + 1.2)
            bars += [("compute", f"{name} {k}", start, 2.0), ("wire", "all-reduce", sent, 1.2)]
    return bars


def draw(out: Path) -> None:
    pictures = [(f"Experts, {wiring}: {text}", experts(wiring)) for wiring, text in EXPERTS.items()]
    pictures += [(f"Tensor parallelism, {wiring}: {text}", shards(wiring)) for wiring, text in SHARDS.items()]
    figure, axes = plt.subplots(len(pictures), 1, figsize=(9, 8.4), sharex=True)
    for axis, (title, bars) in zip(axes, pictures, strict=True):
        for row, label, start, length in bars:
            y = 1 if row == "compute" else 0
            axis.barh(y, length, left=start, height=0.7, color=COMPUTE if y else WIRE, edgecolor="black", linewidth=0.6)
            axis.text(start + length / 2, y, label, ha="center", va="center", fontsize=7)
        axis.set_yticks([0, 1], ["wire", "compute"], fontsize=8)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylim(-0.5, 1.5)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[-1].set_xlabel("time (two layers, illustrative lengths)", fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("wiring.svg"))
