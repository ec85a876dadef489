"""Puts ``peft``'s LoRA layers into a model, switches them off and on, and merges them into ordinary weights.

``peft``'s layer computes ``W x + factor * B (A x)``; with its adapter off it computes ``W x`` by the same kernel as
the linear layer that it holds. A starts at random and B at zero, so a new adapter changes nothing.

With the adapter on, ``adapted_linear`` takes the place of its forward pass, which writes and reads four more tensors of
the output's size, and in the backward pass two more of it and one of the input's size.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .nf4 import in_nf4, plain_linear, plain_weight

_NAME = "default"  # of the only adapter of a layer
MATRICES = ("lora_A", "lora_B")


def add_adapters(model: nn.Module, paths: Mapping[str, str], rank: int, alpha: float, seed: int) -> dict[str, Any]:
    """Put an adapter beside each of some linear layers, in the dtype and on the device of its weight.

    Every layer has a random generator of its own, so the values depend on the seed and on the layer's name only. No
    global generator is used. The layers' own weights are frozen.

    Args:
        model: changed in place.
        paths: the name of each layer, by which its generator is seeded and the result is keyed, and its path in the
            model.
        alpha: the product of both matrices is multiplied by ``alpha / rank``.

    Returns: ``peft``'s layers by name.
    """
    from peft import LoraConfig  # not at the top, because it takes long

    made = _layer_class()
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, init_lora_weights=False)  # pyright: ignore[reportArgumentType]
    layers: dict[str, Any] = {}
    for name, path in paths.items():
        base: Any = model.get_submodule(path)
        base.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):  # the constructor draws values that are replaced
            layer: Any = made(base, _NAME, config=config, r=rank, lora_alpha=alpha)
        down, up = matrices(layer)
        if in_nf4(base):  # peft leaves these adapters in fp32
            for matrix in (down, up):
                matrix.data = matrix.data.to(base.weight.quant_state.dtype)
        if not base.weight.is_meta:
            digest = hashlib.sha256(f"{seed} adapter {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            drawn = torch.empty(down.shape)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            down.data.copy_(drawn)
        nn.init.zeros_(up)
        _replace(model, path, layer.train(base.training))
        layers[name] = layer
    return layers


@cache
def _layer_class() -> type[nn.Module]:
    """``peft``'s layer with ``adapted_linear`` in place of its forward pass, which is the reference in the tests."""
    from peft.tuners.lora import Linear

    class Adapted(Linear):
        def forward(self, x: Tensor) -> Tensor:
            base: Any = self.base_layer
            if self.disable_adapters:
                return base(x)
            if in_nf4(base):  # its backward pass reads the weight as it is stored
                return super().forward(x)
            return adapted_linear(x, base.weight, base.bias, *matrices(self), self.scaling[_NAME])

    return Adapted


def adapted_linear(x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float) -> Tensor:
    """``W x + b + factor * B (A x)``, in which W and b are frozen. Each product of an adapter adds to what is there.

    So nothing of the size of ``x`` or of the output is written but the output itself, and in the backward pass the
    gradient of ``x``. In bf16 the sum is rounded once instead of three times.

    Args:
        x: ``[..., in]``.
        weight: W, ``[out, in]``.
        bias: b, ``[out]``.
        down: A, ``[rank, in]``.
        up: B, ``[out, rank]``.

    Returns: ``[..., out]``.
    """
    return _AdaptedLinear.apply(x, weight, bias, down, up, factor)  # pyright: ignore[reportReturnType]


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, factor: float
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        inner = rows @ down.T
        ctx.save_for_backward(x, weight, down, up, inner)
        ctx.factor = factor
        output = F.linear(rows, weight, bias).addmm_(inner, up.T, alpha=factor)
        return output.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, down, up, inner = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1])
        of_inner = gradient @ up
        of_up = gradient.T @ inner
        if ctx.factor != 1:
            of_inner, of_up = ctx.factor * of_inner, ctx.factor * of_up
        of_down = of_inner.T @ x.reshape(-1, x.shape[-1])
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight).addmm_(of_inner, down).view(x.shape)
        return of_x, None, None, of_down, of_up, None


def matrices(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """A ``[rank, in]`` and B ``[out, rank]`` of ``peft``'s layer."""
    down, up = (getattr(layer, matrix)[_NAME].weight for matrix in MATRICES)
    return down, up


def switch(layers: Sequence[Any], on: bool) -> None:
    """Switch the adapters of ``peft``'s layers on or off.

    ``peft``'s own switch also changes which tensors require gradients, which a training engine must not see.
    """
    for layer in layers:
        vars(layer)["_disable_adapters"] = not on


@torch.no_grad()
def merged_weight(layer: Any) -> Tensor:
    """The weight ``[out, in]`` that computes what ``peft``'s layer computes, rounded once to the weight's dtype."""
    weight = plain_weight(layer.base_layer)
    down, up = (matrix.detach().float() for matrix in matrices(layer))
    return (weight.float() + layer.scaling[_NAME] * (up @ down)).to(weight.dtype)


def merge(model: nn.Module, layers: Sequence[Any]) -> dict[str, Callable[[], Tensor]]:
    """Replace ``peft``'s layers by the linear layers that they hold, with merged weights. The model is ordinary again.

    One weight is merged after the other, so little memory is needed.

    Returns: for each weight in NF4, with an adapter and without one, the function that makes the plain one, by name. In
        the model it is on the meta device, because a process that holds all in four bits may not hold them in 16.
    """
    paths, later = {module: path for path, module in model.named_modules()}, dict[str, Callable[[], Tensor]]()
    for layer in layers:
        base, path = layer.base_layer, paths[layer]
        if in_nf4(base):
            later[f"{path}.weight"] = partial(merged_weight, layer)
            base = plain_linear(base)
        else:
            base.weight.data = merged_weight(layer)
        _replace(model, path, base)
    for path, module in list(model.named_modules()):
        if in_nf4(module):
            later[f"{path}.weight"] = partial(plain_weight, module)
            _replace(model, path, plain_linear(module))
    return later


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, own = path.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
