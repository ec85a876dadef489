"""Estimates when a run ends: what its steps took, and what its pauses took, which are the evaluations and the saves.

A pause of a kind that has not been timed yet cannot be estimated, so it is named instead. Only the held-out loss can
be: its tokens take at most as long as those of a step.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fcsd.config import NO_METRIC, Recipe
from fcsd.config.batch import pauses

HELD_OUT_LOSS, SAMPLES, SCORE, CHECKPOINT = "held-out loss", "samples", "score", "checkpoint"


class TimeLeft:
    """The time that a run has left.

    Args:
        start: the number of steps that were taken before.
        held_out_tokens: the tokens over which the held-out loss is measured; 0 without held-out text.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self, recipe: Recipe, start: int, held_out_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recipe, self._start, self._held_out, self._clock = recipe, start, held_out_tokens, clock
        self._began, self._timed = clock(), dict[str, list[float]]()

    @contextmanager
    def pause(self, kind: str) -> Iterator[None]:
        """Times a block in which no step is taken."""
        began = self._clock()
        try:
            yield
        finally:
            self._timed.setdefault(kind, []).append(self._clock() - began)

    def last(self, kind: str) -> float:
        """The seconds of the last pause of a kind; infinity before the first."""
        return self._timed.get(kind, [math.inf])[-1]

    def after(self, step: int) -> tuple[float, list[str]]:
        """The seconds until the end, and the kinds of pauses in them that were not timed yet and are not counted.

        The checkpoint of ``step`` itself is still to be saved; its evaluation is over.
        """
        paused = sum(map(sum, self._timed.values()))
        each = (self._clock() - self._began - paused) / max(1, step - self._start)
        seconds, untimed = each * (self._recipe.train.steps - step), []
        for kind, count in self._pauses(step).items():
            if taken := self._timed.get(kind):
                seconds += count * sum(taken) / len(taken)
            elif count and kind == HELD_OUT_LOSS:
                seconds += count * each * self._held_out / self._recipe.train.batch_tokens
            elif count:
                untimed.append(kind)
        return seconds, untimed

    def _pauses(self, step: int) -> dict[str, int]:
        """How often the run pauses after ``step``, by kind."""
        train, early = self._recipe.train, self._recipe.early_stop
        scored = early.every if early.metric != NO_METRIC else 0
        evaluations = pauses(step, train.steps, train.eval_every, scored)
        saves = pauses(step - 1, train.steps, self._recipe.checkpoint.every_steps)
        return {
            HELD_OUT_LOSS: evaluations * (self._held_out > 0),
            SAMPLES: evaluations * (train.sample_tokens > 0),
            SCORE: (train.steps // scored - step // scored) * bool(early.benchmark) if scored else 0,
            CHECKPOINT: saves,
        }
