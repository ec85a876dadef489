"""Log-probabilities of continuations: how requests share forward passes changes no answer."""

import pytest
import tiny
import torch

from fcsd.engine import logprobs
from fcsd.engine.batches import generate_in_batch
from fcsd.engine.logprobs import Request, continuation_logprobs

REQUESTS: list[Request] = [
    ((5, 6), (7, 8)),
    ((5,), (6, 7, 8)),  # the same tokens, divided elsewhere
    ((5, 6, 7), (8,)),
    ((5, 6, 7, 8), (9, 3)),  # goes on where the others end
    ((5, 6), (7, 8)),  # asked twice
    ((4, 4, 4), (1,)),  # two choices of one context
    ((4, 4, 4), (2, 7)),
]


@torch.no_grad()
def literal(model, context, continuation):
    """The answer to one request, from one forward pass of its own."""
    ids = torch.tensor([[*context, *continuation]])
    found = model(input_ids=ids).logits[0].float().log_softmax(-1)
    rows = range(len(context) - 1, ids.shape[1] - 1)
    value = sum(float(found[row, token]) for row, token in zip(rows, continuation, strict=True))
    return value, all(int(found[row].argmax()) == token for row, token in zip(rows, continuation, strict=True))


@pytest.mark.parametrize("arch", ["llama", "jamba"])
def test_every_request_has_the_answer_of_a_pass_of_its_own(arch: str) -> None:
    """MiniMax-M3 chooses keys by their places in a row, which padding on the left would move. Jamba is recurrent."""
    model, requests = tiny.model(arch, initializer_range=0.2), [*REQUESTS]
    for length in (13, 18):  # with two choices each, of one batch if their beginnings may be padded
        context = tuple(tiny.tokens(1, length)[0].tolist())
        requests += [(context, (3, 9)), (context, (4, 2, 7))]
    found = continuation_logprobs(model, requests)
    assert sorted(found) == list(range(len(requests)))
    for index, request in enumerate(requests):
        value, greedy = literal(model, *request)
        assert found[index][0] == pytest.approx(value, abs=1e-4) and found[index][1] == greedy


def test_the_choices_of_short_contexts_are_asked_in_several_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is bounded by the tokens of the choices as well, which are many where contexts are short."""
    model = tiny.model("llama", initializer_range=0.2)
    choices = tiny.tokens(4, 9).tolist()
    requests: list[Request] = [((number, 2), tuple(choice)) for number in range(3, 9) for choice in choices]
    expected = continuation_logprobs(model, requests)
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].numel()), with_kwargs=True
    )
    monkeypatch.setattr(logprobs, "FORWARD_TOKENS", 80)
    found = continuation_logprobs(model, requests)
    assert max(sizes) <= 80 and sum(size > 40 for size in sizes) == 3, (
        "two contexts with four choices of nine tokens each"
    )
    assert {index: answer[1] for index, answer in found.items()} == {i: answer[1] for i, answer in expected.items()}
    assert all(answer[0] == pytest.approx(expected[index][0], abs=1e-4) for index, answer in found.items())


@pytest.mark.parametrize(
    "arch",
    ["granitemoehybrid", "qwen3_next", "lfm2"],
)
def test_rows_of_recurrent_models_are_removed_when_their_answers_end(arch: str) -> None:
    model = tiny.model(arch, initializer_range=0.2)
    prompts = [tiny.tokens(1, length, seed=length)[0].tolist() for length in (3, 9, 5)]

    def continued(prompts: list[list[int]], last: list[list[int]]) -> list[list[int]]:
        return generate_in_batch(model, prompts, max_new_tokens=6, ended=lambda new, _: 1 if new in last else None)

    alone = [continued([prompt], [])[0] for prompt in prompts]
    ends = [alone[0][:2], alone[1][:3]]
    assert continued(prompts, ends) == [*ends, alone[2]]
