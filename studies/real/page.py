"""The tables and the picture of ``REAL_MODELS.md``, from the stored runs."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.blocks import between_marks
from studies.real import frontier
from studies.real.heal import BATCH

from fcsd.eval.compare import not_above_chance
from fcsd.eval.results import shown
from fcsd.eval.suite import SUITES
from fcsd.markdown import table
from fcsd.models.selection import layers_text, select_layers

PAGE, PICTURE = Path("studies/real/REAL_MODELS.md"), Path("studies/real/frontier.svg")
DEPTH = 30  # layers of the model of all runs
TARGETS = {15: 0.5, 26: 0.7, DEPTH: 1.5}  # points, for at least so many layers
RESULTS = Path("benchmarks/results")
# The runs to which the law is fitted. Then those of the converted layers alone: longer ones, seeds of shorter ones, all
# layers, a longer run of all layers, and runs that read text of everyday doings, too.
RAW, MORE = (
    tuple(RESULTS / f"real_smollm2_{name}.json" for name in names)
    for names in (
        ("100m_2xh100", "10m_2xh100", "seeds_2xh100", "parts_2xh100"),
        (
            "converted_2xh100",
            "converted_seeds_2xh100",
            "all_layers_2xh100",
            "all_layers_longer_1xh100",
            "everyday_1xh100",
        ),
    )
)
SEEDS = RAW[2]
CONVERTED, CONVERTED_SEEDS, ALL, LONGER, EVERYDAY = MORE
PASSAGES = RESULTS / "real_smollm2_passages_cpu.json"
KL_TEXTS = ("own", "foreign")  # those of the tables
# The benchmarks that count in a mean, and their chance.
CHANCE = {benchmark.column: benchmark.chance for benchmark in SUITES["paper"]}


def best(raw: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The run with scores of each conversion that ends nearest to the original on both texts.

    ``lost`` is the mean difference in points and its error, over the runs that differ from it in the seed alone, too;
    ``untrained_lost`` are the points that the conversion costs before it is healed, and the number of their questions.
    """
    found: dict[tuple[str, tuple[int, ...]], list[dict[str, Any]]] = {}
    for file in raw:
        differences = {one["model"] for one in file.get("differences", ())}
        for run in (run for run in file["runs"] if "kl" in run):
            layers = select_layers(run["layers"], DEPTH)
            more = {"file": file, "scored": run["name"] in differences, "count": len(layers)}
            found.setdefault((run["wiring"], layers), []).append({**run, **more})
    chosen = []
    for _, alike in sorted(found.items(), key=lambda item: len(item[0][1])):
        scored = [run for run in alike if run["scored"]]
        if not scored:
            continue
        run = min(scored, key=lambda run: run["kl"]["own"]["kl"] + run["kl"]["foreign"]["kl"])
        for other in alike:
            run["untrained_kl"] = run.get("untrained_kl") or other.get("untrained_kl")
            if f"{other['name']}-untrained" in other["file"].get("scores", ()):
                before = f"{other['name']}-untrained"
                run["untrained_lost"] = mean_difference(other["file"], before)[0], questions(other["file"], before)
        same = [
            mean_difference(other["file"], other["name"])
            for other in scored
            if all(other.get(key) == run.get(key) for key in ("tokens", "text", "lr", "batch", "set"))
        ]
        chosen.append({**run, "lost": over_seeds(same)})
    return chosen


def over_seeds(found: list[tuple[float, float]]) -> tuple[float, float]:
    """The mean of points that each seed lost or won, and its error, from those of each.

    The error is that of the questions, which all seeds were asked, and that of the seeds: ``sqrt(e^2 + s^2 / n)``,
    where ``e`` is the mean of the runs' errors.
    """
    points, errors = zip(*found, strict=True)
    return statistics.mean(points), math.hypot(statistics.mean(errors), _spread(points) / math.sqrt(len(points)))


