"""The page's later tables: token ids, distance 2, Desync, training from random weights, and text by the models."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

from studies.capability.models import Models, pm, summary
from studies.capability.rows import (
    AVERAGED,
    DEGREE,
    DESYNC,
    DESYNC_WIRINGS,
    DISTANCE_SHARES,
    ON_POLICY,
    SCRATCH,
    SCRATCH_WIRINGS,
    TABLE_1,
    TOKEN_IDS,
    WRITTEN,
)
from studies.capability.scores import by_column

from fcsd.markdown import table


def distance(models: Models) -> str:
    """Two sub-blocks in flight, against one."""
    own = models.seeds("untrained, distance 2")
    found = {"untrained": models.scores([models.untrained])}
    if own:
        found["untrained, distance 2"] = models.scores(own, own[0])
    for share in DISTANCE_SHARES:
        for method, start in (("KL", models.untrained), ("KL, distance 2", own[0] if own else None)):
            if lines := models.seeds(method, "same", share):
                found[f"{method}, {share:.1%} of the tokens"] = models.scores(lines, start)
    if not any("distance 2" in name for name in found):
        return ""
    note = "The output of two sub-blocks may be in flight at a rewired read, instead of one. Rows that do not say "
    note += "distance 2 have distance 1. *Won back* counts from each wiring's own untrained conversion."
    if not any(name.startswith("KL, distance 2") for name in found):
        note += " No student of distance 2 has been trained yet."
    return f"## Distance 2, *same*\n\n{note}\n\n{summary(found)}"


def token_ids(models: Models) -> str:
    """Table 1 on the teacher's token ids, beside the text, and HumanEval+ by model."""
    lines = {
        f"{method}, {words}": found
        for text, words in (("same", "as text"), (TOKEN_IDS, "as token ids"))
        for method in ("KL", "SFT")
        if (found := models.seeds(method, text, TABLE_1, stop="best"))
    }
    if not any("ids" in name for name in lines):
        return ""
    body = [
        [
            name,
            ", ".join(
                f"{100 * by_column(line)['HEval+']['value']:.0f}"
                for line in sorted(found, key=lambda line: line["run"]["seed"])
            ),
            pm(scores.of_teacher, 100),
            pm(scores.above_chance, 100),
        ]
        for name, found in lines.items()
        for scores in [models.scores(found)]
    ]
    head = ["Method, *same*", "HumanEval+ of each model", "% of teacher", "above chance, %"]
    note = "The token ids are of new documents, encoded as in the teacher's training: a prompt and its answer apart. A "
    note += "text is encoded as a whole."
    return f"## *Same* as token ids, at {TABLE_1:.0%} of the tokens\n\n{note}\n\n{table(head, body)}"


def on_policy(models: Models) -> str:
    """KL on text that the teacher or the student wrote."""
    found = {
        f"KL, {text}": models.scores(lines)
        for text in ("same", *WRITTEN)
        if (lines := models.seeds("KL", text, ON_POLICY))
    }
    if not any(f"KL, {text}" in found for text in WRITTEN):
        return ""
    note = "The teacher, or the untrained conversion, continued the first third of each document of *same* by sampling "
    note += "at temperature 1. The conversion wrote before the training, so its text is on-policy at the first step "
    note += "alone."
    return f"## Text of the models' own: {ON_POLICY:.0%} of the tokens\n\n{note}\n\n{summary(found)}"


def desync(models: Models) -> str:
    """A dense teacher converted to Desync, healed, exported and evaluated, beside ladder."""
    found = {"untrained": models.scores([models.untrained])}
    if plain := models.seeds("KL", "same", DESYNC):
        found["KL"] = models.scores(plain)
    for words in DESYNC_WIRINGS:
        if not (start := models.seeds(f"untrained, {words}")):
            continue
        found[f"untrained, {words}"] = models.scores(start, start[0])
        if lines := models.seeds(f"KL, {words}", "same", DESYNC):
            found[f"KL, {words}"] = models.scores(lines, start[0])
    if not any("desync" in name for name in found):
        return ""
    note = "Rows without a wiring in their name are the wiring of this page. A Desync model is the function of its "
    note += "tensor-parallel degree, which is simulated on one GPU. Each trained one was exported with `fcsd export`, "
    note += "which reloads it in a fresh process, and the export was evaluated. *Won back* counts from each wiring's "
    note += "own untrained conversion."
    return f"## Desync from a trained model: {DESYNC:.0%} of the tokens, *same*\n\n{note}\n\n{summary(found)}"


def scratch(models: Models) -> str:
    """Training from random weights: the loss of each wiring against the standard one."""
    body = [row for model, wirings in SCRATCH_WIRINGS.items() for row in _scratch_rows(models, model, wirings)]
    if not body:
        return ""
    note = (
        f"The training loss in nats per token, averaged over the last {AVERAGED} steps, on the text *same*. All rows "
        "have the same learning rate, and within a seed the same data in the same order; differences are paired by "
        f"seed. Desync has a degree of {DEGREE}, which is simulated on one GPU. FarSkip Appendix A has 2.187 for the "
        "standard and 2.205 for the farskip model, after 50 B tokens."
    )
    head = ["Model", "Parameters", "Wiring", "Loss", "minus standard", "Held-out loss", "models"]
    return f"## From scratch: {SCRATCH:.0%} of the teacher's tokens\n\n{note}\n\n{table(head, body, left=3)}"


def _scratch_rows(models: Models, model: str, wirings: Sequence[str]) -> list[list[str]]:
    runs = {wiring: _by_seed(models, model, wiring) for wiring in wirings}
    rows = []
    for wiring, found in runs.items():
        if not found:
            continue
        losses = [line["final_loss"] for line in found.values()]
        paired = [seed for seed in found if seed in runs["standard"]]
        gaps = [found[seed]["final_loss"] - runs["standard"][seed]["final_loss"] for seed in paired]
        held_out = [line["metrics"]["held_out_sft"] for line in found.values()]
        size = f"{next(iter(found.values()))['parameters'] / 1e6:.2f} M"
        gap = "-" if wiring == "standard" or not gaps else _mean(gaps, "+.4f")
        rows.append([model or "MoE", size, wiring, _mean(losses), gap, _mean(held_out), str(len(found))])
    return rows


def _by_seed(models: Models, model: str, wiring: str) -> dict[int, dict[str, Any]]:
    """The stored lines of a wiring by seed."""
    found = models.seeds(f"from scratch, {wiring}", "same", SCRATCH)
    return {line["run"]["seed"]: line for line in found if line["run"]["model"] == model}


def _mean(values: Sequence[float], form: str = ".4f") -> str:
    """The mean over seeds, with its standard error if there are several."""
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{mean(values):{form}} ± {stdev(values) / math.sqrt(len(values)):.4f}"
