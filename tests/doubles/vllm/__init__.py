"""A stand-in for vLLM at the border that lm-eval talks to: the same calls and answers, by transformers on the CPU."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

__version__ = "0.24.0"

made: list["LLM"] = []


@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 16
    stop: list[str] = field(default_factory=list)
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


@dataclass
class TokensPrompt:
    prompt_token_ids: list[int]


@dataclass
class Logprob:
    logprob: float


class LLM:
    """Takes any argument, as vLLM's engine arguments are many; ``arguments`` keeps them and ``asked`` the prompts."""

    def __init__(self, **arguments: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.arguments, self.asked = arguments, 0
        path = arguments["model"]
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path)
        longest = arguments["max_model_len"] or self._model.config.max_position_embeddings
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=longest))
        made.append(self)

    def generate(
        self, prompts: list[TokensPrompt], *, sampling_params: list[SamplingParams], use_tqdm: bool, lora_request: None
    ) -> list[Any]:
        self.asked += len(prompts)
        return [self._one(p.prompt_token_ids, s) for p, s in zip(prompts, sampling_params, strict=True)]

    @torch.no_grad()
    def _one(self, ids: list[int], settings: SamplingParams) -> Any:
        assert (
            settings.temperature == 0 and len(ids) + settings.max_tokens <= self.llm_engine.model_config.max_model_len
        )
        if settings.prompt_logprobs is not None:
            logprobs = self._model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            best = logprobs.argmax(-1).tolist()
            told = [
                {token: Logprob(float(logprobs[i, token])) for token in {ids[i + 1], best[i]}}
                for i in range(len(ids) - 1)
            ]
            return SimpleNamespace(prompt_logprobs=[None, *told])
        text, new = "", []
        while len(new) < settings.max_tokens and not any(stop in text for stop in settings.stop):
            new.append(int(self._model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
            text = self._tokenizer.decode(new, skip_special_tokens=settings.skip_special_tokens)
        ended = any(stop in text for stop in settings.stop)
        for stop in settings.stop:
            text = text.split(stop)[0]
        reason = "stop" if ended else "length"
        return SimpleNamespace(outputs=[SimpleNamespace(text=text, token_ids=new, finish_reason=reason)])