def answer(raw: list[dict[str, Any]], repo: Path = Path()) -> str:
    """Markdown with the best run of each conversion: what it lost, how much faster such a model is served, its target.

    A target is reached where the upper end of the interval of 90 % is within it.
    """
    head = ["converted", "wiring", "tokens", "trained", "points lost", "untrained", "KL, own text", "KL, foreign text"]
    head += ["served: step / first tokens", "with NVLink"]
    body, reached = [], []
    for run in best(raw):
        count, wiring = run["count"], run["wiring"]
        share = count / DEPTH
        slow = frontier.served(wiring, share, frontier.MEASURED, repo)
        near = frontier.served(wiring, share, frontier.OVER_NVLINK, repo)
        alone = "converted layers" if "optim.train" in run.get("set", {}) else "all weights"
        lost = "{:.1f} ± {:.1f}".format(-run["lost"][0], run["lost"][1])
        lost += f" of {questions(run['file'], run['name']):,}"
        points, asked = run.get("untrained_lost", (None, 0))
        before = "" if points is None else f"{-points:.1f} of {asked:,}"
        cells = [f"{count} of {DEPTH}: {run['layers']}", wiring, f"{run['tokens'] / 1e6:.3g} M", alone, lost, before]
        cells += [_change(text, run) for text in KL_TEXTS]
        body.append([*cells, str(slow or f"{frontier.predicted()[wiring, '100%'].shared(share)}*"), str(near or "-")])
        target = next((TARGETS[least] for least in sorted(TARGETS, reverse=True) if least <= count), None)
        if target is not None:
            shown = -run["lost"][0] + 1.645 * run["lost"][1] <= target
            reached.append(f"{target} points with {wiring} on {count} layers was {'' if shown else 'not '}shown")
    return table(head, body, left=2) + f"\n**Targets**: {'; '.join(reached)}.\n"


def healed(raw: list[dict[str, Any]]) -> list[frontier.Healed]:
    """The best runs, for the picture."""
    return [
        frontier.Healed(f"{run['tokens'] / 1e6:.3g} M", run["wiring"], run["count"] / DEPTH, *run["lost"])
        for run in best(raw)
    ]


CELLS = tuple(RESULTS / f"real_smollm2_frontier_{name}.json" for name in ("2xh100", "more_4xh100", "last_4xh100"))


def read_cells(repo: Path = Path()) -> dict[str, Any]:
    """The cells of the frontier as one file of runs. Of a conversion that several files have, it has the last run."""
    found: dict[tuple[str, str, float], tuple[dict[str, Any], dict[str, Any] | None]] = {}
    scores: dict[str, Any] = {}
    for name in CELLS:
        file = json.loads((repo / name).read_text())
        asked = {one["model"]: one for one in file["differences"]}
        found |= {cell_of(run): (run, asked.get(run["name"])) for run in file["runs"]}
        scores |= file["scores"]
    order = {wiring: n for n, wiring in enumerate(frontier.labels())}
    cells = [found[cell] for cell in sorted(found, key=lambda cell: (order[cell[0]], cell[1] != "last", cell[2]))]
    return {
        "runs": [run for run, _ in cells],
        "scores": scores,
        "differences": [one for _, one in cells if one is not None],
    }


def cell_of(run: dict[str, Any]) -> tuple[str, str, float]:
    """The wiring, the choice and the share of the layers of a run of the frontier."""
    layers = select_layers(run["layers"], DEPTH)
    share = next(s for s in frontier.SHARES if len(select_layers(s, DEPTH)) == len(layers))
    choice = "last" if layers == select_layers(share, DEPTH) else "cheapest"
    return run["wiring"], choice, frontier.part(share)


def cells(file: dict[str, Any]) -> list[frontier.Healed]:
    """The cells of the frontier that were healed with the same tokens and asked."""
    asked, found = {one["model"] for one in file["differences"]}, []
    for run in (run for run in file["runs"] if run["name"] in asked):
        wiring, choice, share = cell_of(run)
        found.append(frontier.Healed(run["name"], wiring, share, *mean_difference(file, run["name"]), choice))
    return found


