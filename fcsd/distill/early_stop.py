"""Early stopping: the model is scored at intervals, the best step is kept, and a run that no longer improves stops.

FarSkip section 3.1: a converted model may collapse late in training, so its authors stop early by MBPP+, every 1000
steps with a patience of 20 scores and a delta of 2 %, which are the defaults here. The paper does not say whether the
delta is relative.

This module decides from the history of scores. ``fcsd.eval`` runs the benchmarks; the command that starts a run passes
a ``Scorer`` to it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from fcsd.config import HELD_OUT, NO_METRIC, EarlyStop
from fcsd.errors import CheckpointError
from fcsd.eval.score import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fcsd.distill.data.rows import Rows

# 0.51 must not count as better than 0.50 by more than 0.01 because of a rounding error in the difference.
_ROUNDING = 1e-9

# One entry for each score, as checkpoints store it: ``step`` and ``value``; for benchmarks also ``stderr`` and ``n``.
History = list[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """The step of the best score, the number of scores since the last improvement, and whether the run stops."""

    best: int | None
    waited: int
    stop: bool


def judge(history: Sequence[dict[str, Any]], settings: EarlyStop, mode: Literal["max", "min"]) -> Verdict:
    """Decides from the scores so far whether the run stops and which step is kept.

    A score counts as an improvement if it is better than the last improvement by more than ``delta``. ``delta`` is a
    fraction of that earlier score if ``delta_kind`` is ``relative``, and an absolute difference otherwise. After
    ``patience`` scores in a row without an improvement, the run stops. The best step is the step with the best score,
    even if it is better by less than ``delta``. Of equal scores, the latest is taken: a benchmark that the model solves
    completely cannot tell its checkpoints apart, and the later one was trained for longer. A score that is not finite
    is never an improvement and never the best.

    Args:
        history: the scores of the run so far, oldest first.
        settings: the ``early_stop`` section of the recipe.
        mode: ``max`` if a higher score is better, ``min`` if a lower one is.
    """
    sign = 1.0 if mode == "max" else -1.0
    reference, waited = None, 0
    for value in (entry["value"] for entry in history):
        needed = settings.delta * (abs(reference or 0.0) if settings.delta_kind == "relative" else 1.0)
        better = reference is None or sign * (value - reference) > needed + _ROUNDING
        if better and math.isfinite(value):
            reference, waited = value, 0
        else:
            waited += 1
    finite = [entry for entry in history if math.isfinite(entry["value"])]
    best = max(finite, key=lambda entry: (sign * entry["value"], entry["step"]))["step"] if finite else None
    return Verdict(best, waited, waited >= settings.patience)


def held_out_text(held_out: "Mapping[str, Rows]") -> dict[str, str]:
    """The hash of the text that the held-out loss is measured on, which checkpoints store; empty without a text.

    Losses on two texts do not say which model is better.
    """
    return {"held_out_text": held_out["held_out"].sha256} if held_out else {}


def scored_text(settings: EarlyStop, held_out: "Mapping[str, Rows]") -> dict[str, str]:
    """The part of a run's identity that its scores depend on: the held-out text, where its loss is the score."""
    return held_out_text(held_out) if settings.metric == HELD_OUT else {}


class ScoreHistory:
    """The scores of one run so far. With the metric ``none`` the model is never scored and the run never stops early.

    Args:
        settings: the ``early_stop`` section of the recipe.
        scorer: runs the benchmark; None for the metrics ``none`` and ``held_out``, which need no benchmark.
        progress: the progress stored in the checkpoint from which the run continues.

    Raises:
        CheckpointError: the scores so far are of other questions.
    """

    def __init__(self, settings: EarlyStop, scorer: Scorer | None, progress: dict[str, Any]) -> None:
        self._settings, self._scorer = settings, scorer
        self._mode: Literal["max", "min"] = "min" if scorer is None else scorer.mode
        self._history: History = list(progress.get("scores", []))
        self._questions = None if scorer is None else scorer.questions
        then = progress.get("scored_questions", self._questions)
        if self._history and then != self._questions:
            raise CheckpointError(
                f"the benchmark {settings.benchmark} asks other questions than it did before: their SHA-256 was "
                f"{then} and is now {self._questions}, and scores of both cannot be compared",
                hint="put early_stop.data_mirror back as it was, or start anew in another output_dir",
            )

    def due(self, step: int) -> bool:
        """Whether the model is scored after this step. The held-out loss is then measured as well."""
        return self._settings.metric != NO_METRIC and step % self._settings.every == 0

    def missed(self, step: int) -> bool:
        """Whether an earlier attempt ended after this step before the model was scored. It is then scored on resume."""
        return step > 0 and self.due(step) and all(entry["step"] != step for entry in self._history)

    def take(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", step: int, metrics: dict[str, float]
    ) -> dict[str, float]:
        """Scores the model and returns what is to be logged; every rank calls this.

        Args:
            metrics: the metrics of this step, including the held-out losses.
        """
        if self._settings.metric == HELD_OUT:
            # With a teacher in memory the student is trained on the divergence; its cross-entropy may rise meanwhile.
            entry = {"value": metrics.get("held_out_kl", metrics["held_out_sft"])}
        else:
            assert self._scorer is not None
            entry = asdict(self._scorer.score(model, tokenizer, step, None))
        self._history.append({"step": step, **entry})
        verdict = self.verdict
        return {"score": entry["value"], "best_step": verdict.best or step, "waited": verdict.waited}

    @property
    def verdict(self) -> Verdict:
        """The decision of ``judge`` on the scores so far."""
        return judge(self._history, self._settings, self._mode)

    def progress(self) -> dict[str, Any]:
        """What a checkpoint stores of the scores; empty if the model is never scored."""
        if self._settings.metric == NO_METRIC:
            return {}
        asked = {} if self._questions is None else {"scored_questions": self._questions}
        return {"scores": self._history, "best": self.verdict.best} | asked
