"""Chooses, of the ways in which a wiring was timed, the fastest for each number of tokens in a step.

The result is the table that the plugin for vLLM reads (``parallel.all_reduce.ways``). It holds what was measured: a way
holds from the size at which it was the fastest up to the next size that was measured.
"""

from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from fcsd.bench.serve.figures import Figure, Rounds, medians
from fcsd.bench.serve.workload import BUDGET, Workload
from fcsd.errors import ConfigError
from fcsd.parallel.all_reduce.backends import backend_of
from fcsd.parallel.all_reduce.ways import PLAIN, SUFFIX, USER, VERSION, Step, Way, Ways
from fcsd.serve.vllm.reduction import OVERLAP_FROM

# A format changes results, and sums in flight of a step without a graph are more work for the host. Either has to take
# less than this share of the time of the others.
_WORTH = 0.98


def check_table(load: Workload, path: Path) -> None:
    """Refuse, before anything is timed, a file to which the table of a workload could not be written.

    Raises:
        ConfigError: the name is not that of a table, the file exists, there are several wirings, or nothing says how
            many tokens a step of vLLM has.
    """
    if path.suffix != SUFFIX or path.exists() or not path.parent.is_dir():
        why = "exists" if path.exists() else f"does not end in {SUFFIX}" if path.parent.is_dir() else "has no directory"
        raise ConfigError(f"--table {path} {why}", f"choose a new file that ends in {SUFFIX}; nothing was overwritten")
    if len(load.wirings) > 1:
        raise ConfigError("--table is the table of one wiring", "name one by --wirings")
    if load.budget is None:
        raise ConfigError(
            "--table has to know how many tokens a step of vLLM has at most",
            f"add -- {BUDGET} 8192, or another number, and serve with a table of this number",
        )


def ways_of(found: Mapping[str, Any], wiring: str) -> dict[Way, Rounds]:
    """The times of a wiring in each way in which it ran; of its forms in flight, that of the most steps."""
    rows = [row for row in found["variants"].values() if row["role"] in ("wired", "way") and row["wiring"] == wiring]
    return {Way(row["reduce"], row["travels"]): row["rounds"] for row in rows if row["rounds"] and "travels" in row}


def tokens_of(load: Workload, figure: Figure) -> int:
    """The tokens of a step of a figure: one of each answer in decoding, else the prompts that arrive at once.

    vLLM reads them in steps of its token budget.
    """
    kind, size = figure
    if kind == "decode":
        return size
    tokens = size * load.arrivals
    return tokens if load.budget is None else min(tokens, load.budget)


def choose(load: Workload, times: Mapping[Way, Rounds]) -> Ways:
    """The fastest way for each number of tokens, by the medians over the rounds.

    Prompts that arrive together are read in several steps, the first of which has the first prompts alone.
    All were timed as one size, so below ``OVERLAP_FROM`` tokens nothing travels, as by the plugin's own choice. A
    prompt that arrives alone (``--concurrency 1``) is one step of its tokens, and its rows are as they were measured.
    """
    together = load.arrivals > 1
    known = {way: medians(rounds) for way, rounds in times.items()}
    rows: dict[str, list[tuple[int, Way]]] = {"decode": [], "prefill": []}
    for step, chosen in rows.items():
        figures = [figure for figure in dict.fromkeys(chain(*known.values())) if figure[0] == step]
        for tokens in sorted({tokens_of(load, figure) for figure in figures}):
            same = [figure for figure in figures if tokens_of(load, figure) == tokens]
            spent = {
                way: sum(found[figure] for figure in same)
                for way, found in known.items()
                if all(figure in found for figure in same)
            }
            way = min(spent, key=lambda way, spent=spent, step=step: spent[way] / _worth(step, way), default=None)
            if way is not None and together and step == "prefill" and tokens < OVERLAP_FROM:
                way = way._replace(travels=False)
            if way is not None and (not chosen or chosen[-1][1] != way):
                chosen.append((tokens, way))
    if together and rows["prefill"] and rows["prefill"][0][1].travels:
        rows["prefill"][0] = (OVERLAP_FROM, rows["prefill"][0][1])
    return Ways(Way(PLAIN, False), tuple(rows["decode"]), tuple(rows["prefill"]))


def _worth(step: str, way: Way) -> float:
    """Of the time of the others, the share that this way has to take at most."""
    exact = backend_of(way.reduce, USER)[1] is None
    waits = step == "prefill" and way.travels  # such a step waits for the host
    return _WORTH if waits or not exact else 1.0


def by_table(load: Workload, times: Mapping[Way, Rounds]) -> Rounds:
    """The times of each figure by a table: of each round, in the way that is chosen by all other rounds.

    The fastest of several ways was partly lucky, and its own times would flatter the table. Of one round alone there
    are no others.
    """
    found: Rounds = {}
    count = max((len(own) for rounds in times.values() for own in rounds.values()), default=0)
    for round_ in range(count):
        others = {
            way: {figure: own[:round_] + own[round_ + 1 :] if count > 1 else own for figure, own in rounds.items()}
            for way, rounds in times.items()
        }
        ways = choose(load, others)
        for figure in dict.fromkeys(chain(*times.values())):
            if figure[0] in get_args(Step):
                way = ways.of(figure[0], tokens_of(load, figure))  # pyright: ignore[reportArgumentType]
                found.setdefault(figure, []).extend(times.get(way, {}).get(figure, [])[round_ : round_ + 1])
    return {figure: own for figure, own in found.items() if own}


def add_tables(load: Workload, found: dict[str, Any]) -> None:
    """Add to a result the table of each wiring, and what it makes of the wiring as a variant of its own."""
    found["tables"] = {}
    if load.budget is None:
        return  # nothing says how many tokens a step has
    for wiring in dict.fromkeys(row["wiring"] for row in found["variants"].values() if row["role"] == "wired"):
        times = ways_of(found, wiring)
        if len(times) > 1:
            ways = choose(load, times)
            found["tables"][wiring] = ways.to_rows()
            row = {"role": "wired", "wiring": wiring, "rounds": by_table(load, times)}
            found["variants"][f"{wiring}, by its table"] = row


def file_of(load: Workload, found: Mapping[str, Any], command: str) -> dict[str, Any]:
    """The content of the file of a table, for the only wiring that ``found`` has in ``tables``."""
    ((wiring, rows),) = found["tables"].items()
    head = {"version": VERSION, "user": USER, "tp": load.tp, "wiring": wiring, "model": load.model}
    return {**head, "command": command, **rows}