def tokens_of(file: dict[str, Any]) -> float:
    """The millions of tokens of every cell."""
    (tokens,) = {run["steps"] * run["batch"] for run in file["runs"]}
    return tokens / 1e6


def divergences_of_cells(file: dict[str, Any]) -> str:
    """Markdown with the divergence on own and foreign text that each cell ended at."""
    body = []
    for run in file["runs"]:
        own, foreign = (f"{run['kl'][text]['kl']:.3f}" for text in ("own", "foreign"))
        body.append([run["wiring"], run["layers"], own, foreign])
    return table(["wiring", "layers", "KL, own text", "KL, foreign text"], body, left=2) + "\n"


def by_tokens(file: dict[str, Any], longer: list[dict[str, Any]]) -> str:
    """Markdown with the conversions that were healed as a cell and with more tokens, the converted layers alone."""
    alike: dict[tuple[str, int], dict[int, list[tuple[dict[str, Any], tuple[float, float]]]]] = {}
    for one in (file, *longer):
        asked = {found["model"] for found in one.get("differences", ())}
        for run in (run for run in one["runs"] if run["name"] in asked and "day" not in run["text"].split("+")):
            layers = select_layers(run["layers"], DEPTH)
            if "optim.train" in run.get("set", {}) and layers == tuple(range(DEPTH))[-len(layers) :]:
                tokens = round(run["tokens"] / 1e6)
                of = alike.setdefault((run["wiring"], len(layers)), {}).setdefault(tokens, [])
                of.append((run, mean_difference(one, run["name"])))
    body = []
    for (wiring, count), by in alike.items():
        for tokens, found in sorted(by.items() if len(by) > 1 else ()):
            points, error = over_seeds([lost for _, lost in found])
            cells = [f"{count} of {DEPTH}", wiring, f"{tokens} M", str(len(found))]
            for text in ("own", "foreign"):
                cells.append(f"{statistics.mean(run['kl'][text]['kl'] for run, _ in found):.3f}")
            body.append([*cells, f"{-points:.1f} ± {error:.1f}"])
    head = ["converted", "wiring", "tokens", "seeds", "KL, own text", "KL, foreign text", "points lost"]
    return table(head, body, left=2) + "\n"


def runs(raw: list[dict[str, Any]]) -> str:
    """Markdown with the divergence of every run that was measured to its end, on both held-out texts.

    Runs of a file that differ in the seed alone are one row, with a value for each seed.
    """
    head = ["wiring", "layers", "text", "tokens", "also", *(f"KL, {text} text" for text in KL_TEXTS)]
    body = []
    for file in raw:
        alike: dict[str, list[dict[str, Any]]] = {}
        for run in (run for run in file["runs"] if "kl" in run):
            same = [float(run["tokens"]), *(run.get(key) for key in ("wiring", "layers", "text", "lr", "batch", "set"))]
            alike.setdefault(json.dumps(same), []).append(run)
        for seeds in alike.values():
            seeds.sort(key=lambda run: run.get("seed", 0))
            run = seeds[0]
            cells = [run["wiring"], run["layers"], run["text"], f"{run['tokens'] / 1e6:.3g} M", _also(seeds)]
            body.append([*cells, *(_change(text, *seeds) for text in KL_TEXTS)])
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * 3 + ["--:", "---", "--:", "--:"], *body)]
    return "\n".join(lines) + "\n"


def _also(seeds: list[dict[str, Any]]) -> str:
    """What runs that differ in the seed alone set beside the columns, at 1e-3 and in steps of 32,768, and the seeds."""
    named = {
        "optim.kind": "Muon",
        "objective.hidden.weight": "hidden states",
        "optim.train": "converted alone",
        "train.anneal_share": "annealed wiring",
    }
    lr, batch = seeds[0]["lr"], seeds[0].get("batch", BATCH)
    changed = [named[key] for key in seeds[0].get("set", {}) if key in named]
    changed += [f"{lr:.0e}".replace("e-0", "e-")] * (lr != 1e-3) + [f"steps of {batch:,}"] * (batch != 32768)
    numbers = [run.get("seed", 0) for run in seeds]
    if any(numbers):
        changed.append(f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, numbers))}")
    return ", ".join(changed)


