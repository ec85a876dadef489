"""The runs of the capability study, as data, and their recipes.

A study is a list of runs; studies share runs. Budgets are shares of the tokens that the teacher was trained on. The
values that FarSkip §5.1 chooses by short runs come from sweeps: batch, then learning rate, by training loss, for KL and
SFT alike and for each kind of text. The paper's Table 2 keeps one rate and batch for all rows; so do the rows here.
A run whose budget is too short for the chosen batch takes a smaller one (``fitted``).
"""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2)
SHARES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of the teacher's tokens, for the recovery over tokens
TABLE_1, TABLE_2 = 0.1, 0.05
SEQ_LEN = 1024  # as in the teacher's training
LAYERS = 10  # of the bundled teacher
BATCHES = (32768, 65536, 131072)
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
LEAST_STEPS, LEAST_BATCH = 600, 8192  # a shorter budget halves the batch until it has as many steps
PUBLISHED = "published"  # instead of a sweep: the settings of the run have all values
STARTING_VALUES = {"train.batch_tokens": BATCHES[1], "optim.lr": RATES[1]}
HIDDEN_WEIGHTS = (1e-4, 1e-3, 1e-2)
SWEEP_STEPS = 50  # of each trial
KL = {"objective.kl": 1.0, "objective.sft": 0.0}
SFT = {"objective.kl": 0.0, "objective.sft": 1.0}
FROZEN = {"objective.freeze_embeddings": True, "objective.freeze_lm_head": True}
ANNEALED = (0.25, 0.5)  # shares of training
BEST_ANNEALED = "KL, annealed over 0.25"  # the better one, which Table 1 has besides the paper's rows
TEXT_SHARES = (0.01, 0.03, 0.1)  # of the teacher's tokens; a longer run reads its text again
TEXTS: dict[str, tuple[str, float]] = {  # name -> kind and share of wrong answers, for text.py
    "same": ("same", 0.0),
    "other": ("other", 0.0),
    "other-10": ("other", 0.1),
    "other-20": ("other", 0.2),
    "none": ("none", 0.0),
    "same-tokens": ("same", 0.0),
}
TOKEN_IDS = ("same-tokens",)  # texts whose lines are token ids: encoded as in the training of the teacher
WRITTEN = {
    "teacher-written": "teacher",
    "student-written": "untrained",
}  # text -> the method of the model that wrote it
WRITTEN_FROM = "same"  # the text whose documents these models continue


@dataclass(frozen=True)
class Run:
    """One model that is trained, if it has a text, and evaluated.

    Attributes:
        method: the row of a table, for example ``KL``; ``teacher`` and ``untrained`` are not trained.
        text: a key of ``TEXTS`` or ``WRITTEN``; empty without training.
        share: the training tokens, as a share of the teacher's.
        layers: the rewired layers, as ``fcsd convert --layers`` takes them.
        settings: fields of the recipe that differ from those of the method.
        batch: the factor of the batch at an equal number of steps.
        early_stop: ``best`` scores MBPP+ five times and keeps the best checkpoint, for every method of Table 1;
            ``collapse`` scores it a hundred times, with the paper's patience.
        sweep: the sweep whose values the run takes; empty for that of its loss and text, ``PUBLISHED`` for none.
        epochs: how often the run reads its text.
        model: the config of a model from scratch, a key of ``scratch.CONFIGS``; empty for that of the teacher.
        export: whether the trained model is exported with ``fcsd export`` and the export is evaluated.
    """

    method: str
    text: str = ""
    share: float = 0.0
    seed: int = 0
    layers: str = "all"
    settings: dict[str, Any] = field(default_factory=dict)
    batch: float = 1.0
    early_stop: str = ""
    sweep: str = ""
    epochs: int = 1
    model: str = ""
    export: bool = False

    @property
    def name(self) -> str:
        """The name of its directories and of its line in the results; the same for the same run."""
        words = [self.method, self.model, self.text, f"{100 * self.share:g}pct" if self.share else "", self.layers]
        words += [self.early_stop, f"seed-{self.seed}" if self.text else ""]
        name = "-".join(word for word in words if word).lower()
        return "".join(c if c.isalnum() or c in ".-" else "-" for c in name)

    @property
    def from_scratch(self) -> bool:
        """Whether the weights are random at the start. Such a model answers no questions and is not evaluated."""
        return self.settings.get("init.weights") == "random"

    @property
    def values_from(self) -> str:
        """The name of the sweep whose batch and learning rate the run takes; empty if it takes those of none."""
        if not self.text or self.sweep == PUBLISHED:
            return ""
        # Text that a model wrote takes the values of the text that it continued, and real text those of "other".
        kind = "same" if self.text in ("same", *TOKEN_IDS, *WRITTEN) else "other"
        return self.sweep or f"{'sft' if self.settings.get('objective.sft') else 'kl'}-{kind}"

    @property
    def text_share(self) -> float:
        """The length of its text, as a share of the teacher's tokens."""
        return text_share(self.share / self.epochs)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweeps() -> dict[str, dict[str, Any]]:
    """Sweep -> its settings and, in ``stages``, the keys that it tries in turn, each with its values."""
    stages = [("train.batch_tokens", BATCHES), ("optim.lr", RATES)]
    found = {
        f"{loss}-{kind}": {"text": kind, "settings": settings, "stages": stages, "metric": "loss"}
        for loss, settings in (("kl", KL), ("sft", SFT))
        for kind in ("same", "other")
    }
    hidden = {**KL, "objective.hidden.weight": HIDDEN_WEIGHTS[0]}
    tried = [("objective.hidden.weight", HIDDEN_WEIGHTS)]
    return found | {"hidden-same": {"text": "same", "settings": hidden, "stages": tried, "metric": "kl"}}


