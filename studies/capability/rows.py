"""What the runs of the capability study have in common: budgets, and the methods that are rows of the page's tables.

A budget is a share of the tokens that the teacher was trained on. The programs that did the runs are in the history of
the repository; each stored line has its run, with all settings.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of the recovery over tokens
TABLE_1, TABLE_2 = 0.1, 0.05
LAYERS = 10  # of the bundled teacher
LEAST_STEPS = 600  # a shorter budget halved the batch until it had as many steps
SWEEP_STEPS = 50  # of each trial of a sweep
BEST_ANNEALED = "KL, annealed over 0.25"  # the better one, which Table 1 has besides the paper's rows
TEXTS = ("same", "other", "other-10", "other-20", "none", "same-tokens")
TOKEN_IDS = "same-tokens"  # the text whose lines are token ids, encoded as in the training of the teacher
WRITTEN = ("teacher-written", "student-written")

TABLE_2_ROWS = {  # method -> share of the tokens, and the rewired layers
    "SFT": (TABLE_2, "all"),
    "KL": (TABLE_2, "all"),
    "KL + hidden L2": (TABLE_2, "all"),
    "KL, frozen embeddings and head": (TABLE_2, "all"),
    "KL, 0.25x batch": (TABLE_2 * 0.25, "all"),
    "KL, 4x batch": (TABLE_2 * 4.0, "all"),
    **{f"KL, last {share}%": (TABLE_2, f"{share}%") for share in (50, 75, 90)},
}
ANNEAL_METHODS, ANNEAL_SHARES = ("KL", BEST_ANNEALED, "KL, annealed over 0.5"), (0.003, 0.01, 0.03)
TABLE_4 = 0.02  # two epochs of a text of 1 %
TABLE_4_LAYERS = ("50%", "62.5%")  # Hybrid-Ladder-8B-16L and -20L: the last 16 and 20 of 32
TABLE_4_METHODS = tuple(f"{loss}, {values} values" for loss in ("SFT", "KL") for values in ("published", "swept"))
DISTANCE_SHARES = (0.003, 0.01)
ON_POLICY = 0.01
DESYNC = 0.01
DESYNC_WIRINGS = tuple(f"desync-{times}x at degree {degree}" for times in (2, 4) for degree in (2, 4))
SCRATCH = 0.01
AVERAGED = 50  # the last steps whose losses a run from random weights is judged by
DEGREE = 8  # of Desync from random weights
SCRATCH_WIRINGS = {  # model -> wirings; the first is the architecture of the bundled teacher
    "": ("standard", "farskip"),
    **dict.fromkeys(("llama-128", "llama-256"), ("standard", "parallel", "ladder", "desync-2x", "desync-4x")),
}


@cache
def _choice() -> dict[str, Any]:
    path = Path(__file__).resolve().parents[2] / "benchmarks/results/chosen_layers.json"
    return json.loads(path.read_text())


def chosen_half() -> str:
    """The half of the bundled teacher's layers that the search chose, as ``fcsd convert --layers`` takes it."""
    return next(choice["spec"] for choice in _choice()["choices"] if 2 * choice["n"] == _choice()["depth"])
