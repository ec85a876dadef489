"""Log-probabilities of continuations: how requests share forward passes changes no answer."""

import pytest
import tiny
import torch

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
    logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
    rows = range(len(context) - 1, ids.shape[1] - 1)
    value = sum(float(logprobs[row, token]) for row, token in zip(rows, continuation, strict=True))
    return value, all(int(logprobs[row].argmax()) == token for row, token in zip(rows, continuation, strict=True))


def test_every_request_has_the_answer_of_a_pass_of_its_own():
    model = tiny.model("llama").eval()
    found = continuation_logprobs(model, REQUESTS)
    assert sorted(found) == list(range(len(REQUESTS)))
    for index, request in enumerate(REQUESTS):
        value, greedy = literal(model, *request)
        assert found[index][0] == pytest.approx(value, abs=1e-4) and found[index][1] == greedy
