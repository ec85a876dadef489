"""Evaluates the paper's table literally with whole sub-blocks of transformers, writing out every partial sum.

This file does not use ``fcsd.models``. To get the routed or the shared output, it calls the whole MoE block with the
output projection of the other half set to zero.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# How a layer of transformers treats its sub-blocks, where it is not llama's way: model type -> the norms (of what the
# attention reads, of its output, of what the MLP reads, of its output).
NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    **dict.fromkeys(
        ("olmo2", "olmo3", "flex_olmo", "exaone4"),
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ),
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma3", "gemma4_text", "gemma4"),
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ),
    **dict.fromkeys(("lfm2", "lfm2_moe"), ("operator_norm", None, "ffn_norm", None)),
    "afmoe": ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
    "hyperclovax": ("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
    "jamba": ("input_layernorm", None, "pre_ff_layernorm", None),
    **dict.fromkeys(
        ("glm4", "glm4v"),
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ),
}
# What a layer multiplies every output by before it adds it.
MULTIPLIERS: dict[str, Callable] = {
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoehybrid", "hyperclovax"), lambda config: config.residual_multiplier
    ),
    "minicpm3": lambda config: config.scale_depth / config.num_hidden_layers**0.5,
}
# What is done to the product of the final norm and the output head.
LOGITS: dict[str, Callable] = {
    **dict.fromkeys(
        ("granite", "granitemoe", "granitemoehybrid", "minicpm3"),
        lambda config, logits: logits / config.logits_scaling,
    ),
    "hyperclovax": lambda config, logits: logits * config.logits_scaling,
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gemma4_text", "gemma4"),
        lambda config, logits: capped(logits, config.get_text_config().final_logit_softcapping),
    ),
}


def capped(logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else (logits / cap).tanh() * cap


KEYS = "prev_topk_indices"  # the keys that the attention of the layer before has read
LINEAR = ("linear_attn", "mamba", "conv")
FINAL_NORM = {
    **dict.fromkeys(("lfm2", "lfm2_moe"), "embedding_norm"),
    "jamba": "final_layernorm",
}
PLAIN = ("input_layernorm", None, "post_attention_layernorm", None)


def around(model: nn.Module, layer: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """The four functions that ``NORMS`` names; those of outputs also multiply."""
    config, functions = model.config, []
    factor = MULTIPLIERS[config.model_type](config) if config.model_type in MULTIPLIERS else 1
    names = NORMS.get(config.model_type, PLAIN)
    for name, scale in zip(names, (1, factor, 1, factor), strict=True):
        norm = nn.Identity() if name is None else layer.get_submodule(name)
        functions.append(lambda x, norm=norm, scale=scale: norm(x) * scale)
    return functions


def decoder_of(model: nn.Module) -> nn.Module:
    return getattr(model.model, "language_model", getattr(model.model, "text_model", model.model))


def mlp_of(layer: nn.Module) -> nn.Module:
    names = ("feed_forward", "block_sparse_moe", "mlp", "mixer")
    return next(getattr(layer, name) for name in names if hasattr(layer, name))


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


def settled_and_routed(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """``(s_k, r_k)``. The output of a dense MLP counts as ``s_k``, that of a MoE without shared experts as ``r_k``."""
    mlp = mlp_of(layer)
    if hasattr(layer, "shared_mlp"):  # beside the experts, if there are any
        return layer.shared_mlp(x), torch.zeros_like(x) if mlp is None else whole(mlp, x)
    if not hasattr(mlp, "experts"):
        return whole(mlp, x), torch.zeros_like(x)
    if hasattr(mlp, "post_mlp_layernorm"):  # the block norms the sum of the two
        return torch.zeros_like(x), whole(mlp, x)
    names = ("shared_experts", "shared_expert", "shared_mlp")
    shared = next((child for name in names if (child := getattr(mlp, name, None)) is not None), None)
    if shared is None:
        return torch.zeros_like(x), whole(mlp, x)
    latent = getattr(mlp, "fc2_latent_proj", nn.Identity())  # behind the sum of Nemotron's experts
    with zeroed(mlp.experts.down_proj, *latent.parameters()):
        s = whole(mlp, x)
    with zeroed(*shared.down_proj.parameters()):  # the weight, and the bias if there is one
        r = whole(mlp, x)
    return s, r


def beside(layer: nn.Module, before_mlp: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The sum of Gemma 4's MLP and of its experts, each behind a norm of its own, before the norm of the sum."""
    dense = layer.post_feedforward_layernorm_1(layer.mlp(before_mlp(x)))
    flat = x.flatten(0, 1)
    _, weights, indices = layer.router(flat)
    routed = layer.experts(layer.pre_feedforward_layernorm_2(flat), indices, weights).view_as(x)
    return dense + layer.post_feedforward_layernorm_2(routed)


