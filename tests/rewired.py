"""Pairs of an original and its conversion with the same weights, and what a model computes in training."""

from concurrent.futures import ThreadPoolExecutor

import tiny
import torch
from torch import Tensor

from fcsd.models.build import converted_config, model_classes
from fcsd.models.wiring import Wiring


def rewired(arch: str, wiring: Wiring):
    """An original and its conversion with the same weights, both in training mode."""
    original = tiny.model(arch, initializer_range=0.1)
    config = converted_config(original.config, wiring.to_block())
    model = model_classes(arch)["AutoModelForCausalLM"](config)
    model.load_state_dict(original.state_dict())
    return original.train(), model.train()


def logits_and_gradients(model) -> list[Tensor]:
    """The logits of ``tiny.tokens()`` and the gradients of their loss; zeros where a parameter has no gradient."""
    ids = tiny.tokens()
    model.zero_grad(set_to_none=False)
    torch.manual_seed(0)  # a router may draw experts in training
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    return [
        out.logits.detach(),
        *(torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()),
    ]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether all tensors are equal in every bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def backward(loss: Tensor) -> None:
    """As on CUDA: in a thread of its own, which has its own sequence numbers."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
