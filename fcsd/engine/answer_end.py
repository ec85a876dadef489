"""Finds the end of a generated answer: an end-of-text token, or the first stop string."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel


@dataclass(frozen=True)
class Ending:
    """The tokens and stop strings that end an answer.

    Attributes:
        tokens: token ids that end an answer and are not part of its text.
        stops: strings that end an answer and are not part of its text.
        tail: how many of the last tokens are decoded to find a stop string; every stop string fits into this many.
    """

    tokenizer: Any
    tokens: frozenset[int]
    stops: tuple[str, ...]
    tail: int

    def of(self, answer: list[int], seen: int) -> int | None:
        """The number of tokens after which an answer ends, or None if it goes on.

        A stop string may be found a few tokens late; ``text`` cuts the answer before it in any case.

        Args:
            answer: token ids of the answer so far.
            seen: how many of them are known not to end it.
        """
        for count in range(seen, len(answer)):
            if answer[count] in self.tokens:
                return count + 1
        text = self._decode(answer[max(0, seen - self.tail) :]) if self.stops else ""
        return len(answer) if any(stop in text for stop in self.stops) else None

    def text(self, answer: list[int]) -> str:
        """The text of an answer that has ended."""
        text = self._decode(answer[:-1] if answer[-1] in self.tokens else answer)
        for stop in self.stops:
            text = text.split(stop)[0]
        return text

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def ending(model: PreTrainedModel, tokenizer: Any, stops: tuple[str, ...]) -> Ending:
    """The ``Ending`` of a model's answers to a task with stop strings, some of which may be tokens of the tokenizer."""
    added = tokenizer.get_added_vocab()
    generation: Any = model.generation_config
    eos = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *([eos] if isinstance(eos, int) else eos or [])}
    ends |= {added[stop] for stop in stops if stop in added}
    strings = tuple(filter(None, stops))
    # A stop string of n bytes has at most n tokens. A few more tokens cover a string that begins inside a token.
    tail = max([len(stop.encode()) for stop in strings], default=0) + 4
    return Ending(tokenizer, frozenset(ends), strings, tail)
