"""The settings with which ``fcsd write`` writes text, and what they may be."""

import math
from dataclasses import dataclass

from fcsd.errors import ConfigError


@dataclass(frozen=True)
class Writing:
    """How text is written; ``write.json`` records it, and a call that goes on needs the same values.

    Attributes:
        temperature: of the distribution from which tokens are drawn.
        greedy: the share of answers that are written with the most likely tokens. Users' turns are always drawn.
        form: ``chat``, a user's turn and its answer in the chat template, or ``document``.
        max_tokens: the most tokens of a user's turn, of an answer and of a document.
        seed: of the random numbers.

    Raises:
        ConfigError: a setting has no meaning.
    """

    temperature: float = 1.0
    greedy: float = 0.0
    form: str = "chat"
    max_tokens: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.form not in ("chat", "document"):
            raise ConfigError(f"--form: {self.form!r} is not a form", "write chat or document")
        for option, value, possible, need in (
            ("--temperature", self.temperature, 0 < self.temperature < math.inf, "a number above 0"),
            ("--greedy", self.greedy, 0 <= self.greedy <= 1, "a share from 0 to 1"),
            ("--max-tokens", self.max_tokens, self.max_tokens > 0, "at least 1"),
        ):
            if not possible:
                raise ConfigError(f"{option} must be {need}, not {value:g}")
        if self.greedy and self.form == "document":
            raise ConfigError("--greedy is a share of answers; a document written greedily is always the same one")
