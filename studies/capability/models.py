"""The stored lines of models as the page's tables take them: by method, with their scores, as rows of a summary."""

from collections.abc import Sequence
from typing import Any

from studies.capability.scores import Estimate, Scores, scores_of

from fcsd.markdown import table

Lines = dict[str, dict[str, Any]]


class Models:
    """The stored lines of models, and what they score."""

    def __init__(self, lines: Lines) -> None:
        self.lines = {name: line for name, line in lines.items() if "run" in line}
        self.teacher, self.untrained = self.lines["teacher-all"], self.lines["untrained-all"]

    def seeds(self, method: str, text: str = "", share: float = 0.0, layers: str = "all", stop: str = "") -> list[dict]:
        """The lines of the runs that differ in the seed alone."""
        wanted = (method, text, share, layers, stop)
        keys = ("method", "text", "share", "layers", "early_stop")
        return [line for line in self.lines.values() if tuple(line["run"][key] for key in keys) == wanted]

    def scores(self, lines: Sequence[dict], untrained: dict[str, Any] | None = None) -> Scores:
        """The scores of models that differ in the seed alone.

        Args:
            untrained: the line of their own conversion before training, where it is not that of the whole page.
        """
        return scores_of(lines, self.teacher, untrained or self.untrained)


def settings_of(line: dict[str, Any]) -> str:
    """The batch in tokens, the learning rate and the steps of a trained model."""
    return f"{line['batch_tokens']:,}; {line['lr']:.2g}; {line['steps']}"


def summary(scores: dict[str, Scores]) -> str:
    """A table with a row for each method: what it lost, and what training won back."""
    body = [
        [
            name,
            pm(s.below["Avg"], sign=True),
            pm(s.of_teacher, 100),
            pm(s.above_chance, 100),
            pm(s.won_back, 100),
            pm(s.loss_won_back, 100),
            str(s.seeds),
        ]
        for name, s in scores.items()
    ]
    head = [
        "",
        "Avg minus teacher",
        "% of teacher",
        "above chance, %",
        "won back, %",
        "held-out loss won back, %",
        "models",
    ]
    return table(head, body)


def pm(estimate: Estimate | None, scale: float = 1, sign: bool = False) -> str:
    """A value with its standard error."""
    if estimate is None:
        return "-"
    value, error = scale * estimate[0], scale * estimate[1]
    return f"{value:+.1f} ± {error:.1f}" if sign else f"{value:.1f} ± {error:.1f}"
