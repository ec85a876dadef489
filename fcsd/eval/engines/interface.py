"""The interface of a model in an evaluation: lm-eval's own, and what fcsd needs beyond it, for every engine."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from fcsd.checkpoint.tokenizer import LimitedProcess, chat_text, count_before, limited_template, text_ids, tokens_before
from fcsd.errors import BadInputError, ConfigError
from fcsd.eval.engines.answer_cache import AnswerCache, is_length
from fcsd.launch.shared_work import Team

# lm-eval's default for tasks that do not say how long an answer may be.
MAX_NEW_TOKENS = 256


def length_of(request: Any) -> list[Any]:
    """The request under which the store has the length of the answer to a ``generate_until`` request."""
    return ["length of the answer", *request.args]


class Adapter(TemplateLM):
    """A model in some engine. Requests that it would not answer correctly are refused.

    Attributes:
        tokenizer: the model's tokenizer.
        cache: the store of answers, from which a killed evaluation can resume; None for no store.
        team: the ranks that share the work; all of them make the same calls and get the same answers.
    """

    tokenizer: Any
    cache: AnswerCache | None
    team: Team

    _template: LimitedProcess | None = None
    _lengths: tuple[tuple[int, bool] | None, ...] = ()

    def chat_text(self, messages: list[dict[str, str]], **options: Any) -> str:
        """The text of a conversation by the model's chat template, which runs in a process with limits.

        Raises:
            BadInputError: the template refuses the conversation or exceeds its limits.
        """
        self._template = self._template or limited_template(self.tokenizer)
        return chat_text(self._template, messages, self.tokenizer.name_or_path, **options)

    def close(self) -> None:
        """End the process in which the chat template runs. It starts again if it is needed."""
        if self._template is not None:
            self._template.close()

    @property
    @abc.abstractmethod
    def max_length(self) -> int:
        """The longest input in tokens."""

    @property
    def window(self) -> int:
        """The most tokens of a text that are scored at once."""
        return self.max_length

    def text_loglikelihoods(self, texts: list[str] | list[list[int]]) -> list[tuple[float, int]]:
        """``(log-likelihood in nats, tokens)`` of each text, in disjoint windows of ``window`` tokens.

        The special tokens before a text (BOS) are read and not scored, since they are the same for every text. A text
        without them begins after the prefix token. lm-eval's ``loglikelihood_rolling`` scores a BOS after a BOS.

        Args:
            texts: texts, or texts as token ids, to which no token is added.

        Raises:
            BadInputError: a token id is not one of the tokenizer's.
        """
        plain = [text for text in texts if isinstance(text, str)]
        documents = text_ids(plain, self.tokenizer) or [text for text in texts if not isinstance(text, str)]
        if (highest := max((max(ids, default=0) for ids in documents), default=0)) >= len(self.tokenizer):
            raise BadInputError(f"token id {highest} is not one of the {len(self.tokenizer):,} of this tokenizer")
        before = tokens_before(self.tokenizer, plain)
        owners, requests, counts = [], [], []
        for owner, ids in enumerate(documents):
            held = count_before(ids, before, self.tokenizer)
            first, *others = ids[:held] or [self.prefix_token_id]
            windows = get_rolling_token_windows([*others, *ids[held:]], first, self.window, context_len=1)
            for number, (context, scored) in enumerate(map(make_disjoint_window, windows)):
                read = 0 if number else len(others)
                name = (f"window {number} of a document", str(texts[owner]))
                request = (name, context + scored[:read], scored[read:])
                if request[2]:
                    owners.append(owner)
                    requests.append(request)
            counts.append(len(ids) - held)
        totals = [0.0] * len(texts)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(requests), strict=True):
            totals[owner] += logprob
        return list(zip(totals, counts, strict=True))

    @abc.abstractmethod
    def engine(self) -> dict[str, Any]:
        """The engine and its settings, for the result."""

    def greedy_settings(self, request: Any) -> tuple[tuple[str, ...], int]:
        """Stop strings and the most new tokens of a ``generate_until`` request.

        Raises:
            ConfigError: the task asks for sampling.
        """
        settings: Any = normalize_gen_kwargs(request.args[1], MAX_NEW_TOKENS)
        if settings["do_sample"]:
            raise ConfigError("the task asks for sampling", "Only greedy generation is comparable between models.")
        return tuple(settings["until"]), settings["max_gen_toks"]

    def note_lengths(self, requests: Sequence[Any], found: dict[int, tuple[int, bool]]) -> None:
        """Keep how long the answers to some requests are, for ``take_lengths``; those of earlier runs are in the store.

        Args:
            found: by the index of a request, the tokens of its new answer, and whether the answer ended by itself.
        """
        for index, length in found.items():
            self.remember(length_of(requests[index]), length)
        both = ((found.get(index), request) for index, request in enumerate(requests))
        self._lengths += tuple(new or self.cached(length_of(request), is_length) for new, request in both)

    def take_lengths(self) -> dict[str, float] | None:
        """The answers that were generated since the last call.

        Returns: ``n`` answers, ``tokens`` of one in the mean, and ``unended``, the share of those that the limit of
            their length cut off. None if there are none, or if an earlier version of fcsd has stored one.
        """
        lengths, self._lengths = self._lengths, ()
        known = [length for length in lengths if length is not None]
        if not known or len(known) < len(lengths):
            return None
        tokens, ended = zip(*known, strict=True)
        return {"n": len(known), "tokens": sum(tokens) / len(known), "unended": ended.count(False) / len(known)}

    def require_fits(self, tokens: int, text: str) -> None:
        """Refuse an input that would have to be cut.

        Raises:
            BadInputError: the input has more tokens than the model takes.
        """
        if tokens > self.max_length:
            raise BadInputError(
                f"a prompt needs {tokens} tokens, the model takes {self.max_length}: {text[:60]!r}...",
                "leave the task out, or lower its shots or answer length; a cut prompt would be a false score",
            )

    def cached(self, request: list[Any], valid: Callable[[Any], bool]) -> Any:
        """The answer of an earlier run, or None.

        Raises:
            BadInputError: ``valid`` says that the stored answer cannot be one.
        """
        return None if self.cache is None else self.cache.get(request, valid)

    def store(self, request: list[Any], answer: Any) -> None:
        """Keep an answer that this rank computed. If all ranks computed it, the first one writes it down."""
        if self.cache is None:
            return
        if self.team.together_on_all and not self.team.leads:
            self.cache.remember(request, answer)
        else:
            self.cache.add(request, answer)

    def remember(self, request: list[Any], answer: Any) -> None:
        """Keep an answer in memory that another rank has stored."""
        if self.cache is not None:
            self.cache.remember(request, answer)
