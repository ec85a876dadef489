"""The corpora of a run on every rank: one process of a host tokenises, and the others find its result in the cache."""

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from threading import Thread

from transformers import PreTrainedTokenizerBase

from fcsd.config import Source
from fcsd.distill.data.corpus import Corpus, listed, load_corpus
from fcsd.launch.world import World

_BEAT = 60.0  # seconds; far below the shortest timeout of a collective


def load_corpora(
    sources: Sequence[Source], tokenizer: PreTrainedTokenizerBase, vocab_size: int, seq_len: int, world: World
) -> list[Corpus]:
    """The corpora of ``sources`` on every rank; rank 0 prints what is left out of rows of ``seq_len`` tokens.

    Raises:
        BadInputError, ConfigError: as ``load_corpus``, on every rank.
    """
    corpora: list[Corpus] = []
    # Hosts may share the cache or not. Rank 0 fills it first, then the first process of each other host, then the rest
    # read it.
    mine = 0 if world.rank == 0 else 1 if os.environ["LOCAL_RANK"] == "0" else 2
    for turn in range(3):
        wanted = sources if turn == mine else ()
        _patiently(world, lambda wanted=wanted: corpora.extend(load_corpus(s, tokenizer, vocab_size) for s in wanted))
    for corpus in corpora:
        if world.rank == 0 and (left_out := corpus.left_out(seq_len)):
            print(f"{corpus.name}: left out: {listed(left_out)}", file=sys.stderr)
    return corpora


def _patiently(world: World, work: Callable[[], None]) -> None:
    """``world.everywhere`` for work that takes hours on some ranks: no collective waits longer than ``_BEAT``."""
    job: Future[None] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    def is_over() -> bool:
        wait([job], _BEAT)
        return job.done() and job.result() is None

    Thread(target=run, daemon=True).start()  # Ctrl-C does not wait for a daemon
    while not all(world.everywhere(is_over)):
        pass