def leaving(layer: nn.Module, given: Tensor | None, read: Tensor) -> Callable[[Tensor], Tensor]:
    """What Gemma 4's layer does with a stream that it passes on.

    It adds what it makes of its features of the tokens, ``given``, and of the stream that the next attention reads.
    """
    added = torch.zeros_like(read)
    if given is not None:
        gated = layer.act_fn(layer.per_layer_input_gate(read)) * given
        added = layer.post_per_layer_input_norm(layer.per_layer_projection(gated))
    return lambda x: (x + added) * getattr(layer, "layer_scalar", 1)


def attended(layer: nn.Module, x: Tensor, kwargs: dict) -> tuple[Tensor, object]:
    """What a layer's attention returns first and last; linear attention gets what transformers' layer gives it."""
    linear = next((child for name in LINEAR if (child := getattr(layer, name, None)) is not None), None)
    if linear is None and getattr(layer, "block_type", None) != "linear_attention":
        found = layer.self_attn(hidden_states=x, **kwargs)
        return found[0], found[-1]
    other = ("position_ids", "position_embeddings", "past_key_values", "use_cache")
    given = {name: value for name, value in kwargs.items() if name not in other}
    return (layer.self_attn if linear is None else linear)(hidden_states=x, **given), None


def first(found: Tensor | tuple) -> Tensor:
    return found[0] if isinstance(found, tuple) else found


def layer_inputs(
    model: nn.Module, ids: Tensor, **images: Tensor
) -> tuple[Tensor, list[Tensor | None], list[dict], list[Tensor]]:
    """The embeddings, and what transformers' loop does with each layer.

    It passes features of the tokens by position, and keyword arguments (masks, rotary tables). It may add features of
    images to the layer's output.
    """
    seen, out, handles = [], [], []
    for layer in decoder_of(model).layers:
        hook = lambda _, args, kwargs: seen.append((args, kwargs))  # noqa: E731
        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(layer.register_forward_hook(lambda _, args, found: out.append(first(found))))
    model(ids, use_cache=False, **images)
    for handle in handles:
        handle.remove()
    read = [args[0] for args, _ in seen]
    added = [after - before for before, after in zip(out, [*read[1:], out[-1]], strict=True)]
    given = [args[1] if len(args) > 1 else None for args, _ in seen]
    return read[0], given, [kwargs for _, kwargs in seen], added


def logits_of(model: nn.Module, stream: Tensor) -> Tensor:
    """The logits of a full stream after the last layer."""
    norm = FINAL_NORM.get(model.config.model_type, "norm")
    logits = model.lm_head(decoder_of(model).get_submodule(norm)(stream))
    return LOGITS.get(model.config.model_type, lambda _, x: x)(model.config, logits)


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
    """``[o_0, ..., o_L, logits]`` of a wiring, from an unwired model (DESIGN §1; FarSkip eq. 8, Ladder eq. 2).

    If a layer norms its outputs, ``a`` is the normed output of the attention, and that of the MLP is ``s`` in a dense
    layer and ``r`` in a MoE layer: shared and routed experts are summed before the norm, so neither is there alone.
    """
    border = border or ("full" if name == "farskip" else "partial")
    embeds, given, kwargs, added = layer_inputs(model, ids, **images)
    o = [embeds]  # o[k] is the stream before layer k
    zero = torch.zeros_like(embeds)

    def attn_rewired(k: int) -> bool:
        rewired = name in ("farskip", "ladder") and variant != "mlp-only" and k in converted and k > 0
        return rewired and (border == "partial" or k - 1 in converted)

    a, s, r, partial, leave, keys = [], [], [], [], [], None
    for k, layer in enumerate(decoder_of(model).layers):
        mlp_rewired = name != "standard" and variant != "attn-only" and k in converted

        attn_in = leave[k - 1](partial[k - 1]) if attn_rewired(k) else o[k]
        before_attn, after_attn, before_mlp, after_mlp = around(model, layer)
        if KEYS in kwargs[k]:  # not those of the unwired model
            kwargs[k][KEYS] = keys
        output, keys = attended(layer, before_attn(attn_in), kwargs[k])
        a.append(after_attn(output))

        mlp_in = o[k] + a[k]
        if mlp_rewired:
            mlp_in = o[k]
            if distance == 2 and k > 0:
                mlp_in = leave[k - 1](o[k - 1] + a[k - 1] + (s[k - 1] if name == "farskip" else zero))
        if getattr(layer, "enable_moe_block", False):
            settled, routed = zero, after_mlp(beside(layer, before_mlp, mlp_in))
        else:
            settled, routed = settled_and_routed(layer, before_mlp(mlp_in))
            if NORMS.get(model.config.model_type, PLAIN)[3] is None:
                settled, routed = after_mlp(settled), after_mlp(routed)
            elif hasattr(mlp_of(layer), "experts"):
                settled, routed = zero, after_mlp(settled + routed)
            else:
                settled, routed = after_mlp(settled), zero
        s.append(settled)
        r.append(routed)
        full = o[k] + a[k] + settled + routed
        partial.append(o[k] + (a[k] if distance == 1 else zero) + (s[k] if name == "farskip" else zero))
        leave.append(leaving(layer, given[k], partial[k] if attn_rewired(k + 1) else full))
        o.append(leave[k](full) + added[k])
    return [*o, logits_of(model, o[-1])]
