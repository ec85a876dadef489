"""Loads the text of a run: its corpora on every rank, and the rows of the schedule.

One process of a host tokenises, and the others find its result in the cache.

The token that ends a plain-text document is not always the tokenizer's EOS. The tokenizer of a model that was tuned for
chats mostly has the end of a turn as its EOS. Documents ended with another token when the model was trained on text,
and it must not unlearn that.
"""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fcsd.checkpoint.files import contained, read_object
from fcsd.config import Recipe, Source
from fcsd.distill.data.corpus import Corpus, listed, load_corpus, require_other_text
from fcsd.distill.data.rows import Mixture, Rows
from fcsd.errors import BadInputError, ConfigError
from fcsd.launch.world import World

_BEAT = 60.0  # seconds between two collectives while ranks wait; far below the shortest timeout of a collective
_GENERATION = "generation_config.json"
# What the token at the end of a document is called where it is not the end of a turn as well.
_NAMES = ("<|endoftext|>", "<|end_of_text|>")


def read_data(
    recipe: Recipe, model: Path, tokenizer: PreTrainedTokenizerBase, vocab_size: int, world: World
) -> tuple[list[Corpus], Mixture, dict[str, Rows]]:
    """Loads the corpora of a run.

    Args:
        model: the directory of the tokenizer.

    Returns: the training corpora, the rows of the run, and the held-out rows by the field that names them.
    """
    data = recipe.data
    sources = [*data.sources, *data.measured.values()]
    end = document_end(data.document_end, model, tokenizer, vocab_size)
    corpora = load_corpora(sources, tokenizer, vocab_size, data.seq_len, world, end.id)
    trained, others = corpora[: len(data.sources)], corpora[len(data.sources) :]
    require_other_text(trained, dict(zip(data.measured, others, strict=True)))
    held_out = {name: Rows(corpus, data.seq_len) for name, corpus in zip(data.measured, others, strict=True)}
    return trained, training_rows(recipe, trained), held_out


def training_rows(recipe: Recipe, corpora: list[Corpus]) -> Mixture:
    """The rows of the whole schedule, in their order. A run with fewer steps takes the first of these rows."""
    whole = recipe.schedule_steps * recipe.rows_per_step
    packed = [Rows(corpus, recipe.data.seq_len, [recipe.seed, n]) for n, corpus in enumerate(corpora)]
    weights = [source.weight for source in recipe.data.sources]
    return Mixture(packed, weights, whole, recipe.seed, recipe.data.weight_by)


def load_corpora(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, vocab_size: int, seq_len: int, world: World, end: int
) -> list[Corpus]:
    """The corpora of ``sources`` on every rank. Rank 0 prints how many documents rows of ``seq_len`` tokens leave out.

    Args:
        end: the token that ends a plain text.

    Raises:
        BadInputError, ConfigError: see ``load_corpus``; they are raised on every rank.
    """
    corpora: list[Corpus] = []
    # The hosts may or may not share the cache. First rank 0 fills it, then the first process of each other host. The
    # remaining processes then read it.
    load = partial(load_corpus, tokenizer=tokenizer, vocab_size=vocab_size, end=end)
    mine = 0 if world.rank == 0 else 1 if os.environ["LOCAL_RANK"] == "0" else 2
    for turn in range(3):
        wanted = sources if turn == mine else ()
        _patiently(world, lambda wanted=wanted: corpora.extend(map(load, wanted)))
    for corpus in corpora if world.rank == 0 else ():
        print(f"{corpus.name}: read: {corpus.read}", file=sys.stderr)
        if left_out := corpus.left_out(seq_len):
            print(f"{corpus.name}: left out: {listed(left_out)}", file=sys.stderr)
        if corpus.unread:
            print(f"{corpus.name}: fields that nothing reads: {listed(corpus.unread)}", file=sys.stderr)
    return corpora


def _patiently(world: World, work: Callable[[], None]) -> None:
    """Like ``world.everywhere``, for work that takes hours on some ranks. No collective waits longer than ``_BEAT``."""
    job: Future[None] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    def is_over() -> bool:
        wait([job], _BEAT)
        return job.done() and job.result() is None

    Thread(target=run, daemon=True).start()  # on Ctrl-C, Python does not wait for a daemon thread
    while not all(world.everywhere(is_over)):
        pass


class DocumentEnd(NamedTuple):
    """The token at the end of each plain-text document: its id, its text, and why it is this one."""

    id: int
    text: str
    why: str


def document_end(wanted: str | None, model: Path, tokenizer: Any, vocab_size: int) -> DocumentEnd:
    """The token that ends the documents of a run.

    Args:
        wanted: the field ``data.document_end``. None takes the tokenizer's EOS, unless its chat template writes that
            token. Then it takes a token that the chat template does not write: one with a name of ``_NAMES``, at
            which the generation config ends text or which is a special token of the tokenizer; else another one at
            which the generation config ends text; else the EOS all the same.
        model: the model's directory, with its ``generation_config.json`` if it has one.
        tokenizer: its tokenizer, with an EOS.

    Raises:
        ConfigError: ``wanted`` is not a token of the model.
        BadInputError: the generation config is damaged.
    """
    if wanted is not None:
        found = tokenizer.get_vocab().get(wanted)
        if found is None or found >= vocab_size:
            known = ", ".join(dict.fromkeys(map(str, tokenizer.all_special_tokens)))
            raise ConfigError(
                f"data.document_end: {wanted!r} is not a token of the model", f"Its special tokens are: {known}"
            )
        return DocumentEnd(found, wanted, "data.document_end")
    eos = DocumentEnd(tokenizer.eos_token_id, tokenizer.eos_token, "the tokenizer's EOS")
    template = tokenizer.chat_template or ""
    if isinstance(template, dict):  # several
        template = "\n".join(template.values())
    if eos.text not in template and "eos_token" not in template:
        return eos
    others = [DocumentEnd(id_, _token(id_, tokenizer), f"{_GENERATION} ends text at it") for id_ in _ends(model)]
    named = [name for name in _NAMES if name in tokenizer.all_special_tokens]
    others += [DocumentEnd(tokenizer.get_vocab()[name], name, "a special token of the tokenizer") for name in named]
    others = [
        end for end in others if end.text and end.text not in template and end.id != eos.id and end.id < vocab_size
    ]
    return min(others, key=lambda end: end.text not in _NAMES, default=eos)


def _ends(model: Path) -> list[int]:
    """The token ids at which the generation config ends a text; none without such a file.

    Raises:
        BadInputError: the file is damaged.
    """
    if not (model / _GENERATION).exists():
        return []
    ends = read_object(contained(model, _GENERATION)).get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(end) is int and end >= 0 for end in ends):
        raise BadInputError(f"{model / _GENERATION}: eos_token_id holds something else than token ids")
    return ends


def _token(number: int, tokenizer: Any) -> str:
    """The text of a token; empty if there is none of this number."""
    return tokenizer.convert_ids_to_tokens(number) or "" if number < len(tokenizer) else ""