def scores(file: dict[str, Any]) -> str:
    """Markdown with the scores of the original and of every model, and the mean difference with its standard error.

    Benchmarks on which the original is not above chance are left out, as of the mean. What stands beside the mean has
    a table of its own below.
    """
    baseline, columns = baseline_of(file), informative(file)
    lines = [f"| model | {' | '.join(columns)} | mean minus original |", "|---|" + "--:|" * (len(columns) + 1)]
    for name in (baseline, *(found["model"] for found in file["differences"])):
        values = " | ".join(f"{100 * file['scores'][name][column]['value']:.1f}" for column in columns)
        mean = "" if name == baseline else "{:+.1f} ± {:.1f}".format(*mean_difference(file, name))
        lines.append(f"| {'original' if name == baseline else name} | {values} | {mean} |")
    more = f"\n{beside(file)}" if file["scores"][baseline].keys() - CHANCE.keys() else ""
    return "\n".join(lines) + "\n" + more


def by_seed(file: dict[str, Any]) -> str:
    """Markdown with runs that differ in the seed alone: each mean with its standard deviation over the seeds.

    The points lost by each seed stand beside their mean (``over_seeds``).
    """
    head = ["converted", "wiring", "tokens", "seeds", "KL, own text", "KL, foreign text", "points lost by each"]
    body = []
    asked = {found["model"] for found in file["differences"]}
    alike: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for run in (run for run in file["runs"] if run["name"] in asked):
        alike.setdefault((run["layers"], run["wiring"], run["tokens"]), []).append(run)
    for (layers, wiring, tokens), seeds in alike.items():
        found = [mean_difference(file, run["name"]) for run in seeds]
        points, error = over_seeds(found)
        cells = [layers, wiring, f"{tokens / 1e6:.3g} M", str(len(seeds))]
        for text in ("own", "foreign"):
            values = [run["kl"][text]["kl"] for run in seeds]
            cells.append(f"{statistics.mean(values):.3f} ± {_spread(values):.3f}")
        each = ", ".join(f"{-lost:.1f}" for lost, _ in found)
        body.append([*cells, each, f"{-points:.1f} ± {error:.1f}"])
    return table([*head, "mean"], body, left=2) + "\n"


