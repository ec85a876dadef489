"""What a conversion of a real model gains and loses, as tables and as a picture for ``page``.

The speed is that of serving 16 layers of Llama-3 8B's dimensions on two H100s, as a multiple of the original's. Where
fcsd's engine was measured with all layers converted, a share of the layers is counted to save that share of the time.
Other wirings have what ``predictions`` predicts. The points lost are those of SmolLM2-135M-Instruct:
measured after healing with the same tokens (a *cell* is a wiring on a choice of layers), or predicted by the law of
``studies/real/law.py``, with this model's own costs of layers.
"""

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from studies.real.predictions import SHARES, TOKENS, WIRINGS, Row, frontier, law, losses
from transformers import AutoConfig, PretrainedConfig

from fcsd.markdown import table
from fcsd.models.selection import select_layers
from fcsd.plan.model import MetaModel, packaged_config

COSTS = Path("benchmarks/results/real_layers_smollm2_cpu.json")
MORE_COSTS = Path("benchmarks/results/real_layers_smollm2_more_cpu.json")  # of other wirings
WITHOUT_PEERS = Path("benchmarks/results/infer_slow_16_layers_2xh100.json")  # 16 prompts of 1024 tokens
NVLINK = Path("benchmarks/results/serve_own_2xh100.json")  # a step of 16 answers, the first token of 2048
PREDICTED, MEASURED, OVER_NVLINK = "predicted", "measured, scaled", "measured over NVLink, scaled"
ALIKE = ("farskip", "parallel", "ladder mlp-only")  # whose reads are the same in a dense model
CHOICES = {"last": "last", "cheapest": "that cost least alone"}
COLOURS = {
    "ladder": "#38761d",
    "farskip": "#3c78d8",
    "ladder attn-only": "#e69138",
    "desync-2x": "#a64d79",
    "desync-4x": "#666666",
}
WANTED = (1.05, 1.1, 1.15, 1.2, 1.3, 1.4)  # times the speed of a step
# Larger dense models, by their published dimensions; a mixture of experts is among the packaged ones.
LARGER: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-1.7B": ("llama", dict(
        num_hidden_layers=24, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, vocab_size=49152,
        tie_word_embeddings=True,
    )),
    "Qwen3-4B": ("qwen3", dict(
        num_hidden_layers=36, hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    )),
}  # fmt: skip


class Speed(NamedTuple):
    """The speed of a decoding step and of the first tokens as multiples of the original's."""

    decode: float
    first: float

    def shared(self, share: float) -> "Speed":
        """That of a model of which only a share of the layers is converted."""
        return Speed(*(1 / (1 - share + share / times) for times in self))

    def __str__(self) -> str:
        return " / ".join(f"{times:.2f}x" for times in self)


class Healed(NamedTuple):
    """A healed model: points minus the original's, and their standard error.

    ``share`` is that of the converted layers. ``choice`` is ``last`` or ``cheapest`` where the layers are a share of
    ``SHARES``, and empty otherwise.
    """

    name: str
    wiring: str
    share: float
    points: float
    error: float
    choice: str = ""

    @property
    def lost(self) -> str:
        """The points lost and their error."""
        return f"{-self.points:.1f} ± {self.error:.1f}"


@cache
def measured(repo: Path) -> dict[tuple[str, str], Speed]:
    """The speeds that were measured, of all layers, by wiring and by what they are called in the table."""
    rows = json.loads((repo / WITHOUT_PEERS).read_text())["rows"]
    found = {
        (row["wiring"], MEASURED): Speed(row["decode_times_standard"], row["prefill_times_standard"])
        for row in rows
        if row["batch"] == 16 and row["reduce"] == "nccl" and row["wiring"] != "standard"
    }
    served = json.loads((repo / NVLINK).read_text())["ratios"]["ladder, by its table"]
    return {**found, ("ladder", OVER_NVLINK): Speed(served["decode 16"], served["prefill 2048"])}


@cache
def predicted() -> dict[tuple[str, str], Speed]:
    """What ``predictions`` predicts of the same 16 layers without peer access, by wiring and share."""
    config = packaged_config("meta-llama/Llama-3.1-8B-Instruct")
    assert config is not None
    config.num_hidden_layers = 16
    return {key: Speed(row.decode, row.prefill) for key, row in predicted_rows(config).items()}


