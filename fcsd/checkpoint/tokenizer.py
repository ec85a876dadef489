"""Loads the tokenizer of a model directory, decides which special tokens a text has, and renders conversations.

Tokenizers differ: some put BOS before a text (``add_bos_token``), some append EOS (``add_eos_token``), some do neither.
A text that a model continues or scores, and the text of a training document, begin with what the tokenizer puts before
a text, once. They never end with what it appends. A training document ends with one token that ends documents.

A chat template is a program that came with a model. A loop in it cannot be interrupted from another thread of the same
process, and its memory counts as memory of the run. The operating system, however, can stop a child process. Therefore
every command renders in one; ``fcsd/distill/data/chat_template.py`` does it turn by turn.
"""

import gc
import multiprocessing
import resource
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What holds the vocabulary of a tokenizer in the formats that transformers reads.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def tokenizer_file(path: Path) -> str | None:
    """The name of the file in a model directory that holds the tokenizer's vocabulary; None if there is none."""
    others = sorted(file.name for file in path.iterdir() if file.suffix in (".model", ".tiktoken"))
    return next((name for name in (*_VOCABULARIES, *others) if (path / name).is_file()), None)


def load_tokenizer(model: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model directory. Code in the directory is not run.

    Raises:
        BadInputError: the directory has no tokenizer, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # the libraries do not check the files, and fail in any way on those of another form
        raise BadInputError(
            f"{model}: there is no usable tokenizer ({reason_of(error)})",
            "Copy tokenizer.json and tokenizer_config.json of the model into this directory.",
        ) from error


def tokens_before(tokenizer: Any, texts: Sequence[str] = ()) -> list[int]:
    """The special tokens that a tokenizer puts before a text: mostly BOS or nothing.

    Args:
        texts: texts to find it out by if the tokenizer has no token for the letter a.
    """
    for text in ("a", *texts):
        bare, full = (list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (False, True))
        if bare:
            starts = range(len(full) - len(bare) + 1)
            return full[: next((start for start in starts if full[start : start + len(bare)] == bare), 0)]
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos] else []


def text_ids(texts: Sequence[str], tokenizer: Any, special: bool | None = None) -> list[list[int]]:
    """The token ids of texts as a model reads them: see the top of this file.

    Args:
        special: whether the tokenizer's tokens come before a text. None puts them there unless the text has them.
    """
    if not texts:
        return []
    bare = [list(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
    before = [] if special is False else tokens_before(tokenizer, texts)
    return [[*before, *ids] if special or not count_before(ids, before, tokenizer) else ids for ids in bare]


def count_before(ids: Sequence[int], before: Sequence[int], tokenizer: Any) -> int:
    """How many special tokens come before a text in ``ids``: those of ``before`` (see ``tokens_before``), or a BOS."""
    if before and list(ids[: len(before)]) == list(before):
        return len(before)
    return int(list(ids[:1]) == [tokenizer.bos_token_id])


def document_ids(text: str, tokenizer: Any, before: Sequence[int], end: int) -> list[int]:
    """The token ids of a training document: ``before`` (see ``tokens_before``), the text, and ``end`` once."""
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    start = [] if count_before(ids, before, tokenizer) else before
    return [*start, *ids, *([] if ids[-1:] == [end] else [end])]


CPU_SECONDS = 20.0  # per call; CPU time is limited so that the load of the machine does not decide which rows are used
MEMORY = 1 << 30  # bytes that a child may allocate in addition to the memory of its parent


class LimitExceededError(Exception):
    """The child process was stopped. The message is a verb phrase, to which the caller adds the subject."""


class LimitedProcess:
    """Calls ``function`` in a child process, one call at a time.

    If the child was stopped, the next call starts another one. The child is forked, so it starts in milliseconds and
    has all objects that ``function`` needs. It starts no thread and uses no device. It ends when the ``with`` block or
    the parent process ends.

    Args:
        function: its argument and its result must be picklable. It must catch its own exceptions, because an exception
            that it does not catch ends the child.

    Attributes:
        answered: the number of calls that returned.
        stopped: the number of calls that exceeded a limit or ended the child.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.answered = self.stopped = 0
        self._function = function
        self._child: tuple[BaseProcess, Connection] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, argument: Any) -> Any:
        """Calls ``function`` with an argument and returns its result.

        Raises:
            LimitExceededError: the call used more than ``CPU_SECONDS``, or the child ended for another reason.
        """
        _, pipe = self._child = self._child or self._start()
        try:
            pipe.send(argument)
            result = pipe.recv()
        except (EOFError, OSError) as error:
            self.stopped += 1
            if self.close() == -signal.SIGPROF:
                raise LimitExceededError(f"ran for more than {CPU_SECONDS:g} s") from error
            raise LimitExceededError("ended its process") from error
        self.answered += 1
        return result

    def _start(self) -> tuple[BaseProcess, Connection]:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._function, theirs, ours), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def close(self) -> int | None:
        """Ends the child, if there is one, and returns its exit code. The next call starts another one."""
        if self._child is None:
            return None
        process, pipe = self._child
        self._child = None
        pipe.close()  # an idle child ends by itself
        process.join(timeout=1.0)
        process.kill()
        process.join()
        return process.exitcode


def _serve(function: Callable[[Any], Any], pipe: Connection, parents_end: Connection) -> None:
    """The loop of the child: answers calls until the parent closes its end of the pipe."""
    parents_end.close()
    gc.freeze()  # the child must not collect objects of the parent, such as tensors on a device
    for number in (signal.SIGPROF, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which closes the pipe
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    while True:
        try:
            argument = pipe.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF ends the process, even inside C code
        result = function(argument)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send(result)


MAX_CHARACTERS = 10_000_000  # in a text or a chat; a tokenizer needs several hundred bytes of memory per character


def limited_template(tokenizer: Any) -> LimitedProcess:
    """The process in which :func:`chat_text` renders, from the first text to the end of its ``with`` block."""
    return LimitedProcess(partial(_rendered, tokenizer))


def chat_text(template: LimitedProcess, messages: Sequence[dict[str, str]], name: str, **options: Any) -> str:
    """The text of a conversation, as ``apply_chat_template`` renders it.

    Args:
        template: see :func:`limited_template`.
        messages: the turns, each with ``role`` and ``content``.
        options: arguments of ``apply_chat_template``, such as ``add_generation_prompt``.

    Raises:
        BadInputError: the template exceeds its limits, refuses the conversation, or makes too long a text of it.
    """
    whose = f"{name or 'the tokenizer'}: its chat template"
    try:
        text, reason = template((list(messages), options))
    except LimitExceededError as error:
        raise BadInputError(f"{whose} {error}") from error
    if reason:
        raise BadInputError(f"{whose} refuses the conversation: {reason}")
    return text


def _rendered(tokenizer: Any, call: tuple[list[dict[str, str]], dict[str, Any]]) -> tuple[str, str]:
    """The text and an empty reason, or an empty text and the reason why there is none."""
    messages, options = call
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # a template may fail in any way
        return "", reason_of(error)
    return (text, "") if len(text) <= MAX_CHARACTERS else ("", f"over {MAX_CHARACTERS:,} characters")
