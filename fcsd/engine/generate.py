"""How ``fcsd chat``, ``fcsd eval``, ``fcsd write`` and the samples of a run generate text.

``generate`` continues prompts in slots of a fixed cache (``decode.py``), on GPUs by CUDA graphs, or in batches over a
growing cache (``batches.py``). Batches are slower and suit every model and every way to choose tokens, so they stand in
where slots cannot serve. ``fcsd chat`` and samples call them directly: the penalties of a model's own generation
settings read all tokens so far, which no fixed cache holds.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import PreTrainedModel

from fcsd.engine.batches import CACHE_TOKENS, Choose, generate_in_batch, most_likely
from fcsd.engine.decode import drawn, generate_in_slots, plan_slots
from fcsd.engine.logprobs import batches
from fcsd.engine.slots import why_no_slots
from fcsd.launch.shared_work import ALONE, Team
from fcsd.models.rope import rope_border

log = logging.getLogger(__name__)

# The ways to generate: in batches over a growing cache, in slots of a fixed cache, or in slots by CUDA graphs.
BATCHES, SLOTS, GRAPHS = "batches", "slots", "graphs"
GENERATION = (BATCHES, SLOTS, GRAPHS)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    ended: Callable[[list[int], int], int | None],
    way: str,
    batch_size: int | None = None,
    cache_tokens: int = CACHE_TOKENS,
    temperatures: Sequence[float] | None = None,
    team: Team = ALONE,
) -> Iterator[tuple[int, list[int]]]:
    """Continue this rank's share of prompts with their most likely tokens, or with drawn ones.

    Sampling settings and penalties in the model's ``generation_config`` are not applied.

    Args:
        model: a causal LM in eval mode. One that cannot generate in slots does so in batches, and logs why, once.
        prompts: token ids, none empty.
        max_new_tokens: the most tokens to add to a prompt.
        ended: called with the new token ids of an answer and the number of them that it has seen before; returns the
            number of tokens after which the answer ends, or None.
        way: one of ``GENERATION``.
        batch_size: the most answers at a time; None for as many as ``cache_tokens`` allows.
        cache_tokens: the most tokens whose keys and values are in memory.
        temperatures: for each prompt, the temperature of the distribution from which its tokens are drawn, by the
            random numbers of the model's device; 0 takes the most likely ones. None takes them for all prompts.
        team: the ranks that share the prompts; all of them make the same call.

    Yields:
        ``(index of the prompt, its new token ids, with the one that ended the answer)`` as soon as an answer ends.

    Raises:
        ConfigError: an answer may reach beyond the border of rotary factors that differ from length to length.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    sizes = [len(prompt) + max_new_tokens for prompt in prompts]
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "ended": ended}
    if way != BATCHES and _takes_slots(model, max(sizes), way, team):
        count, length, groups = plan_slots(sizes, list(map(len, prompts)), batch_size, cache_tokens)
        settings |= {"count": count, "length": length, "graphs": way == GRAPHS, "temperatures": temperatures}
        yield from generate_in_slots(model, prompts, team.share(groups), **settings)
        return
    border = rope_border(model.config)
    if border is not None:
        border.require_computable(max(sizes) - 1)
    most = None if border is None else border.positions + max_new_tokens  # the size of the longest short prompt
    for batch in team.share(batches(sizes, cache_tokens, batch_size, most)):
        choose = most_likely if temperatures is None else _drawing([temperatures[i] for i in batch], model.device)
        rows = generate_in_batch(model, [prompts[i] for i in batch], choose=choose, team=team, **settings)
        yield from zip(batch, rows, strict=True)


def _takes_slots(model: PreTrainedModel, tokens: int, way: str, team: Team) -> bool:
    reason = "its ranks run in step" if team.lockstep else why_no_slots(model, tokens)
    if reason is not None:
        _say_once(model.name_or_path, way, reason)
    return reason is None


@cache
def _say_once(model: str, way: str, reason: str) -> None:
    """Says why a model generates in batches, once however often it is asked."""
    log.warning("the model cannot generate in %s: %s", way, reason)


def _drawing(temperatures: list[float], device: torch.device) -> Choose:
    heat = torch.tensor(temperatures, device=device)
    return lambda rows, _, logits: drawn(logits, heat[rows])[0]


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
    """The ``Ending`` of a model's answers, with stop strings, some of which may be tokens of the tokenizer."""
    added = tokenizer.get_added_vocab()
    generation: Any = model.generation_config
    eos = generation.eos_token_id
    ends = {tokenizer.eos_token_id, *([eos] if isinstance(eos, int) else eos or [])} - {None}
    ends |= {added[stop] for stop in stops if stop in added}
    strings = tuple(filter(None, stops))
    # A stop string of n bytes has at most n tokens. A few more tokens cover a string that begins inside a token.
    tail = max([len(stop.encode()) for stop in strings], default=0) + 4
    return Ending(tokenizer, frozenset(ends), strings, tail)