def predicted_rows(config: PretrainedConfig, ranks: int = 2) -> dict[tuple[str, str], Row]:
    """The rows of ``predictions`` for GPUs without peer access, by wiring and share of the layers."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {(row.wiring, row.layers.split()[0]): row for row in frontier(MetaModel(folder), ranks)}


def served(wiring: str, share: float, link: str, repo: Path = Path()) -> Speed | None:
    """The measured speed of a wiring on a share of the layers; None if the wiring was not measured over this link."""
    whole = measured(repo).get((wiring, link))
    return None if whole is None else whole.shared(share)


def speed(wiring: str, share: float, repo: Path = Path()) -> Speed:
    """The speed without peer access: as measured, or as predicted if the wiring was not measured."""
    known = predicted().get((wiring, f"{share:.0%}"), predicted()[wiring, "100%"].shared(share))
    return served(wiring, share, MEASURED, repo) or known


def speeds(repo: Path = Path()) -> str:
    """Markdown with the speed of every wiring at every share of the layers, and where it is from."""
    body = []
    for wiring in labels():
        own = [link for name, link in measured(repo) if name == wiring]
        for link in own or [PREDICTED]:
            cells = [served(wiring, part(share), link, repo) or predicted()[wiring, share] for share in SHARES]
            body.append([wiring, *map(str, cells), link])
    return table(["wiring", *(share.replace("%", " %") for share in SHARES), "from"], body, left=1) + "\n"


def labels() -> list[str]:
    """The wirings as ``predictions`` calls them."""
    return [name if variant == "full" else f"{name} {variant}" for name, variant in WIRINGS]


@cache
def costs(repo: Path) -> dict[str, list[float]]:
    """What each layer costs alone, by wiring."""
    files = [json.loads((repo / file).read_text()) for file in (MORE_COSTS, COSTS) if (repo / file).exists()]
    return {
        name: part["alone"]
        for file in files
        for name, part in file.items()
        if isinstance(part, dict) and "alone" in part
    }


def lost(wiring: str, repo: Path = Path()) -> list[tuple[float, float, float, bool]]:
    """The points that the law says are lost at every share: the middle, both ends, and whether it was fitted there.

    Args:
        wiring: one whose layers were measured.
    """
    alone, found = costs(repo)[wiring], []
    for share in SHARES:
        row = losses(len(select_layers(share, len(alone))) / len(alone), (sum(alone), sum(alone)), TOKENS)
        low, high = row["points"]
        # The interval is one of logarithms.
        found.append((math.sqrt(low * high), low, high, row["fitted"] and wiring in law()["wirings"]))
    return found


def table_of_losses(repo: Path = Path()) -> str:
    """Markdown with the points lost by prediction. A star marks what is outside of what the law was fitted to."""
    body = []
    for wiring in sorted(costs(repo), key=labels().index):
        names = ALIKE if wiring == "farskip" else (wiring,)
        cells = [
            f"{middle:.1f} ({low:.1f} to {high:.1f}){'' if fitted else '*'}"
            for middle, low, high, fitted in lost(wiring, repo)
        ]
        body.append([", ".join(names), *cells])
    return table(["wiring", *(share.replace("%", " %") for share in SHARES)], body, left=1) + "\n"


def table_of_cells(cells: list[Healed]) -> str:
    """Markdown with the points that every cell lost after the same tokens, and their standard errors."""
    known = {(cell.wiring, cell.choice, cell.share): cell.lost for cell in cells}
    body = []
    for wiring in (name for name in labels() if name not in ALIKE[1:]):
        for choice, called in CHOICES.items():
            row = [", ".join(ALIKE) if wiring == ALIKE[0] else wiring, called]
            # All layers are the same choice by any rule, and stored as the last ones.
            row += [
                known.get((wiring, "last" if share == SHARES[-1] else choice, part(share)), "-") for share in SHARES
            ]
            body.append(row)
    return table(["wiring", "layers", *(share.replace("%", " %") for share in SHARES)], body, left=2) + "\n"


def table_of_speeds_wanted(cells: list[Healed], repo: Path = Path()) -> str:
    """Markdown with the healed cell that lost least of those that are served at least so fast."""
    body = []
    for wanted in WANTED:
        fast = [cell for cell in cells if round(speed(cell.wiring, cell.share, repo).decode, 2) >= wanted]
        if fast:
            one = max(fast, key=lambda cell: cell.points)
            what = f"{one.share:.0%}, {CHOICES[one.choice]}" if one.share < 1 else "all"
            cell = [f"{wanted:.2f}x", one.wiring, what, str(speed(one.wiring, one.share, repo)), one.lost]
            body.append(cell)
    head = ["a step at least", "wiring that lost least", "layers", "step / first tokens", "points lost"]
    return table(head, body, left=3) + "\n"


def of_larger() -> str:
    """Markdown with speed and points of larger models by prediction, as ``predictions`` prints them."""
    moe = packaged_config("Qwen/Qwen3-30B-A3B")
    assert moe is not None
    dense = {name: AutoConfig.for_model(kind, **fields) for name, (kind, fields) in LARGER.items()}
    head, body = ["model", "wiring"], []
    for share in SHARES[1::2]:
        head += [f"{share.replace('%', ' %')}: step / first tokens", "points lost"]
    for name, config in {**dense, "Qwen3-30B-A3B": moe}.items():
        rows = predicted_rows(config)
        # Without shared experts ladder is the same.
        for wiring in ("farskip",) if config is moe else ("ladder", "farskip"):
            cells = []
            for row in (rows[wiring, share] for share in SHARES[1::2]):
                assert row.points is not None
                cells += [str(Speed(row.decode, row.prefill)), "{:.1f} to {:.1f}".format(*row.points)]
                cells[-1] += "" if row.fitted else "*"
            body.append([name, "farskip, ladder" if config is moe else wiring, *cells])
    return table(head, body, left=2) + "\n"


def draw(out: Path, cells: list[Healed], longer: list[Healed], tokens: float, repo: Path = Path()) -> None:
    """Points lost against the speed of a decoding step without peer access: every healed cell, and the longer runs.

    Args:
        cells: healed with the same millions of ``tokens``.
        longer: models that were healed with more, drawn as stars with their names.
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "fcsd"  # the same picture has the same bytes
    figure, axis = pyplot.subplots(figsize=(8, 5))
    for wiring, colour in COLOURS.items():
        for choice, style in (("last", "-o"), ("cheapest", "--s")):
            row = sorted(
                (speed(wiring, cell.share, repo).decode, -cell.points, cell.error)
                for cell in cells
                if cell.wiring == wiring and (cell.choice == choice or cell.share == 1)
            )
            if not row:
                continue
            names = ", ".join(ALIKE) if wiring == ALIKE[0] else wiring
            link = MEASURED if (wiring, MEASURED) in measured(repo) else PREDICTED
            label = f"{names}: {choice} layers (speed {link})"
            gained, points, errors = zip(*row, strict=True)
            axis.errorbar(
                gained, points, errors, fmt=style, color=colour, label=label, markersize=4, linewidth=1, capsize=2
            )
    for one in longer:
        gained = speed(one.wiring, one.share, repo).decode
        axis.errorbar(gained, -one.points, one.error, fmt="*", color=COLOURS[one.wiring], markersize=11, capsize=2)
        axis.annotate(one.name, (gained, -one.points), (7, 3), textcoords="offset points", fontsize=7)
    axis.set_xlabel("speed of a step of 16 answers over the original's: 8 B width, TP 2, no peer access")
    axis.set_ylabel("points lost by SmolLM2-135M-Instruct")
    axis.set_title(
        f"Healed with {tokens:.2g} million tokens: 25, 50, 75 and 100 % of the layers. Stars: healed with more",
        fontsize=9,
    )
    low, high = axis.get_ylim()
    axis.set_ylim(min(0, low), 1.25 * high)  # the legend is above what the points reach
    axis.legend(fontsize=7, frameon=False, loc="upper left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})
    pyplot.close(figure)


def part(share: str) -> float:
    """A share of the layers, such as ``75%``, as a number."""
    return float(share.rstrip("%")) / 100
