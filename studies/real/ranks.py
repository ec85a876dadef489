"""Rank against loss: one conversion healed by full training and by adapters of several ranks, at equal tokens.

    python -m studies.real ranks --tokens 10e6 > CASES
    python -m studies.real heal TEACHER OUT --cases CASES --text own=DIR --at-once 3

This prints the cases that ``heal`` runs; ``pages`` writes the table of the stored results to
``benchmarks/results/adapters.md``. TEACHER is the bundled model or a real one; ``fcsd write`` makes its text, and
``texts assets/teacher assets/corpus/train.parquet assets/corpus/held_out.jsonl DIR --first inf`` that of the bundled
model from its corpus.
"""

import argparse
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

from studies.blocks import between_marks
from studies.real.page import mean_difference

from fcsd.markdown import table as markdown_table

PAGE = Path("benchmarks/results/adapters.md")
RAW = sorted(Path("benchmarks/results").glob("adapter_ranks_*.json"))
FULL = "full"
ALPHA = 32.0  # of every rank, so that one learning rate suits all ranks
ARGUMENTS = {
    "--ranks": "full,4,16,64,256",
    "--tokens": dict(default="10e6", help="one or several numbers"),
    "--seeds": "0",
    "--wiring": "ladder",
    "--layers": "all",
    "--batch": dict(type=int, default=32768, help="tokens of a step"),
    "--full-lr": 1e-3,
    "--lrs": dict(default="3e-3", help="learning rates of adapters"),
    "--set": dict(action="append", default=[], metavar="KEY=JSON", help="of every recipe"),
}


def main(given: argparse.Namespace) -> None:
    """Print the cases."""
    print("\n".join(map(json.dumps, cases(given))))


def cases(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The cases of a study, each as ``heal`` reads it; the divergence before healing is measured once."""
    found: list[dict[str, Any]] = []
    settings = {key: json.loads(value) for key, _, value in (text.partition("=") for text in given.set)}
    how: dict[str, Any] = {"wiring": given.wiring, "layers": given.layers, "text": "own", "batch": given.batch}
    for tokens, seed, rank in product(*(part.split(",") for part in (given.tokens, given.seeds, given.ranks))):
        for lr in (given.full_lr,) if rank == FULL else map(float, given.lrs.split(",")):
            case = {**how, "name": f"{rank}-{tokens}-{lr:g}-{seed}", "tokens": float(tokens), "lr": lr}
            case |= {"seed": int(seed), "set": dict(settings)}
            if rank != FULL:
                case["set"] |= {"train.adapter.rank": int(rank), "train.adapter.alpha": ALPHA, "optim.train": ["norms"]}
            found.append(case if found else case | {"untrained": True})
    return found


def table(raw: list[dict[str, Any]]) -> str:
    """Markdown with a row for each model, budget and rank, at the learning rate with the lowest mean divergence.

    *Kept* is 1 minus the divergence divided by that of the untrained conversion. The next column divides it by what
    full training keeps with the same tokens. *Points lost* is there where some runs were asked benchmarks, and is the
    mean of theirs.
    """
    head = ["model", "tokens", "trained", "learning rate", "runs", "KL", "kept", "of full training"]
    asked = any(file.get("differences") for file in raw)
    body = []
    for file in raw:
        done = [run for run in file["runs"] if "kl" in run]
        (before,) = {run["untrained_kl"]["own"]["kl"] for run in done if "untrained_kl" in run}
        for tokens in sorted({run["tokens"] for run in done}):
            kept: dict[int, float] = {}
            here = [run for run in done if run["tokens"] == tokens]
            for rank in sorted({_rank(run) for run in here}):
                lr, best = _best([run for run in here if _rank(run) == rank])
                values = [run["kl"]["own"]["kl"] for run in best]
                mean = statistics.mean(values)
                kept[rank] = 1 - mean / before
                spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
                share = f"{kept[rank] / kept[0]:.1%}" if 0 in kept else "-"
                name = f"rank {rank}" if rank else "all weights"
                length = f"{tokens / 1e6:g} M" if tokens >= 1e6 else f"{tokens:,.0f}"
                cells = [file["model"], length, name, f"{lr:g}", f"{len(values)}"]
                cells += [f"{before:.2f} → {mean:.3f}{spread}", f"{kept[rank]:.1%}", share]
                body.append([*cells, *([_lost(file, best)] if asked else [])])
    return markdown_table([*head, *(["points lost"] if asked else [])], body, left=3) + "\n"


def _lost(file: dict[str, Any], runs: list[dict[str, Any]]) -> str:
    """The mean points that runs lost and its error, by the questions; nothing if they were not asked."""
    names = {found["model"] for found in file.get("differences", ())} & {run["name"] for run in runs}
    if not names:
        return ""
    points, errors = zip(*(mean_difference(file, name) for name in names), strict=True)
    return f"{-statistics.mean(points):.1f} ± {statistics.mean(errors):.1f}"


def _rank(run: dict[str, Any]) -> int:
    """The rank of the adapters of a run; 0 if all weights trained."""
    return run["set"].get("train.adapter.rank", 0)


def _best(runs: list[dict[str, Any]]) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate with the lowest mean divergence, and its runs, which differ in the seed."""
    by_rate = {lr: [run for run in runs if run["lr"] == lr] for lr in {run["lr"] for run in runs}}
    return min(by_rate.items(), key=lambda found: statistics.mean(run["kl"]["own"]["kl"] for run in found[1]))


def filled(page: str, raw: list[dict[str, Any]]) -> str:
    """The page with the table of the stored runs."""
    return between_marks(page, {"ranks": table(raw)})


def read(repo: Path = Path()) -> list[dict[str, Any]]:
    """The stored studies."""
    return [json.loads((repo / file).read_text()) for file in RAW]
