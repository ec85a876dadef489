"""Loads the corpora on every rank: one process of a host tokenises, and the others find its result in the cache."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from threading import Thread

from transformers import PreTrainedTokenizerBase

from fcsd.config import Source
from fcsd.distill.data.corpus import Corpus, listed, load_corpus
from fcsd.launch.world import World

_BEAT = 60.0  # seconds between two collectives while ranks wait; far below the shortest timeout of a collective


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
    for corpus in corpora:
        if world.rank == 0:
            print(f"{corpus.name}: read: {corpus.read}", file=sys.stderr)
        if world.rank == 0 and (left_out := corpus.left_out(seq_len)):
            print(f"{corpus.name}: left out: {listed(left_out)}", file=sys.stderr)
        if world.rank == 0 and corpus.unread:
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
