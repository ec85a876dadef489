"""Adapts a Hugging Face model to lm-eval's interface, which asks for log-probabilities and generated texts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from lm_eval.models.utils import resolve_max_length
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.checkpoint.tokenizer import text_ids
from fcsd.engine.generate import BATCHES, GRAPHS, ending, generate
from fcsd.engine.logprobs import check_head, continuation_logprobs
from fcsd.errors import BadInputError
from fcsd.eval.engines.answer_cache import AnswerCache, is_loglikelihood, is_text
from fcsd.eval.engines.interface import Adapter, length_of
from fcsd.launch.shared_work import ALONE, Team
from fcsd.progress import progress
from fcsd.serve.generation_settings import NOT_IN_EVALUATIONS, name_unapplied


class HFAdapter(Adapter):
    """Scores and generates as lm-eval's HFLM does, but faster, and with two errors that HFLM does not have.

    HFLM reports a score for a model whose logits are NaN, and it cuts prompts that are too long without saying so;
    here both are errors.

    Args:
        model: a causal LM in eval mode.
        batch_size: the most sequences in one forward pass; None for as many as the token limits allow.
        max_length: the longest input in tokens, if shorter than the model's own limit.
        cache: where answers are kept, so that a killed evaluation can resume.
        team: the ranks that share the work; all of them make the same calls and get the same answers.
        generation: a way of ``fcsd.engine.generate``; None for ``graphs`` on a GPU unless the ranks run in step, else
            ``batches``.
        backend: what else the result says of the engine, ``name`` among it; None for transformers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        batch_size: int | None = None,
        max_length: int | None = None,
        cache: AnswerCache | None = None,
        team: Team = ALONE,
        generation: str | None = None,
        backend: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_head(model)
        self.model = model
        self.tokenizer: Any = tokenizer
        self.batch_size = batch_size
        self.cache = cache
        self.team = team
        self.generation = generation or (GRAPHS if model.device.type == "cuda" and not team.lockstep else BATCHES)
        self._longest = max_length
        self._backend = backend or {"name": "hf"}
        self._device = model.device
        if self.prefix_token_id is None:
            raise BadInputError(
                f"{tokenizer.name_or_path}: its tokenizer has neither a BOS nor an EOS token",
                "Set eos_token in its tokenizer_config.json.",
            )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before the first one: BOS, or EOS for models without BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        own = resolve_max_length(self.model.config, self.tokenizer)
        return own if self._longest is None else min(own, self._longest)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.chat_text(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return text_ids([string], self.tokenizer, add_special_tokens)[0]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """As in the base class, but the tokenizer gets whole batches, and each context only once."""
        texts = [request.args for request in requests]
        # Spaces at the end belong to the continuation, since tokenizers join them with the next word.
        stripped = [context.rstrip() for context, _ in texts]
        split = [(left, c[len(left) :] + rest) for left, (c, rest) in zip(stripped, texts, strict=True)]
        lefts = list(dict.fromkeys(left for left in stripped if left))
        encoded = dict(zip(lefts, text_ids(lefts, self.tokenizer), strict=True))
        wholes = text_ids([left + right for left, right in split], self.tokenizer)
        bare = [i for i, (left, _) in enumerate(split) if not left]
        for i, tokens in zip(bare, text_ids([split[i][1] for i in bare], self.tokenizer, False), strict=True):
            wholes[i] = tokens
        pairs = []
        for (context, continuation), (left, _), whole in zip(texts, split, wholes, strict=True):
            if left:
                cut = len(encoded[left])
            else:  # an empty context is replaced by the prefix token
                whole = whole if whole[:1] == [self.prefix_token_id] else [self.prefix_token_id, *whole]
                cut = 1
            pairs.append(((context, continuation), whole[:cut], whole[cut:]))
        return self._loglikelihood_tokens(pairs)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        for (context, continuation), context_ids, ids in requests:
            if not context_ids or not ids:
                raise BadInputError(f"a request has no tokens to score: {(context + continuation)[-80:]!r}")
            self.require_fits(len(context_ids) + len(ids) - 1, context)
        answers: list[Any] = [self.cached(["loglikelihood", *texts], is_loglikelihood) for texts, _, _ in requests]
        open_ = [i for i, answer in enumerate(answers) if answer is None]
        todo = [(requests[i][1], requests[i][2]) for i in open_]
        work = scoring_work(todo)
        with self._progress("scoring, tokens", sum(work)) as advance:

            def done(index: int, answer: tuple[float, bool]) -> None:
                self.store(["loglikelihood", *requests[open_[index]][0]], answer)
                advance(work[index])

            scored = self.team.together(
                lambda: continuation_logprobs(self.model, todo, batch_size=self.batch_size, done=done, team=self.team)
            )
        for index, answer in scored.items():
            answers[open_[index]] = answer
            self.remember(["loglikelihood", *requests[open_[index]][0]], answer)
        return [(float(logprob), bool(greedy)) for logprob, greedy in answers]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text as HFLM counts it, in disjoint windows of ``max_length`` tokens.

        A BOS that the tokenizer adds is scored too; ``text_loglikelihoods`` leaves it out.
        """
        texts = [request.args[0] for request in requests]
        owners, asked = [], []
        for owner, tokens in enumerate(text_ids(texts, self.tokenizer)):
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            for number, window in enumerate(windows):
                owners.append(owner)
                asked.append(((f"window {number}", texts[owner]), *make_disjoint_window(window)))
        totals = [0.0] * len(texts)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(asked), strict=True):
            totals[owner] += logprob
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, cut before the first stop string. A task that asks for sampling is refused.

        The penalties and other rules of the model's own generation settings are not applied, and are named.
        """
        if self.team.leads:
            name_unapplied(str(self.model.name_or_path), self.model.generation_config, NOT_IN_EVALUATIONS)
        answers: list[Any] = [self.cached(["generate_until", *request.args], is_text) for request in requests]
        groups: dict[tuple[tuple[str, ...], int], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            settings = self.greedy_settings(request)
            if answers[index] is None:
                groups[settings].append(index)
        prompts = dict(enumerate(text_ids([request.args[0] for request in requests], self.tokenizer)))
        for (_, max_new_tokens), members in groups.items():
            for index in members:
                if not prompts[index]:
                    raise BadInputError("a prompt has no tokens")
                self.require_fits(len(prompts[index]) + max_new_tokens - 1, requests[index].args[0])
        # An answer's length is unknown before it is written, so each counts as the longest of its task.
        work = {i: len(prompts[i]) + most for (_, most), members in groups.items() for i in members}
        with self._progress("generating, tokens", sum(work.values())) as advance:

            def generate() -> dict[int, tuple[str, tuple[int, bool] | None]]:
                new: dict[int, tuple[str, tuple[int, bool] | None]] = {}
                for (stops, max_new_tokens), members in groups.items():
                    for place, text, length in self._generate([prompts[i] for i in members], stops, max_new_tokens):
                        new[members[place]] = text, length
                        if length is not None:
                            self.store(length_of(requests[members[place]]), length)
                        self.store(["generate_until", *requests[members[place]].args], text)
                        advance(work[members[place]])
                return new

            new = self.team.together(generate)
        for index, (text, _) in new.items():
            answers[index] = text
            self.remember(["generate_until", *requests[index].args], text)
        self.note_lengths(requests, {index: length for index, (_, length) in new.items() if length is not None})
        return answers

    def _generate(
        self, prompts: list[list[int]], stops: tuple[str, ...], max_new_tokens: int
    ) -> Iterator[tuple[int, str, tuple[int, bool] | None]]:
        """The answers to this rank's share of the prompts: the prompt's index, the text, and its length if known."""
        end = ending(self.model, self.tokenizer, stops)
        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "batch_size": self.batch_size}
        found = generate(self.model, prompts, ended=end.of, way=self.generation, team=self.team, **settings)
        for index, tokens in found:
            yield index, end.text(tokens), (len(tokens), end.of(tokens, 0) is not None)

    def engine(self) -> dict[str, Any]:
        places = vars(self.model).get("hf_device_map", {})  # set by accelerate
        return {
            **self._backend,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "devices": sorted({str(place) for place in places.values()}) or None,
            "attention": self.model.config._attn_implementation,
            "generation": self.generation,
            "batch_size": self.batch_size,
            "ranks": 1 if self.team.world is None else self.team.world.size,
            "max_length": self.max_length,
        }

    def _progress(self, what: str, work: float) -> AbstractContextManager[Callable[[float], None]]:
        """The progress of this rank's share of the work. Only the first rank shows it, as an estimate for all."""
        return progress(what, work / self.team.shares, quiet=not self.team.leads)


def scoring_work(requests: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
    """The tokens that a model computes for each request ``(context, continuation)``.

    Requests with the same context share its tokens. The longest inputs are computed first, so that counting requests
    would make the rest appear as slow as these.
    """
    sharing = Counter(tuple(context) for context, _ in requests)
    return [len(context) / sharing[tuple(context)] + len(continuation) for context, continuation in requests]
