"""Evaluates the paper's table literally with whole sub-blocks of transformers, writing out every partial sum.

This file does not use ``fcsd.models``. To get the routed or the shared output, it calls the whole MoE block with the
output projection of the other half set to zero.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def decoder_of(model: nn.Module) -> nn.Module:
    return getattr(model.model, "language_model", model.model)


def mlp_of(layer: nn.Module) -> nn.Module:
    return layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp


@contextmanager
def zeroed(*parameters: Tensor) -> Iterator[None]:
    kept = [p.detach().clone() for p in parameters]
    try:
        for p in parameters:
            p.data.zero_()
        yield
    finally:
        for p, value in zip(parameters, kept, strict=True):
            p.data.copy_(value)


def whole(mlp: nn.Module, x: Tensor) -> Tensor:
    out = mlp(x)
    return (out[0] if isinstance(out, tuple) else out).view_as(x)


def settled_and_routed(mlp: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """``(s_k, r_k)``. The output of a dense MLP counts as ``s_k``, that of a MoE without shared experts as ``r_k``."""
    if not hasattr(mlp, "experts"):
        return whole(mlp, x), torch.zeros_like(x)
    names = ("shared_experts", "shared_expert", "shared_mlp")
    shared = next((child for name in names if (child := getattr(mlp, name, None)) is not None), None)
    if shared is None:
        return torch.zeros_like(x), whole(mlp, x)
    with zeroed(mlp.experts.down_proj):
        s = whole(mlp, x)
    with zeroed(*shared.down_proj.parameters()):  # the weight, and the bias if there is one
        r = whole(mlp, x)
    return s, r


def attended(layer: nn.Module, x: Tensor, kwargs: dict) -> Tensor:
    """The output of a layer's attention; linear attention gets what transformers' layer gives it."""
    if getattr(layer, "block_type", None) != "linear_attention":
        return layer.self_attn(hidden_states=x, **kwargs)[0]
    given = {name: value for name, value in kwargs.items() if name not in ("position_ids", "position_embeddings")}
    given["cache_params"] = given.pop("past_key_values")
    return (layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn)(hidden_states=x, **given)


def layer_inputs(model: nn.Module, ids: Tensor, **images: Tensor) -> tuple[Tensor, list[dict], list[Tensor]]:
    """The embeddings, and what transformers' loop does with each layer.

    It passes keyword arguments (masks, rotary tables), and may add features of images to the layer's output.
    """
    seen, out, handles = [], [], []
    for layer in decoder_of(model).layers:
        hook = lambda _, args, kwargs: seen.append((args, kwargs))  # noqa: E731
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(layer.register_forward_hook(lambda _, args, found: out.append(found)))
    model(ids, use_cache=False, **images)
    for handle in handles:
        handle.remove()
    read = [args[0] for args, _ in seen]
    added = [after - before for before, after in zip(out, [*read[1:], out[-1]], strict=True)]
    return read[0], [kwargs for _, kwargs in seen], added


@torch.no_grad()
def evaluate(
    model: nn.Module,
    ids: Tensor,
    name: str,
    variant: str,
    converted: set[int],
    distance: int = 1,
    border: str | None = None,
    **images: Tensor,
) -> list[Tensor]:
    """``[o_0, ..., o_L, logits]`` of a wiring, from an unwired model (DESIGN §1; FarSkip eq. 8, Ladder eq. 2)."""
    embeds, kwargs, added = layer_inputs(model, ids, **images)
    o = [embeds]  # o[k] is the stream before layer k
    zero = torch.zeros_like(embeds)
    border = border or ("full" if name == "farskip" else "partial")
    a, s, r = [], [], []
    for k, layer in enumerate(decoder_of(model).layers):
        attn_rewired = name in ("farskip", "ladder") and variant != "mlp-only" and k in converted and k > 0
        if border == "full":
            attn_rewired = attn_rewired and k - 1 in converted
        mlp_rewired = name != "standard" and variant != "attn-only" and k in converted

        attn_in = o[k]
        if attn_rewired:
            attn_in = o[k - 1] + (a[k - 1] if distance == 1 else zero) + (s[k - 1] if name == "farskip" else zero)
        a.append(attended(layer, layer.input_layernorm(attn_in), kwargs[k]))

        mlp_in = o[k] + a[k]
        if mlp_rewired:
            mlp_in = o[k]
            if distance == 2 and k > 0:
                mlp_in = o[k - 1] + a[k - 1] + (s[k - 1] if name == "farskip" else zero)
        settled, routed = settled_and_routed(mlp_of(layer), layer.post_attention_layernorm(mlp_in))
        s.append(settled)
        r.append(routed)
        o.append(o[k] + a[k] + settled + routed + added[k])
    return [*o, model.lm_head(decoder_of(model).norm(o[-1]))]