def with_seeds(raw: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """The file of the seeds, with those of the longer runs of which there is more than one seed."""
    seeds, longer = raw[CONVERTED_SEEDS], raw[CONVERTED]
    asked = {found["model"] for found in longer["differences"]}
    alike = [(run["layers"], run["tokens"]) for run in longer["runs"] if run["name"] in asked]
    more = [run for run in longer["runs"] if alike.count((run["layers"], run["tokens"])) > 1]
    return {
        "runs": seeds["runs"] + more,
        "differences": seeds["differences"] + longer["differences"],
        "scores": longer["scores"] | seeds["scores"],
    }


def _spread(values: Sequence[float]) -> float:
    """The standard deviation of runs that differ in the seed; 0 of one run."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


OF_CONVERTED = """\
Longer runs, on all questions of PIQA, ARC-E and OpenBookQA and 2500 of HellaSwag, spread over it. The second table has
what stands [beside the mean](#last-words-and-held-out-text).
"""


OF_SEEDS = """\
Seeds on the same texts, asked the same questions:
"""


def everyday(file: dict[str, Any]) -> str:
    """Markdown with the runs that read text of everyday doings.

    HellaSwag's questions are of two kinds, and the file counts those that the original alone or the model alone answers
    right. The last columns are of the same questions, answered by the run of the same seed that did not read it, too.
    """
    head = ["seed", *(f"KL, {text} text" for text in KL_TEXTS), "all", "HS, videos", "HS, advice"]
    head += ["videos, by this text", "advice, by this text"]
    body = []
    for day in file["runs"]:
        other = day["name"].replace("day", "converted")
        cells = [str(day["seed"]), *(f"{day['kl'][text]['kl']:.3f}" for text in KL_TEXTS)]
        cells.append("{:+.1f} ± {:.1f}".format(*mean_difference(file, day["name"])))
        counts = [file["hellaswag"][name] for name in (day["name"], f"{day['name']} against {other}")]
        body.append([*cells, *("{:+.1f} ± {:.1f}".format(*won(kind)) for one in counts for kind in one.values())])
    return table(head, body, left=1) + "\n"


def won(counts: dict[str, int]) -> tuple[float, float]:
    """Points won on so many questions, of which one model lost some and won others, and their standard error."""
    share = (counts["won"] - counts["lost"]) / counts["questions"]
    error = ((counts["won"] + counts["lost"]) / counts["questions"] - share**2) / counts["questions"]
    return 100 * share, 100 * error**0.5


OF_LONGER = """\
The converted layers alone were trained, which are all but the embeddings, and asked the same questions:
"""
OF_EVERYDAY = """\
Half of the layers after 41 million tokens, a quarter of them text of everyday doings, which the model wrote on prompts
about them. *All* is the mean of the four benchmarks. Points are minus the original's, the last two minus those of the
same seed without this text.
"""


def beside(file: dict[str, Any]) -> str:
    """Markdown with what no mean counts: accuracies in points, losses in nats, each with the paired difference."""
    baseline = baseline_of(file)
    columns = [column for column in file["scores"][baseline] if column not in CHANCE]
    lines = [
        f"| model | {' | '.join(f'{column} | minus original' for column in columns)} |",
        "|---|" + "--:|" * 2 * len(columns),
    ]
    for name, found in {baseline: {}, **{found["model"]: found for found in file["differences"]}}.items():
        # A comparison has the differences of accuracies, of losses, and that of the held-out loss.
        told = [*found.get("tasks", []), *found.get("perplexities", []), found.get("loss")]
        cells = ["original" if name == baseline else name]
        for column in columns:
            cells.append(shown(file["scores"][name][column])[0])
            one = next((one for one in told if one is not None and one["column"] == column), None)
            digits = 1 if one is not None and "points" in one else 3
            value = None if one is None else one.get("points", one.get("nats"))
            cells.append("" if one is None else f"{value:+.{digits}f} ± {one['stderr']:.{digits}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def baseline_of(file: dict[str, Any]) -> str:
    """The name of the original in a file with scores."""
    (baseline,) = file["scores"].keys() - {found["model"] for found in file["differences"]}
    return baseline


def informative(file: dict[str, Any]) -> list[str]:
    """The benchmarks on which the original is above chance, by the rule of ``fcsd eval``."""
    counted = {name: score for name, score in file["scores"][baseline_of(file)].items() if name in CHANCE}
    return [name for name, score in counted.items() if not not_above_chance({**score, "chance": CHANCE[name]})]


def mean_difference(file: dict[str, Any], model: str) -> tuple[float, float]:
    """Points of a model minus those of the original, over the informative benchmarks, and their standard error."""
    (found,) = (found for found in file["differences"] if found["model"] == model)
    tasks = [task for task in found["tasks"] if task["column"] in informative(file)]
    points = sum(task["points"] for task in tasks) / len(tasks)
    return points, math.hypot(*(task["stderr"] for task in tasks)) / len(tasks)


def questions(file: dict[str, Any], model: str) -> int:
    """How many questions :func:`mean_difference` is about, which both models were asked."""
    return sum(file["scores"][model][column]["n"] for column in informative(file))


LAYERS = {
    "SmolLM2-135M-Instruct": RESULTS / "real_layers_smollm2_cpu.json",
    "Gemma-3-270m": RESULTS / "real_layers_gemma3_cpu.json",
}


def layers(repo: Path = Path()) -> str:
    """Markdown with the layers of each model that cost at least three times the median, and with the median layer."""
    lines = [
        "| model | layer | KL, ladder | KL, farskip | attention's read turned | MLP's read turned "
        "| attention to the first token | largest value / median |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for model, file in LAYERS.items():
        found = json.loads((repo / file).read_text())
        rows = [
            [ladder, farskip, *(layer[name] for name in ("attn_turned", "mlp_turned", "first_token", "largest"))]
            for ladder, farskip, layer in zip(
                found["ladder"]["alone"], found["farskip"]["alone"], found["layers"], strict=True
            )
        ]
        middle = [statistics.median(column) for column in zip(*rows, strict=True)]
        dear = {str(n): row for n, row in enumerate(rows) if any(row[i] >= 3 * middle[i] for i in (0, 1))}
        for name, row in {**dear, "median": middle}.items():
            values = " | ".join([f"{round(value, 3) + 0:.3f}" for value in row[:-1]])
            lines.append(f"| {model} | {name} | {values} | {row[-1]:.0f} |")
    return "\n".join(lines) + "\n"


def half_of_the_cost(alone: Sequence[float]) -> list[int]:
    """The layers that the runs named ``auto`` and ``far`` converted.

    The dearest stay standard, one by one, until the others cost half of the sum of all, or one nat if that is more; at
    most a quarter of the layers.
    """
    by_cost = sorted(range(len(alone)), key=alone.__getitem__)
    count, enough = len(alone), max(0.5 * sum(alone), 1.0)
    while sum(alone[layer] for layer in by_cost[:count]) > enough and count - 1 >= 0.75 * len(alone):
        count -= 1
    return sorted(by_cost[:count])


def rules(repo: Path = Path()) -> str:
    """Markdown with the layers that stay standard by two rules, and what the other layers cost."""
    lines = [
        "| model | wiring | rule | layers that stay standard | sum of the others | others together, untrained |",
        "|---|---|---|---|--:|--:|",
    ]
    for model, file in LAYERS.items():
        found = json.loads((repo / file).read_text())
        for wiring in ("ladder", "farskip"):
            alone, dear = found[wiring]["alone"], found[wiring]["standard"]
            limit = 5 * statistics.median(alone)
            for rule, kept in (
                ("none", range(len(alone))),
                ("five times the median", [n for n, cost in enumerate(alone) if cost < limit]),
                ("half of the cost", half_of_the_cost(alone)),
            ):
                standard = sorted(set(range(len(alone))) - set(kept))
                assert standard == sorted(dear["order"][: len(standard)])
                total, together = sum(alone[n] for n in kept), dear["together"][len(standard)]
                lines.append(
                    f"| {model} | {wiring} | {rule} | {layers_text(standard)} | {total:.2f} | {together:.2f} |"
                )
    return "\n".join(lines) + "\n"


UNTRAINED_GEMMA, GEMMA = RESULTS / "real_gemma3_cpu.json", RESULTS / "real_gemma3_1xh100.json"
OF_GEMMA = """\
Healed, the converted layers alone, on all items of PIQA, ARC-E and OpenBookQA and 2500 of HellaSwag, spread over it.
`half` is `ladder` on the last nine layers, and `far` is `farskip` on 15 of 18 layers, those of half of the cost.
The last table has what stands beside the mean.
"""


def gemma(file: dict[str, Any]) -> str:
    """Markdown with the healed runs of Gemma and their scores."""
    return f"{OF_GEMMA}\n{runs([file])}\n{scores(file)}"


RECIPE = RESULTS / "real_smollm2_recipe_1xh100.json"
OF_RECIPE = """\
Other ways to heal one conversion with as many tokens: ladder on layers 2-11 and 13-29, own and foreign text, 6 million
tokens. A run is nearer or farther if on both texts it is more than twice as far from the mean of the two seeds as these
are apart.
"""


def recipe(file: dict[str, Any]) -> str:
    """Markdown with runs that change one value, each beside the mean of the plain recipe's seeds (``base-*``)."""
    texts = ("own", "foreign")
    kl = {run["name"]: [run["kl"][text]["kl"] for text in texts] for run in file["runs"]}
    plain = [values for name, values in kl.items() if name.startswith("base-")]
    middle = [statistics.mean(pair) for pair in zip(*plain, strict=True)]
    noise = 2 * max(max(pair) - min(pair) for pair in zip(*plain, strict=True))
    first = {run["name"].removesuffix("-half"): run for run in file["runs"] if run["name"].endswith("-half")}
    head = ["what differs", *(f"KL, {text} text" for text in texts), "verdict"]
    body = []
    for run in (run for run in file["runs"] if not run["name"].endswith("-half")):
        changed, seed = run.get("set", {}), run["seed"]
        if run["name"] in first:
            half = first[run["name"]]
            what = f"layers {half['layers']} alone for {half['tokens'] / 1e6:g} million tokens"
        elif "objective.temperature" in changed:
            what = f"temperature {changed['objective.temperature']:g}"
        elif "train.anneal_share" in changed:
            what = f"wiring annealed over {changed['train.anneal_share']:.0%} of the steps"
        else:
            what = f"nothing, seed {seed}"
        moved = [value - mean for value, mean in zip(kl[run["name"]], middle, strict=True)]
        verdict = "nearer" if max(moved) < -noise else "farther" if min(moved) > noise else "no difference shown"
        verdict = "" if run["name"].startswith("base-") else verdict
        body.append([what, *(f"{value:.3f}" for value in kl[run["name"]]), verdict])
    return table(head, body, left=1) + "\n"


EXPERTS = RESULTS / "real_experts_smollm2_2xh100.json"


def experts(file: dict[str, Any]) -> str:
    """Markdown with the runs of the mixture of experts, what they score, and how far two engines' answers agree.

    Runs that were cut off have no measurement after the run.
    """
    texts = [text for text in ("own", "doc", "foreign") if text in file["runs"][0]["kl"]]
    measured = [{"doc": "KL, own documents"}.get(text, f"KL, {text} text") for text in texts]
    head = ["run", "begins from", "wiring", "layers", "own text, during the run", *measured, "tokens/s"]
    body = []
    for run in file["runs"]:
        during = ", ".join(f"{kl:.3f}" for _, kl in run["held_out"][:3])
        after = [_change(text, run) for text in texts] if "kl" in run else ["not measured"] * len(texts)
        names = [run[name] for name in ("name", "from", "wiring", "layers")]
        body.append([*names, during, *after, f"{run['tokens_per_second']:.0f}"])
    parts = [table(head, body, left=4) + "\n"]
    if file.get("scores"):
        parts.append(scores(file))
    if file.get("compared"):
        found = ("engine_tokens", "vllm_tokens", "same_from_the_first")
        rows = [[one["prompt"], *(str(one[name]) for name in found)] for one in file["compared"]]
        head = ["prompt", "tokens of fcsd's engine", "tokens of vLLM", "the same from the first on"]
        parts.append(table(head, rows, left=1) + "\n")
    return "\n".join(parts)


SPLITS = RESULTS / "real_experts_split_cpu.json"


def splits(file: dict[str, Any]) -> str:
    """Markdown with the divergence of untrained mixtures from the dense model, by how its MLPs were divided."""
    head = ["experts", "active", "shared neurons", "of all neurons in use", "split", "router", "spread"]
    head += ["KL, foreign text"]
    body = []
    for one in file["models"]:
        rest = file["neurons"] - one["shared"]
        used = (one["shared"] + rest * one["active"] / one["experts"]) / file["neurons"]
        cells = [*map(str, (one["experts"], one["active"], one["shared"])), f"{used:.0%}"]
        body.append(
            [*cells, one["split"], one["router"], f"{one['spread']:g}", f"{abs(one['kl']['foreign']['kl']):.3f}"]
        )
    return table(head, body, left=0) + "\n"


OBJECTIVES = RESULTS / "real_kl_beside_sft_smollm2_1xh100.json"
OF_OBJECTIVES = """\
Half of the layers by ladder, the converted layers alone, after 24 million tokens of foreign text by KL and by SFT, and
before them, asked the same questions:
"""


ROUNDED = RESULTS / "real_smollm2_rounded_1xh100.json"
OF_ROUNDED = """\
The original and the model that KL healed above, with the weights of all linear layers in decoder layers rounded to
nearest after training, to INT4 with a step for each group of inputs. The last column is the difference to the same
model in bf16.
"""


def rounded(file: dict[str, Any]) -> str:
    """Markdown with what rounding costs the original and a healed model."""
    head = ["model", "weights", *(f"KL, {text}" for text in ("own text", "`doc`", "foreign text"))]
    body = []
    for form in file["forms"]:
        weights = f"INT4, groups of {form['rounded'].rpartition('g')[2]}" if form["rounded"] else "bf16"
        kl = [
            f"{abs(form['kl'][text]['kl']):.3f}" if form["kl"] else "not measured" for text in ("own", "doc", "foreign")
        ]
        means = [form[key] and form[key]["overall"] for key in ("minus_original", "minus_unrounded")]
        points = ["{points:+.1f} ± {stderr:.1f}".format(**mean) if mean else "" for mean in means]
        body.append(["original" if form["model"] == "original" else "healed", weights, *kl, *points])
    return table([*head, "minus original", "by rounding"], body, left=2) + "\n"


def _change(text: str, *seeds: dict[str, Any]) -> str:
    """The divergence of runs that differ in the seed alone on one text, after that of their untrained conversion."""
    if any(text not in run["kl"] for run in seeds):
        return "not measured"
    after = ", ".join(f"{run['kl'][text]['kl']:.3f}" for run in seeds)
    before = next((run["untrained_kl"] for run in seeds if run.get("untrained_kl")), None)
    return f"{before[text]['kl']:.2f} → {after}" if before else after


def filled(page: str, raw: dict[Path, dict[str, Any]], repo: Path = Path()) -> str:
    """The page with the tables of the stored runs and of the layers; ``raw`` is by file."""
    stored, stored_cells = list(raw.values()), read_cells(repo)
    tables = {
        "runs": runs(stored),
        "scores": scores(stored[0]),
        "seeds": scores(raw[SEEDS]),
        "converted": f"{OF_CONVERTED}\n{scores(raw[CONVERTED])}",
        "by seed": f"{OF_SEEDS}\n{by_seed(with_seeds(raw))}",
        "all layers": f"{OF_LONGER}\n{scores(raw[LONGER])}",
        "everyday": f"{OF_EVERYDAY}\n{everyday(raw[EVERYDAY])}",
        "objectives": f"{OF_OBJECTIVES}\n{scores(json.loads((repo / OBJECTIVES).read_text())['asked'])}",
        "rounded": f"{OF_ROUNDED}\n{rounded(json.loads((repo / ROUNDED).read_text())['after_training'])}",
        "answer": answer(stored, repo),
        "speeds": frontier.speeds(repo),
        "cells": frontier.table_of_cells(cells(stored_cells)),
        "wanted": frontier.table_of_speeds_wanted(cells(stored_cells), repo),
        "divergences": divergences_of_cells(stored_cells),
        "more tokens": by_tokens(stored_cells, [raw[file] for file in MORE]),
        "frontier": frontier.table_of_losses(repo),
        "larger": frontier.of_larger(),
        "layers": layers(repo),
        "rules": rules(repo),
        "gemma": gemma(json.loads((repo / GEMMA).read_text())),
        "recipe": f"{OF_RECIPE}\n{recipe(json.loads((repo / RECIPE).read_text()))}",
        "experts": experts(json.loads((repo / EXPERTS).read_text())),
        "splits": splits(json.loads((repo / SPLITS).read_text())),
        "passages": beside(json.loads((repo / PASSAGES).read_text())),
    }
    return between_marks(page, tables)


def read(repo: Path = Path()) -> dict[Path, dict[str, Any]]:
    """The stored runs, by file."""
    return {file: json.loads((repo / file).read_text()) for file in (*RAW, *MORE)}
