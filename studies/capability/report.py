"""Writes studies/capability/CAPABILITY.md and its picture from the stored results of the capability study.

    python -m studies.capability.report [--results FILE.jsonl] [--page PAGE.md]

A table appears when its runs are stored. Results of trials, which used a limit on questions or other budgets, are
refused.
"""

import argparse
from pathlib import Path

from studies.capability.models import Lines, Models, pm, settings_of, summary
from studies.capability.picture import PAPERS, draw
from studies.capability.results import read_lines
from studies.capability.rows import (
    ANNEAL_METHODS,
    ANNEAL_SHARES,
    BEST_ANNEALED,
    LAYERS,
    LEAST_STEPS,
    SHARES,
    SWEEP_STEPS,
    TABLE_1,
    TABLE_2,
    TABLE_2_ROWS,
    TABLE_4,
    TABLE_4_LAYERS,
    TABLE_4_METHODS,
    TEXTS,
    TOKEN_IDS,
    chosen_half,
)
from studies.capability.scores import Scores, fit, tokens_to
from studies.capability.wirings_report import desync, distance, on_policy, scratch, token_ids

from fcsd.markdown import table

REACHED = 0.99
LARGER_TEACHER = "moe_64"
HEAD = """# Capability: how far healing goes

<!-- studies/capability/report.py writes this page from benchmarks/results/capability{suffix}.jsonl; do not edit it. -->

FarSkip's claim is that a rewired model that learns from its own original keeps the original's capability, and that
fine-tuning on the same text does not. These runs repeat its experiments on {subject} and its benchmarks,
under the suite `strict`, without a limit on questions. The items are about a small closed world
([assets/README.md](../../assets/README.md)), so the scores say how well the methods heal, and nothing about knowledge.

The [raw file](../../benchmarks/results/capability{suffix}.jsonl) has the settings of every run. The programs that did
the runs are in the history of the repository (`studies/capability` in commit 8a84521). {values}
The teacher was trained on {tokens:,.0f} M tokens. Device: {devices}.
[results](../../benchmarks/results/capability.md#{section}) says what the tables show.

- *same* is the teacher's own mixture, as text. *other* is other real text, and questions of the same forms about other
  facts; of *other-10* and *other-20*, 10 and 20 % have wrong answers. *none* is real text alone.
- Differences are in points from the teacher, paired by question. ± is one standard error: over questions and seeds, or
  over questions alone where there is one model.
- *Above chance* is the mean over benchmarks of (score - chance) / (teacher - chance). *Won back* is that of (score -
  untrained) / (teacher - untrained), and *loss won back* the same of the held-out loss."""
SWEPT = """Batch size and learning
rate were chosen by the training loss of runs of {steps} steps, in two stages, for KL and SFT alike (FarSkip §5.1,
scaled down). A budget of fewer than {least} steps takes a smaller batch, and a rate smaller by the square root."""
NOT_SWEPT = """Batch size and learning
rate were not chosen by short runs: the batch is twice what the bundled teacher's students have with about as few
tokens, and the rate is half of what they would have at this batch, as in the training of the teachers."""


