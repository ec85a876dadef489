"""Runs a model in vLLM through lm-eval's own ``vllm`` model. Importing this file needs vLLM.

lm-eval cuts prompts that are too long and passes NaN on; here both are errors, as for the Hugging Face adapter. Log
probabilities of the two engines differ in their last bits, so a comparison uses one engine for all its models.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lm_eval.models import vllm_causallms
from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

from fcsd.checkpoint.tokenizer import text_ids
from fcsd.errors import BadInputError, NonFiniteError
from fcsd.eval.engines.answer_cache import AnswerCache, is_loglikelihood, is_text
from fcsd.eval.engines.interface import MAX_NEW_TOKENS, Adapter, length_of
from fcsd.launch.shared_work import ALONE
from fcsd.serve.vllm.support import installed_version

# The number of requests given to vLLM at once. It is large enough to keep vLLM busy, and small enough that a killed
# evaluation loses little work.
CHUNK = 1024
SEED = 0

_VLLM: Any = vllm_causallms.VLLM  # lm-eval's decorator hides its type
T = TypeVar("T")


class VLLMAdapter(_VLLM, Adapter):
    """A checkpoint in vLLM.

    Args:
        path: its directory.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        gpus: the tensor-parallel degree.
        max_length: the longest input in tokens; None for the model's own limit.
        batch_size: the most sequences at once; None for as many as vLLM has memory for.
        cache: the store of answers, from which a killed evaluation can resume.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str,
        gpus: int,
        max_length: int | None,
        batch_size: int | None,
        cache: AnswerCache | None,
    ) -> None:
        super().__init__(
            pretrained=str(path),
            dtype=dtype,
            tensor_parallel_size=gpus,
            max_model_len=max_length,
            max_batch_size=batch_size,
            max_gen_toks=MAX_NEW_TOKENS,
            seed=SEED,
        )
        self.cache = cache
        self.team = ALONE
        self._by_prompt: dict[tuple[int, ...], tuple[int, bool]] = {}  # the lengths of the answers to the last requests
        self._settings = {"dtype": dtype, "tensor_parallel": gpus, "batch_size": batch_size, "seed": SEED}

    def engine(self) -> dict[str, Any]:
        return {
            "name": "vllm",
            "version": installed_version(),
            "device": current_platform.device_type,
            **self._settings,
            "ranks": 1,
            "max_length": self.max_length,
        }

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        for texts, context_ids, ids in requests:
            if not context_ids or not ids:
                raise BadInputError(f"a request has no tokens to score: {texts!r:.80}")
            self.require_fits(len(context_ids) + len(ids) + 1, str(texts))  # vLLM always generates one token

        def score(chosen: list[Any]) -> list[tuple[float, bool]]:
            answers = _VLLM._loglikelihood_tokens(self, chosen, disable_tqdm=True)
            if not all(math.isfinite(logprob) for logprob, _ in answers):
                raise NonFiniteError("vLLM gives log-probabilities that are NaN or infinite", "no score is reported")
            return answers

        def key(request: Any) -> list[Any]:
            return ["loglikelihood", list(request[1]), list(request[2])]

        found = self._through_cache(requests, key, is_loglikelihood, score)
        return [(float(logprob), bool(greedy)) for logprob, greedy in found]

    @property
    def window(self) -> int:
        return self.max_length - 2  # one token of context, and vLLM always generates one

    def tok_encode(self, string: str | list[str], add_special_tokens: bool | None = None, **kwargs: Any) -> Any:
        """The token ids of a text, or a list of them for a list of texts."""
        texts = [string] if isinstance(string, str) else string
        ids = text_ids(texts, self.tokenizer, add_special_tokens)
        return ids[0] if isinstance(string, str) else ids

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            _, most = self.greedy_settings(request)
            tokens = len(self.tok_encode(request.args[0]))
            if not tokens:
                raise BadInputError("a prompt has no tokens")
            self.require_fits(tokens + most, request.args[0])

        found: dict[int, tuple[int, bool]] = {}
        places = {id(request): index for index, request in enumerate(requests)}

        def generate(chosen: list[Any]) -> list[str]:
            self._by_prompt.clear()
            texts = _VLLM.generate_until(self, chosen, disable_tqdm=True)
            for request in chosen:
                if (length := self._by_prompt.get(tuple(self.tok_encode(request.args[0])))) is not None:
                    found[places[id(request)]] = length
                    self.store(length_of(request), length)
            return texts

        texts = self._through_cache(requests, lambda r: ["generate_until", *r.args], is_text, generate)
        self.note_lengths(requests, found)
        return texts

    def _model_generate(self, requests: list[list[int]], *arguments: Any, **settings: Any) -> Any:
        """As lm-eval's, which calls it; the lengths of the answers to generated requests are kept by their prompts."""
        outputs = _VLLM._model_generate(self, requests, *arguments, **settings)
        if settings.get("generate"):
            for request, output in zip(requests, outputs, strict=True):
                answer = output.outputs[0]
                self._by_prompt[tuple(request)] = len(answer.token_ids), answer.finish_reason != "length"
        return outputs

    def _through_cache(
        self,
        requests: Sequence[T],
        key: Callable[[T], list[Any]],
        valid: Callable[[Any], bool],
        compute: Callable[[list[T]], list[Any]],
    ) -> list[Any]:
        """Answers to all requests, chunk by chunk; those known from an earlier run are not computed again."""
        answers = [self.cached(key(request), valid) for request in requests]
        missing = [index for index, answer in enumerate(answers) if answer is None]
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            for index, answer in zip(chunk, compute([requests[i] for i in chunk]), strict=True):
                answers[index] = answer
                self.store(key(requests[index]), answer)
        return answers
