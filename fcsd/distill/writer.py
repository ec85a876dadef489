"""A model in memory that writes documents of token ids: chats whose user's turn it invents, or plain text.

A model with a chat template first invents the user's turn, after the template's text up to it, and then answers; other
models write documents from their first token on.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.checkpoint.tokenizer import chat_text, limited_template, tokens_before
from fcsd.distill.own_text_files import Writing
from fcsd.engine.decode import GRAIN
from fcsd.engine.generate import GRAPHS, SLOTS, ending, generate
from fcsd.errors import BadInputError
from fcsd.models.rope import rope_border

GPU_BATCH, CPU_BATCH = 512, 32  # documents that are written at a time
_GOLDEN = 0x9E3779B97F4A7C15  # the golden section of 2^64: its multiples modulo 2^64 lie evenly apart, however many


@dataclass(frozen=True)
class Turns:
    """The token ids of a chat template around the user's turn and the answer."""

    before: list[int]
    after: list[int]


class Writer:
    """A model in memory with its tokenizer, and how it writes."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        writing: Writing,
        questions: list[list[int]] | None,
        batch_size: int,
    ) -> None:
        self.model, self.tokenizer, self.writing = model, tokenizer, writing
        self._questions, self._batch_size = questions, batch_size
        self._end = ending(model, tokenizer, ())
        if not self._end.tokens:
            raise BadInputError("the model names no token that ends a text: eos_token_id is missing everywhere")
        self._turns = turns_of(tokenizer) if writing.form == "chat" else None
        if (border := rope_border(model.config)) is not None:
            border.require_computable(self._longest())

    def _longest(self) -> int:
        """The most tokens of a document, before any is written."""
        most = self.writing.max_tokens
        if self._turns is None:
            return max(1, len(tokens_before(self.tokenizer))) + most
        asked = most if self._questions is None else max(map(len, self._questions))
        return len(self._turns.before) + asked + len(self._turns.after) + most

    def documents(self, shard: int, first: int, count: int) -> Iterator[list[int]]:
        """``count`` documents of token ids, the ``first`` and those after it of a shard.

        Those whose user's turn is empty are left out.
        """
        writing, turns = self.writing, self._turns
        torch.manual_seed(int.from_bytes(hashlib.sha256(f"{writing.seed} {shard} {first}".encode()).digest()[:7]))
        if turns is None:
            before = tokens_before(self.tokenizer)
            bos: Any = self.tokenizer.bos_token_id
            start = before or [min(self._end.tokens) if bos is None else bos]
            for _, document in self._generate([start] * count, [writing.temperature] * count):
                yield [*before, *document]
            return
        if self._questions is None:
            invented = self._generate([turns.before] * count, [writing.temperature] * count)
            asked = [ids[:-1] if ids[-1] in self._end.tokens else ids for _, ids in invented]
            asked = [ids for ids in asked if ids]
        else:
            place = _beginning(shard, len(self._questions)) + first
            asked = [self._questions[(place + i) % len(self._questions)] for i in range(count)]
        prompts = [[*turns.before, *ids, *turns.after] for ids in asked]
        greedy = int(writing.greedy * (first + len(prompts))) - int(writing.greedy * first)  # few calls, or many
        heat = [0.0] * greedy + [writing.temperature] * (len(prompts) - greedy)
        for index, answer in self._generate(prompts, heat):
            yield [*prompts[index], *answer]

    def _generate(self, prompts: Sequence[list[int]], temperatures: Sequence[float]) -> Iterator[tuple[int, list[int]]]:
        most = self.writing.max_tokens
        return generate(
            self.model,
            prompts,
            max_new_tokens=most,
            ended=self._end.of,
            way=GRAPHS if self.model.device.type == "cuda" else SLOTS,
            batch_size=self._batch_size,
            cache_tokens=self._batch_size * (max(map(len, prompts)) + most + GRAIN),
            temperatures=temperatures,
        )


def _beginning(shard: int, questions: int) -> int:
    """The prompt of a file at which a shard begins. Any number of shards begins evenly apart over the file."""
    return (shard * _GOLDEN % (1 << 64)) * questions >> 64


def own_documents(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int) -> list[list[int]]:
    """Documents of token ids that a model in memory writes, at least ``tokens`` in all if it does not end at once."""
    most = min(256, tokens)
    writing = Writing(form="chat" if tokenizer.chat_template else "document", max_tokens=most)
    writer = Writer(model, tokenizer, writing, None, CPU_BATCH)
    documents: list[list[int]] = []
    for first in range(0, 8 * CPU_BATCH, CPU_BATCH):
        if sum(map(len, documents)) >= tokens:
            break
        documents += writer.documents(0, first, max(4, min(CPU_BATCH, tokens // most)))
    return documents


def turns_of(tokenizer: PreTrainedTokenizerBase) -> Turns:
    """The token ids that the chat template puts before a user's turn, and between it and the answer.

    Raises:
        BadInputError: the template changes the user's text, fails, or exceeds its limits.
    """
    mark = "\ue000fcsd\ue001"  # private-use characters, which occur in no template
    chat = [{"role": "user", "content": mark}]
    with limited_template(tokenizer) as template:
        text = chat_text(template, chat, tokenizer.name_or_path, add_generation_prompt=True)
    if text.count(mark) != 1:
        raise BadInputError("the chat template does not show the user's turn once and unchanged", "--form document")
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(mark))
    return Turns(before, after)
