"""Desync against a literal simulation: every rank with its own slice of the weights and its own residual."""

import literal
import pytest
import tiny
import torch

from fcsd.errors import ConfigError
from fcsd.models.build import unwired, wire
from fcsd.models.desync import kept_reductions
from fcsd.models.wiring import Wiring

ALL = (0, 1, 2, 3)


def slice_of_rank(linear, x, rank, degree):
    columns = slice(rank * x.shape[-1] // degree, (rank + 1) * x.shape[-1] // degree)
    return x[..., columns] @ linear.weight[:, columns].T


@torch.no_grad()
def simulate(model, ids, group, degree, converted):
    """Ladder §5, rank by rank: the outputs before ``o_proj`` and ``down_proj`` are cut into the ranks' columns."""
    embeds, kwargs = literal.layer_inputs(model, ids)
    ranks, streams, pending = [embeds] * degree, [embeds], 0
    for k, layer in enumerate(model.model.layers):
        subblocks = (
            (
                lambda x, layer=layer, k=k: layer.self_attn(hidden_states=layer.input_layernorm(x), **kwargs[k])[0],
                layer.self_attn.o_proj,
            ),
            (lambda x, layer=layer: layer.mlp(layer.post_attention_layernorm(x)), layer.mlp.down_proj),
        )
        for i, (run, projection) in enumerate(subblocks):
            partials = []
            for rank in range(degree):
                seen = []
                handle = projection.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
                run(ranks[rank])
                handle.remove()
                partials.append(slice_of_rank(projection, seen[0], rank, degree))
            pending += 1
            desynced = k in converted
            last = i == 1 and k + 1 not in converted
            if not desynced or pending == group or last:
                total = sum(partials) + sum(ranks) / degree
                ranks, pending = [total] * degree, 0
            else:
                ranks = [x + p for x, p in zip(ranks, partials, strict=True)]
        streams.append(sum(ranks) / degree)
    return [*streams, model.lm_head(model.model.norm(streams[-1]))]


@pytest.mark.parametrize("arch", tiny.DENSE)
@pytest.mark.parametrize(("name", "group"), [("desync-2x", 2), ("desync-4x", 4)])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("layers", [ALL, (0, 1, 2), (1, 3), (1, 2, 3)])
def test_desync_is_the_simulation(arch, name, group, degree, layers):
    model, ids = tiny.model(arch), tiny.tokens()
    *streams, logits = simulate(model, ids, group, degree, set(layers))
    wire(model, Wiring(name, layers, tp_degree=degree))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-5)
    for mine, true in zip(out.hidden_states[:-1], streams[:-1], strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


def test_kept_reductions():
    assert kept_reductions(ALL, 2) == {k: (False, True) for k in ALL}
    assert kept_reductions(ALL, 4) == {0: (False, False), 1: (False, True), 2: (False, False), 3: (False, True)}
    assert kept_reductions((0, 1, 2), 4)[2] == (False, True)  # the last layer's is always kept
    assert kept_reductions((0, 2, 3), 4) == {0: (False, True), 2: (False, False), 3: (False, True)}


@pytest.mark.parametrize("arch", tiny.DENSE)
def test_desync_decodes_generates_trains_and_goes_away(arch):
    model, ids = tiny.model(arch), tiny.tokens(length=8)
    before = model(ids).logits
    wire(model, Wiring("desync-4x", ALL, tp_degree=2))
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    with torch.no_grad():
        full = model(ids, attention_mask=padded, use_cache=False).logits
        prefix = model(ids[:, :5], attention_mask=padded[:, :5], use_cache=True)
        rest = model(ids[:, 5:], attention_mask=padded, past_key_values=prefix.past_key_values).logits
    torch.testing.assert_close(rest[0], full[0, 5:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rest[1], full[1, 5:], rtol=1e-4, atol=1e-5)
    greedy = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(ids, use_cache=True, **greedy), model.generate(ids, use_cache=False, **greedy))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(before, wire(model, unwired())(ids).logits)


def test_desync_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="dense"):
        wire(tiny.model("qwen3_moe"), Wiring("desync-2x", ALL, tp_degree=2))
    with pytest.raises(ConfigError, match="does not divide"):
        wire(tiny.model("llama"), Wiring("desync-2x", ALL, tp_degree=3))
    with pytest.raises(ConfigError, match="bias"):
        wire(tiny.model("llama", mlp_bias=True), Wiring("desync-2x", ALL, tp_degree=2))
    with pytest.raises(ValueError, match="Desync"):
        Wiring("farskip", ALL, tp_degree=2)
    with pytest.raises(ValueError, match="Desync"):
        Wiring("desync-2x", ALL)
