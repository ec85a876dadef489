"""Where a generated answer ends: at an end-of-text token, or before the first stop string."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Ending:
    """The end of an answer, in tokens and in text.

    Attributes:
        tokens: ids that end an answer, themselves not part of its text.
        stops: strings that end it.
        tail: tokens that hold any stop string, however it falls on them.
    """

    tokenizer: Any
    tokens: frozenset[int]
    stops: tuple[str, ...]
    tail: int

    def of(self, answer: list[int], seen: int) -> int | None:
        """At how many tokens an answer ends, if it does; nothing in its first ``seen`` tokens ended it.

        A stop string may be found a few tokens late: its text is cut all the same.
        """
        for count in range(seen, len(answer)):
            if answer[count] in self.tokens:
                return count + 1
        text = self._decode(answer[max(0, seen - self.tail) :]) if self.stops else ""
        return len(answer) if any(stop in text for stop in self.stops) else None

    def text(self, answer: list[int]) -> str:
        """The text of an answer that is over."""
        text = self._decode(answer[:-1] if answer[-1] in self.tokens else answer)
        for stop in self.stops:
            text = text.split(stop)[0]
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def ending(model: PreTrainedModel, tokenizer: Any, stops: tuple[str, ...]) -> Ending:
    """What ends a model's answers to a task with these stop strings; some may be tokens of their own."""
    added = tokenizer.get_added_vocab()
    generation: Any = model.generation_config
    eos = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *([eos] if isinstance(eos, int) else eos or [])}
    ends |= {added[stop] for stop in stops if stop in added}
    strings = tuple(filter(None, stops))
    # A stop string of n bytes is at most n tokens long; a few more cover one that straddles tokens.
    tail = max([len(stop.encode()) for stop in strings], default=0) + 4
    return Ending(tokenizer, frozenset(ends), strings, tail)