def studies() -> dict[str, list[Run]]:
    """Study -> its runs."""
    originals = [Run("teacher"), Run("untrained")]
    losses = (("KL", KL), ("SFT", SFT))
    annealed = Run(BEST_ANNEALED, settings=_annealed(ANNEALED[0]))
    table_1 = [
        Run(method, text, TABLE_1, seed, settings=settings, early_stop="best")
        for text in ("same", "other")
        for seed in SEEDS
        for method, settings in losses
    ]
    in_table_1 = [replace(annealed, text="same", share=TABLE_1, seed=seed, early_stop="best") for seed in SEEDS]
    kinds = [
        Run(method, text, SHARES[2], 0, settings=settings)
        for text in TEXTS
        if text not in TOKEN_IDS
        for method, settings in losses
    ]
    kinds.append(replace(annealed, text="other", share=SHARES[2]))
    recovery = [
        Run(method, text, share, 0, settings=settings, early_stop="best" if share == TABLE_1 else "")
        for share in SHARES
        for text in ("same", "other")
        for method, settings in losses
    ]
    rows: list[tuple[str, dict[str, Any], str, float]] = [
        ("SFT", SFT, "all", 1.0),
        ("KL", KL, "all", 1.0),
        ("KL + hidden L2", {**KL, "objective.hidden.weight": "hidden-same"}, "all", 1.0),
        ("KL, frozen embeddings and head", {**KL, **FROZEN}, "all", 1.0),
        ("KL, 0.25x batch", KL, "all", 0.25),
        ("KL, 4x batch", KL, "all", 4.0),
        *((f"KL, last {share}%", KL, f"{share}%", 1.0) for share in (50, 75, 90)),
    ]
    table_2 = [
        Run(method, "same", TABLE_2 * batch, seed, layers, settings, batch, sweep="kl-same")
        for seed in SEEDS
        for method, settings, layers, batch in rows
    ]
    figure_3 = [Run("untrained", layers=f"{end}:{n}") for end in ("first", "last") for n in range(1, LAYERS)]
    anneal = [
        Run(f"KL, annealed over {share:g}" if share else "KL", "same", tokens, seed, settings=_annealed(share))
        for tokens in (0.003, 0.01, 0.03)
        for share in (0.0, *ANNEALED)
        for seed in SEEDS
    ]
    collapse = [Run("KL, ten times the rate", "same", TABLE_2, 0, settings=KL, early_stop="collapse")]
    return {
        "table-1": [*originals, *table_1],
        "annealed": [*originals, *in_table_1],
        "text": [*originals, *kinds],
        "recovery": [*originals, *recovery],
        "table-2": [*originals, *table_2, *(Run("untrained", layers=f"{share}%") for share in (50, 75, 90))],
        "figure-3": [*originals, *figure_3],
        "early-stop": [*originals, *collapse],
        "anneal": [*originals, *anneal],
    }


def _annealed(share: float) -> dict[str, Any]:
    return {**KL, **({"train.anneal_share": share} if share else {})}


@dataclass(frozen=True)
class Subject:
    """What the study is about: a teacher, as a directory or ``bundled:teacher``, and the wiring of its students."""

    teacher: str = "bundled:teacher"
    wiring: str = "farskip"


BUNDLED = Subject()


def text_share(share: float) -> float:
    """The length of the text for a run of this share, which is one of a few, so that runs have texts in common."""
    return next((length for length in TEXT_SHARES if length >= share), TEXT_SHARES[-1])


def text_name(text: str, share: float) -> str:
    """The folder of a text."""
    return f"{text}-{100 * text_share(share):g}pct"


def config_folder(model: str, work: Path) -> Path:
    """Where the config and the tokenizer of a model from scratch lie."""
    return work / "configs" / model


