"""Compares placements of a model's experts that are found by different objectives.

    python studies/placement/study.py [--ranks 2 4] [--tokens 8192] [--model DIR] [--routing FILE]

The routing of the bundled held-out text is counted. Each search sees the first tokens only, and the table shows what
its placement does to the second half of the text, which no search has seen. Documents are in a random order, so both
parts are alike. The bundled teacher has 8 experts, so an exhaustive search is possible, too. Numbers are means over the
layers. FILE keeps the routing, so that it can be studied where the model is not: it is read if it is there.

Columns: the rows that the busiest rank receives for each token of the run, with deduplication; the same without it,
which is proportional to the work of the busiest rank's experts; and the swaps in all layers together.
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from fcsd.experimental.placement.search import Level, Objective, greedy
from fcsd.markdown import table
from fcsd.parallel.expert.levels import tokens_by_group
from fcsd.parallel.expert.placement import Placement

ASSETS = Path(__file__).resolve().parents[2] / "assets"
TEACHER, TEXT = ASSETS / "teacher", ASSETS / "corpus/held_out.jsonl"
WINDOW, BATCH = 256, 8  # tokens of a sequence, sequences of a batch
WORK = (0.3, 1.0, 3.0)  # times of an expert's work for a row, where the row's way takes 1
FEW = 8  # experts: their placements can all be tried


def main() -> None:
    """Prints a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], choices=[2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=8192, help="tokens that a search sees; at most half of the text")
    parser.add_argument("--model", type=Path, default=TEACHER, help="directory of a model in the teacher's layout")
    parser.add_argument("--routing", type=Path, help=".npz file of counted routing; written if it is not there")
    args = parser.parse_args()
    if args.routing and args.routing.exists():
        routing, experts = read_routing(args.routing)
    else:
        routing, experts = choices(model=args.model)
        if args.routing:
            write_routing(args.routing, routing, experts)
    if wrong := [ranks for ranks in args.ranks if experts % ranks]:
        parser.error(f"--ranks {wrong[0]}: the model has {experts} experts, which so many ranks cannot divide evenly")
    half = len(routing[0]) // 2
    seen, unseen = [chosen[: min(args.tokens, half)] for chosen in routing], [chosen[half:] for chosen in routing]
    print(
        f"{len(routing)} layers, {experts} experts; a search sees {len(seen[0])} tokens, {len(unseen[0])} are held out"
    )
    for ranks in args.ranks:
        start = [Placement(experts, ranks)] * len(routing)
        rows = [line("order of numbers", start, unseen)]
        for name, objective in objectives(ranks).items():
            found, swaps = greedy(seen, start, objective)
            rows.append(line(name, found, unseen, swaps))
        if experts <= FEW:
            best = [exhaustive(one, experts, ranks) for one in seen]
            rows.append(line("exhaustive search, smooth-max", best, unseen))
        print("", table([f"{ranks} ranks", "rows of the busiest", "without deduplication", "swaps"], rows), sep="\n")


def objectives(ranks: int) -> dict[str, Objective]:
    """The objectives of the table by name; moves are free."""
    levels = (Level(ranks, 1.0),)
    pairs = Level(ranks, 1.0, deduplicated=False)
    found = {"pairs of tokens and experts (SmartMoE)": Objective((pairs,)), "smooth-max": Objective(levels)}
    return found | {f"smooth-max, work {w:g}": Objective((*levels, pairs._replace(weight=w))) for w in WORK}


def write_routing(path: Path, routing: list[Tensor], experts: int) -> None:
    """Keep the routing of ``choices`` as ``chosen``, uint8 ``[layers, tokens, top_k]``, and ``experts``."""
    numpy.savez_compressed(path, chosen=torch.stack(routing).to(torch.uint8).numpy(), experts=experts)


def read_routing(path: Path) -> tuple[list[Tensor], int]:
    """What ``write_routing`` has kept."""
    with numpy.load(path) as kept:
        return list(torch.from_numpy(kept["chosen"]).long()), int(kept["experts"])


def choices(most: int | None = None, model: Path = TEACHER) -> tuple[list[Tensor], int]:
    """The experts that tokens choose in each MoE layer, ``[tokens, top_k]`` each, and how many experts there are.

    Args:
        most: the largest number of tokens; None takes the whole text.
        model: the directory of a model.
    """
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    documents = [json.loads(text)["text"] for text in TEXT.read_text().splitlines()]
    random.Random(0).shuffle(documents)
    text = "\n".join(documents)[: None if most is None else 8 * most]  # a token has fewer than eight characters
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt").input_ids[0][:most]
    found: dict[str, list[Tensor]] = {}
    for name, module in loaded.named_modules():
        if name.endswith("mlp.experts"):
            module.register_forward_pre_hook(lambda _, given, name=name: found.setdefault(name, []).append(given[1]))
    with torch.no_grad():
        for batch in ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW).split(BATCH):
            loaded.model(batch)
    return [torch.cat(parts) for parts in found.values()], loaded.config.n_routed_experts


def exhaustive(chosen: Tensor, experts: int, ranks: int) -> Placement:
    """The best of all placements by smooth-max."""
    objective = objectives(ranks)["smooth-max"]
    every = [Placement(experts, ranks, order) for order in divisions(tuple(range(experts)), experts // ranks)]
    costs = [objective.cost([tokens_by_group(one.positions(chosen), experts, ranks)]) for one in every]
    return every[int(torch.stack(costs).argmin())]


def divisions(experts: tuple[int, ...], size: int) -> Iterator[tuple[int, ...]]:
    """Every way to divide experts into groups of ``size``, one group after the other; neither order matters."""
    if not experts:
        yield ()
        return
    first, rest = experts[0], experts[1:]
    for others in itertools.combinations(rest, size - 1):
        left = tuple(expert for expert in rest if expert not in others)
        for after in divisions(left, size):
            yield (first, *others, *after)


def line(name: str, placements: list[Placement], unseen: list[Tensor], swaps: int | None = None) -> list[str]:
    """A row of the table."""
    rows, pairs = [], []
    for placement, chosen in zip(placements, unseen, strict=True):
        positions = placement.positions(chosen)
        rows.append(int(tokens_by_group(positions, placement.experts, placement.ranks).max()))
        pairs.append(int((positions // placement.slots).flatten().bincount(minlength=placement.ranks).max()))
    tokens = len(unseen) * len(unseen[0])
    return [name, f"{sum(rows) / tokens:.3f}", f"{sum(pairs) / tokens:.3f}", "" if swaps is None else str(swaps)]


if __name__ == "__main__":
    main()
