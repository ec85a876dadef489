"""All studies: those of the papers' own experiments (runs.py), and those of what may heal better or in fewer tokens.

- ``chosen``: the half of the layers that `fcsd choose-layers` chose, against the last half.
- ``table-4``: Ladder Table 4, for a dense teacher. The published values (batch 32, 5e-6, 200 warm-up steps, two epochs)
  belong to a model of 8 B parameters, so KL and SFT are also run with the values that the sweeps choose.
- ``distance``: farskip with two sub-blocks in flight, against one.
- ``desync``: a dense teacher converted to Desync at degrees of 2 and 4, healed, exported and evaluated, against ladder.
  The paper trains Desync from scratch; to convert a checkpoint is ours.
- ``scratch``: training from random weights (scratch.py).
- ``tokens``: Table 1 on *same* as token ids, encoded as in the teacher's training, instead of as text. Healing on the
  text makes HumanEval+ fall, because the text never has the tokens at the end of its prompts
  (benchmarks/results/RESULTS.md).
- ``larger``: a teacher of 129 M parameters with 64 experts (``moe_64`` in studies/teacher/layouts.py), healed on 10 %
  of its token ids. It has no sweep: the rate is half of what the bundled teacher's students would have at this batch,
  as in the training of the teachers.
- ``on-policy``: text that the teacher, or the untrained conversion, wrote itself (written.py), against the mixture. The
  conversion writes once, before the training, so its text is on-policy at the first step alone.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from studies.capability import runs
from studies.capability.runs import KL, PUBLISHED, SEEDS, SEQ_LEN, SFT, TABLE_1, TABLE_2, TOKEN_IDS, WRITTEN, Run
from studies.capability.scratch import scratch_runs

CHOICE = Path(__file__).resolve().parents[2] / "benchmarks/results/chosen_layers.json"
# They name layers of the bundled teacher or its results, are about its architecture, or have a model of their own.
BUNDLED_ONLY = ("figure-3", "chosen", "distance", "scratch")
DENSE_ONLY = ("table-4", "desync")
SIBLINGS = {
    "farskip": ("table-1", "tokens"),
    "ladder": ("table-1", "tokens", *DENSE_ONLY),
}  # by wiring: what the siblings' pages have
TABLE_4 = 0.02  # of the teacher's tokens: two epochs of a text of 1 %
LADDER_LAYERS = ("50%", "62.5%")  # Hybrid-Ladder-8B-16L and -20L: the last 16 and 20 of 32
DISTANCE_BUDGETS = (0.003, 0.01)  # of the teacher's tokens
ON_POLICY = 0.01  # of the teacher's tokens
DESYNC = 0.01  # of the teacher's tokens
LARGER = {"train.batch_tokens": 32 * SEQ_LEN, "train.micro_batch_size": 32, "optim.lr": 5e-4}
DESYNC_WIRINGS, DEGREES = ("desync-2x", "desync-4x"), (2, 4)
LADDER = {"train.batch_tokens": 32 * SEQ_LEN, "optim.lr": 5e-6, "optim.warmup_steps": 200}  # Ladder §4.2


def studies() -> dict[str, list[Run]]:
    """Study -> its runs."""
    originals = [Run("teacher"), Run("untrained")]
    return runs.studies() | {
        "chosen": [*originals, *_chosen()],
        "table-4": [*originals, *_table_4()],
        "distance": [*originals, *_distance()],
        "desync": [*originals, *_desync()],
        "scratch": scratch_runs(),
        "on-policy": [*originals, *_on_policy()],
        "tokens": [*originals, *_tokens()],
        "larger": [*originals, *_larger()],
    }


def _chosen() -> list[Run]:
    halves = {"KL, last 50%": "50%", "KL, chosen 50%": chosen_half()}
    trained = [
        Run(method, "same", TABLE_2, seed, layers, KL, sweep="kl-same")
        for seed in SEEDS
        for method, layers in halves.items()
    ]
    return [*(Run("untrained", layers=layers) for layers in halves.values()), *trained]


def _table_4() -> list[Run]:
    rows: list[tuple[str, dict[str, Any], str]] = [
        (f"{loss}, {words}", settings | own, sweep)
        for loss, settings in (("SFT", SFT), ("KL", KL))
        for words, own, sweep in (("published values", LADDER, PUBLISHED), ("swept values", {}, ""))
    ]
    return [
        *(Run("untrained", layers=layers) for layers in LADDER_LAYERS),
        *(
            Run(method, "other", TABLE_4, seed, layers, settings, sweep=sweep, epochs=2)
            for layers in LADDER_LAYERS
            for method, settings, sweep in rows
            for seed in SEEDS
        ),
    ]


def _distance() -> list[Run]:
    two = {"init.distance": 2}
    rows = {"KL": KL, "KL, distance 2": {**KL, **two}}
    return [
        Run("untrained, distance 2", settings=two),
        *(
            Run(method, "same", tokens, seed, settings=settings)
            for tokens in DISTANCE_BUDGETS
            for method, settings in rows.items()
            for seed in SEEDS
        ),
    ]


def _tokens() -> list[Run]:
    return [
        Run(method, text, TABLE_1, seed, settings=settings, early_stop="best")
        for text in ("same", *TOKEN_IDS)
        for method, settings in (("KL", KL), ("SFT", SFT))
        for seed in SEEDS
    ]


def _larger() -> list[Run]:
    return [
        Run(method, TOKEN_IDS[0], TABLE_1, seed, settings={**settings, **LARGER}, sweep=PUBLISHED)
        for seed in SEEDS
        for method, settings in (("KL", KL), ("SFT", SFT))
    ]


def _on_policy() -> list[Run]:
    return [Run("KL", text, ON_POLICY, seed, settings=KL) for text in ("same", *WRITTEN) for seed in SEEDS]


def _desync() -> list[Run]:
    wirings = {
        f"{wiring} at degree {degree}": {"init.wiring": wiring, "init.tp_degree": degree}
        for wiring in DESYNC_WIRINGS
        for degree in DEGREES
    }
    return [
        *(Run(f"untrained, {words}", settings=settings) for words, settings in wirings.items()),
        *(Run("KL", "same", DESYNC, seed, settings=KL) for seed in SEEDS),
        *(
            Run(f"KL, {words}", "same", DESYNC, seed, settings={**KL, **settings}, export=True)
            for words, settings in wirings.items()
            for seed in SEEDS
        ),
    ]


@cache
def _choice() -> dict[str, Any]:
    return json.loads(CHOICE.read_text())


def chosen_half() -> str:
    """The half of the bundled teacher's layers that the search chose, as ``fcsd convert --layers`` takes it."""
    return next(choice["spec"] for choice in _choice()["choices"] if 2 * choice["n"] == _choice()["depth"])
