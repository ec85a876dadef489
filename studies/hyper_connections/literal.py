"""The layers of a rewired deepseek_v4 written out: slow, and sharing with ``wired.py`` transformers' modules alone.

The streams are never held. Every output of the model so far stays apart with one weight for each stream, and a read
sums the outputs that its row of ``reads`` names, each times its weights.
"""

from typing import Any

import torch
from torch import Tensor


def reads(name: str, converted: set[int], count: int, border: str) -> list[tuple[str, set[str]]]:
    """For each read in its order: who reads, and the outputs so far that it misses (attention, shared, routed)."""
    rows = []
    for k in range(count):
        before = {f"s{k - 1}", f"r{k - 1}"} if name == "ladder" else {f"r{k - 1}"} if name == "farskip" else set()
        rewired = k in converted and k > 0 and (border == "partial" or k - 1 in converted)
        rows.append((f"attention {k}", before if rewired else set()))
        rows.append((f"mlp {k}", {f"a{k}"} if k in converted and name != "standard" else set()))
    return rows


@torch.no_grad()
def evaluate(
    model: Any, ids: Tensor, name: str, converted: set[int], border: str, choice: Any
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The logits of an unwired ``DeepseekV4ForCausalLM`` as if it were rewired, and every ``(H_post sum, output)``.

    Args:
        ids: tokens ``[batch, seq]``.
        name: standard, ladder, farskip or parallel.
        converted: the converted layers.
        border: as in ``Wiring``.
        choice: a ``Choice`` of ``wired.py``.
    """
    decoder, kwargs, written = model.model, passed_on(model, ids), []
    embedded = decoder.embed_tokens(ids)
    ones = torch.ones(*ids.shape, model.config.hc_mult, dtype=embedded.dtype)
    outputs: dict[str, Tensor] = {"e": embedded}
    weights: dict[str, Tensor] = {"e": ones}  # of each output in the streams as they are now
    unmixed: dict[str, Tensor] = {"e": ones}  # the same, had the last sub-block not mixed the streams

    def streams(of: dict[str, Tensor], missing: set[str]) -> Tensor:
        return sum(of[o][..., None] * outputs[o][..., None, :] for o in outputs if o not in missing)  # type: ignore

    for reader, missing in reads(name, converted, len(decoder.layers), border):
        by, k = reader.split()
        layer = decoder.layers[int(k)]
        hc = layer.attn_hc if by == "attention" else layer.ffn_hc
        seen = streams(unmixed if missing and choice.read == "unmixed" else weights, missing)
        post, mix, x = hc(seen)
        if by == "attention":
            new = {f"a{k}": layer.self_attn(layer.input_layernorm(x), **kwargs)[0]}
        else:
            x, mlp = layer.post_attention_layernorm(x), layer.mlp
            _, chosen_weights, chosen = mlp.gate(x, ids) if mlp.is_hash else mlp.gate(x)
            routed = mlp.experts(x.flatten(0, 1), chosen, chosen_weights).view_as(x)
            new = {f"s{k}": mlp.shared_experts(x), f"r{k}": routed}
        if missing and choice.write == "fresh":
            post, mix, _ = hc(streams(weights, set()))
        unmixed = dict(weights) | dict.fromkeys(new, post)
        for o in outputs:
            if o in missing and choice.lands == "joined":
                weights[o] = post
            elif o not in missing or choice.lands == "carried":
                weights[o] = torch.einsum("bsij,bsi->bsj", mix, weights[o])  # by columns: stream i goes to stream j
        if missing and choice.lands != "carried":  # it lands behind the mixing, so it is in no unmixed streams
            unmixed |= {o: weights[o] for o in missing}
        outputs |= new
        weights |= dict.fromkeys(new, post)
        written += [(post.sum(-1), output) for output in new.values()]
    return model.lm_head(decoder.norm(decoder.hc_head(streams(weights, set())))), written


def passed_on(model: Any, ids: Tensor) -> dict[str, Any]:
    """What transformers' loop passes to every layer."""
    found: list[dict[str, Any]] = []
    hook = model.model.layers[0].register_forward_pre_hook(lambda *call: found.append(call[2]), with_kwargs=True)
    model(ids, use_cache=False)
    hook.remove()
    return {key: value for key, value in found[0].items() if key != "input_ids"}