def fitted(values: dict[str, Any], tokens: float) -> dict[str, Any]:
    """The chosen batch and learning rate, made smaller for a budget that they give fewer than ``LEAST_STEPS`` steps.

    The rate follows the square root of the batch, as is usual for Adam.
    """
    batch = values["train.batch_tokens"]
    while batch > LEAST_BATCH and tokens / batch < LEAST_STEPS:
        batch //= 2
    rate = values["optim.lr"] * math.sqrt(batch / values["train.batch_tokens"])
    return {**values, "train.batch_tokens": batch, "optim.lr": rate}


def recipe_of(
    run: Run,
    chosen: dict[str, dict[str, Any]],
    teacher_tokens: int,
    work: Path,
    device: str,
    subject: Subject = BUNDLED,
) -> dict[str, Any]:
    """The recipe of a run, as nested mappings.

    Args:
        chosen: the values of each sweep, by its name.
        teacher_tokens: the tokens that the teacher was trained on.
        work: the directory of texts and runs.
    """
    values = fitted(chosen[run.values_from], run.share / run.batch * teacher_tokens) if run.values_from else {}
    settings = {**values, **run.settings}
    if isinstance(other := settings.get("objective.hidden.weight"), str):
        settings["objective.hidden.weight"] = chosen[other]["objective.hidden.weight"]
    batch = max(1, round(settings["train.batch_tokens"] * run.batch / SEQ_LEN)) * SEQ_LEN
    steps = max(1, round(run.share * teacher_tokens / batch))
    settings |= {"train.batch_tokens": batch, "train.steps": steps}
    if run.early_stop:
        patience, scores = (20, 100) if run.early_stop == "collapse" else (5, 5)
        stop = {"metric": "mbpp_plus", "suite": "strict", "every": max(1, steps // scores), "patience": patience}
        settings |= {f"early_stop.{key}": value for key, value in stop.items()}
        settings["early_stop.data_mirror"] = "bundled:mirror"
        if run.early_stop == "collapse":
            settings |= {"optim.lr": 10 * settings["optim.lr"], "early_stop.limit": 40}
    out = work / "runs" / run.name
    if run.model:
        subject = replace(subject, teacher=str(config_folder(run.model, work)))
    return _recipe(run.name, run.text, run.text_share, run.layers, run.seed, settings, out, work, device, subject)


def trial_recipe(
    name: str,
    values: dict[str, Any],
    chosen: dict[str, dict[str, Any]],
    steps: int,
    work: Path,
    device: str,
    subject: Subject = BUNDLED,
) -> dict[str, Any]:
    """The recipe of a trial of a sweep, as nested mappings.

    Args:
        name: the sweep. ``hidden-same`` keeps the batch and the rate that ``kl-same`` chose.
        values: the values of the keys that were swept before, and of the key that is swept.
        steps: the optimizer steps of each trial.
    """
    tried = sweeps()[name]
    start = chosen["kl-same"] if name == "hidden-same" else STARTING_VALUES
    settings = {**start, **tried["settings"], **values, "train.steps": steps, "train.log_every": 1}
    words = "-".join(f"{key.rpartition('.')[2]}-{value:g}" for key, value in values.items())
    out = work / "sweeps" / name / words
    return _recipe(f"{name}-{words}", tried["text"], 0, "all", 0, settings, out, work, device, subject)


def _recipe(
    name: str,
    text: str,
    share: float,
    layers: str,
    seed: int,
    settings: dict[str, Any],
    out: Path,
    work: Path,
    device: str,
    subject: Subject,
) -> dict[str, Any]:
    source = {"path": str(work / "text" / text_name(text, share) / "train.jsonl")}
    if text in TOKEN_IDS:
        source["token_ids"] = "token_ids"
    recipe: dict[str, Any] = {
        "name": name[:64],
        "model": subject.teacher,
        "init": {"wiring": subject.wiring, "layers": layers},
        "output_dir": str(out),
        "seed": seed,
        "data": {
            "sources": [source],
            "held_out": {"path": "bundled:corpus/held_out.jsonl"},
            "seq_len": SEQ_LEN,
        },
        "train": {"dtype": "bf16" if device == "cuda" else "fp32", "sample_tokens": 0},
        "optim": {"warmup_steps": 10},
        "checkpoint": {"every_steps": 0, "every_minutes": 5, "keep": 1},
    }
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        target = recipe.setdefault(section, {})
        *parents, last = rest.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    train = recipe["train"]
    rows = train["batch_tokens"] // SEQ_LEN
    train.setdefault("micro_batch_size", max(n for n in (1, 2, 4, 8, 16, 32, 64, 128) if rows % n == 0))
    recipe["optim"]["warmup_steps"] = min(recipe["optim"]["warmup_steps"], train["steps"] - 1)
    return recipe