def page(lines: Lines, picture: Path) -> str:
    """The page. The picture is drawn if its runs are stored.

    Raises:
        ValueError: the lines are of trials, or of teachers with different budgets.
    """
    models = Models(lines)
    budgets = {line["teacher_tokens"] for line in models.lines.values()}
    if len(budgets) != 1 or any(line["limit"] for line in models.lines.values()):
        raise ValueError("the results are of trials with a limit, or of different teachers, and make no page")
    tokens = budgets.pop()
    named = models.teacher.get("teacher", "teacher")
    values = NOT_SWEPT if named == LARGER_TEACHER else SWEPT.format(steps=SWEEP_STEPS, least=LEAST_STEPS)
    about = {"values": values, "tokens": tokens / 1e6, "subject": subject_of(models)}
    about |= {"suffix": "", "section": "capability-on-h200s"} if named == "teacher" else _of_sibling(named)
    parts = [HEAD.format(**about, devices=devices_of(models))]
    parts += [table_1(models), larger(models), kinds(models)]
    parts += [recovery(models, tokens, picture), table_2(models), figure_3(models), early_stop(models)]
    parts += [annealed(models, tokens)]
    parts += [chosen_layers(models), token_ids(models), table_4(models)]
    parts += [distance(models), desync(models), scratch(models), on_policy(models), chosen(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_sibling(name: str) -> dict[str, str]:
    section = "a-larger-model" if name == LARGER_TEACHER else "capability-of-the-siblings"
    return {"suffix": f"_{name}", "section": section}


def subject_of(models: Models) -> str:
    """The teacher and the wiring, in words."""
    teacher, wiring = models.teacher.get("teacher", "teacher"), models.teacher.get("wiring", "farskip")
    named = "the bundled teacher" if teacher == "teacher" else f"the teacher `{teacher}`"
    return named if wiring == "farskip" else f"{named}, with the wiring {wiring},"


def devices_of(models: Models) -> str:
    """The GPUs and the versions of the libraries, and where the models were scored that were scored elsewhere."""
    found = {
        (line["device"], *(f"{name} {v}" for name, v in line["versions"].items())) for line in models.lines.values()
    }
    elsewhere = [
        f"{line['name']} was scored on {on}" for line in models.lines.values() if (on := line.get("scored_on"))
    ]
    return "; ".join([*sorted(", ".join(words) for words in found), *elsewhere])


def table_1(models: Models) -> str:
    """Every benchmark for the teacher, the untrained conversion, and the methods on two kinds of text."""
    rows = {"teacher": [models.teacher], "untrained": [models.untrained]}
    for text in ("same", "other"):
        for method in ("KL", BEST_ANNEALED, "SFT"):
            if found := models.seeds(method, text, TABLE_1, stop="best"):
                rows[f"{method}, {text}"] = found
    if len(rows) == 2:
        return ""
    return "\n\n".join(
        [
            f"## Table 1: {TABLE_1:.0%} of the teacher's tokens",
            "MBPP+ is scored five times in a run, and the best checkpoint is kept, for KL and SFT alike.",
            _by_benchmark({name: models.scores(found) for name, found in rows.items()}),
        ]
    )


def _by_benchmark(scores: dict[str, Scores]) -> str:
    """The scores of models, the teacher first, their differences from it, and what training won back."""
    first = scores["teacher"]
    body = [
        [name, *(f"{s.tasks[c]:.1f}" for c in first.tasks), f"{sum(s.tasks.values()) / len(s.tasks):.1f}"]
        for name, s in scores.items()
    ]
    differences = [[c, *(pm(s.below[c], sign=True) for s in list(scores.values())[1:])] for c in first.below]
    return "\n\n".join(
        [
            table(["Model", *first.tasks, "Avg"], body),
            "Differences from the teacher:",
            table(["Benchmark", *list(scores)[1:]], differences),
            summary(scores),
        ]
    )


def larger(models: Models) -> str:
    """The larger teacher and its students."""
    rows = {"teacher": [models.teacher], "untrained": [models.untrained]}
    for method in ("KL", "SFT"):
        if found := models.seeds(method, TOKEN_IDS, TABLE_1):
            rows[method] = found
    if len(rows) == 2:
        return ""
    note = "The students are healed on token ids of new documents, encoded as in the teacher's training. The batch in "
    note += f"tokens, the learning rate and the steps are {settings_of(rows['KL'][0])}."
    scores = {name: models.scores(found) for name, found in rows.items()}
    return f"## Healing on {TABLE_1:.0%} of the teacher's tokens\n\n{note}\n\n{_by_benchmark(scores)}"


def kinds(models: Models) -> str:
    """What the text is."""
    found = {
        f"{method}, {text}": models.scores(lines)
        for text in TEXTS
        for method in ("KL", BEST_ANNEALED, "SFT")
        if (lines := models.seeds(method, text, SHARES[2]))
    }
    return f"## The text, at {SHARES[2]:.0%} of the tokens\n\n{summary(found)}" if found else ""


def recovery(models: Models, tokens: int, picture: Path) -> str:
    """Recovery over tokens, with the extrapolation."""
    named = [(method, text) for text in ("same", "other") for method in ("KL", "SFT")]
    runs = {f"{method}, {text}": _by_share(models, method, text) for method, text in named}
    runs = {name: found for name, found in runs.items() if len(found) > 2}
    if not runs:
        return ""
    scores = {name: {share: models.scores(lines) for share, lines in found.items()} for name, found in runs.items()}
    curves = {name: [(share * tokens, s.above_chance) for share, s in found.items()] for name, found in scores.items()}
    draw(curves, picture)
    heads = [f"{share:.1%}" for share in SHARES]
    body = [
        [
            name,
            *(
                f"{pm(found[share].above_chance, 100)} ({found[share].seeds})" if share in found else "-"
                for share in SHARES
            ),
        ]
        for name, found in scores.items()
    ]
    settings = [
        [name, *(settings_of(found[share][0]) if share in found else "-" for share in SHARES)]
        for name, found in runs.items()
    ]
    lines = []
    for name, points in curves.items():
        line = fit(points)
        for budget, size in PAPERS.items():
            value, low, high = line.at(size)
            lines.append([name, budget, f"{100 * value:.1f} %", f"{100 * low:.1f} to {100 * high:.1f} %"])
    return "\n\n".join(
        [
            "## Recovery over tokens",
            f"![Recovery over training tokens](../../benchmarks/results/{picture.name})",
            "Above chance, in % of the teacher, by the share of its tokens. In brackets: the number of models.",
            table(["Method, text", *heads], body),
            "Budgets differ in more than their tokens. The batch in tokens, the learning rate and the steps are:",
            table(["Method, text", *heads], settings),
            "Extrapolated by a power law of the missing share in the number of tokens. The range is the central 95 % "
            "of fits to points moved by their standard errors; it does not say whether the law holds so far out.",
            table(["Method, text", "at", "above chance", "range"], lines, left=2),
        ]
    )


def _by_share(models: Models, method: str, text: str) -> dict[float, list[dict]]:
    found = {s: models.seeds(method, text, s, stop="best" if s == TABLE_1 else "") for s in SHARES}
    return {share: lines for share, lines in found.items() if lines}


def table_2(models: Models) -> str:
    """The rows of FarSkip Table 2."""
    found = {
        method: models.scores(lines)
        for method, (share, layers) in TABLE_2_ROWS.items()
        if (lines := models.seeds(method, "same", share, layers))
    }
    for share in (50, 75, 90):
        if lines := models.seeds("untrained", layers=f"{share}%"):
            found[f"untrained, last {share}%"] = models.scores(lines)
    if not any(method in found for method in TABLE_2_ROWS):
        return ""
    note = (
        "All rows have the batch, the rate and the steps of KL. With 0.25x and 4x the batch these are "
        f"{0.25 * TABLE_2:.2%} and {4 * TABLE_2:.0%} of the tokens, as in the paper; the latter reads its text twice. "
        "The weight of the L2 term has its own sweep."
    )
    return f"## Table 2: {TABLE_2:.0%} of the tokens, *same*\n\n{note}\n\n{summary(found)}"


def figure_3(models: Models) -> str:
    """Untrained conversions of the first and the last N layers."""
    body = []
    for n in range(1, LAYERS):
        lines = [models.seeds("untrained", layers=f"{end}:{n}") for end in ("first", "last")]
        if all(lines):
            body.append([str(n), *(pm(models.scores(found).below["Avg"], sign=True) for found in lines)])
    if not body:
        return ""
    return f"## Figure 3: the first and the last N layers, untrained\n\n{table(['N', 'first', 'last'], body)}"


def early_stop(models: Models) -> str:
    """The run that was provoked to collapse."""
    lines = [line for line in models.lines.values() if line["run"]["early_stop"] == "collapse"]
    if not lines:
        return ""
    line = lines[0]
    best, last = max(line["scores"], key=lambda score: score[1]), line["scores"][-1]
    ended = f"stopped at step {line['steps']} of {line['planned_steps']}"
    said = (
        f"A run with ten times the chosen learning rate was scored {len(line['scores'])} times on 40 problems. Its "
        f"best score is {100 * best[1]:.1f}, first at step {best[0]}, its last one {100 * last[1]:.1f} at step "
        f"{last[0]}. It {ended}. The exported checkpoint is the best one, the latest of equal scores:"
    )
    return f"## Early stopping by MBPP+\n\n{said}\n\n{summary({'exported': models.scores(lines)})}"


def annealed(models: Models, tokens: int) -> str:
    """Annealed wirings against plain KL, at equal tokens."""
    body = []
    for method in ANNEAL_METHODS:
        found = {share: lines for share in ANNEAL_SHARES if (lines := models.seeds(method, "same", share))}
        if len(found) < 2:
            continue
        scores = {share: models.scores(lines) for share, lines in found.items()}
        reached = tokens_to(REACHED, [(share * tokens, s.above_chance[0]) for share, s in scores.items()])
        cells = [_with_seconds(scores[share]) if share in scores else "-" for share in ANNEAL_SHARES]
        body.append([method, *cells, f"{reached / 1e6:.1f} M" if reached else "not reached"])
    if len(body) < 2:  # plain KL alone, from another study
        return ""
    head = ["Method", *(f"{share:.1%} of the tokens" for share in ANNEAL_SHARES), f"tokens to {REACHED:.0%}"]
    note = (
        "Above chance, in % of the teacher, and the mean seconds in steps. Runs share GPUs with others, so the seconds "
        "say little. One GPU exchanges nothing that could be hidden."
    )
    return f"## Annealed wiring\n\n{note}\n\n{table(head, body)}"


def chosen_layers(models: Models) -> str:
    """Half of the layers: those that a search chose, and the last ones."""
    halves = {"KL, last 50%": "50%", "KL, chosen 50%": chosen_half()}
    rows = [*(("untrained", "", layers) for layers in halves.values())]
    rows += [(method, "same", layers) for method, layers in halves.items()]
    found = _of_part(models, rows, TABLE_2)
    if not any(name.startswith("KL, chosen") for name in found):
        return ""
    return f"## Chosen layers: {TABLE_2:.0%} of the tokens, *same*\n\n{summary(found)}"


def table_4(models: Models) -> str:
    """Ladder Table 4: 16 and 20 of 32 layers."""
    rows = [*(("untrained", "", layers) for layers in TABLE_4_LAYERS)]
    rows += [(method, "other", layers) for layers in TABLE_4_LAYERS for method in TABLE_4_METHODS]
    found = _of_part(models, rows, TABLE_4)
    if not any(name.startswith("SFT") for name in found):
        return ""
    note = (
        "The last half and the last 62.5 % of the layers, as 16 and 20 of Llama-3.1-8B's 32. Two epochs of the same "
        "text, *other*. The published values (batch 32, learning rate 5e-6, 200 warm-up steps) belong to a model of "
        "8 B parameters. AlpacaEval, the paper's other benchmark, needs a judge over a network and was not run."
    )
    return f"## Ladder Table 4: {TABLE_4:.0%} of the tokens\n\n{note}\n\n{summary(found)}"


def _of_part(models: Models, rows: list[tuple[str, str, str]], share: float) -> dict[str, Scores]:
    """The scores of runs on a part of the layers, by method and layers.

    Args:
        rows: method, text and layers of each.
    """
    return {
        f"{method}, layers {layers}": models.scores(lines)
        for method, text, layers in rows
        if (lines := models.seeds(method, text, share if text else 0.0, layers))
    }


def _with_seconds(scores: Scores) -> str:
    return f"{pm(scores.above_chance, 100)} ({scores.seconds:.0f} s)"


def chosen(lines: Lines) -> str:
    """The values that the sweeps chose."""
    found = {name: line["chosen"] for name, line in lines.items() if "chosen" in line}
    keys = list(dict.fromkeys(key for values in found.values() for key in values))
    body = [[name, *(str(values.get(key, "-")) for key in keys)] for name, values in found.items()]
    return f"## Chosen values\n\n{table(['sweep', *keys], body)}" if body else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/capability.jsonl"))
    parser.add_argument("--page", type=Path, default=Path("studies/capability/CAPABILITY.md"))
    args = parser.parse_args()
    args.page.write_text(page(read_lines([args.results]), args.results.with_suffix(".png")))


if __name__ == "__main__":
    main()
