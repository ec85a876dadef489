"""Desync against a literal simulation: every rank with its own slice of the weights and its own residual."""

import literal
import pytest
import tiny
import torch

from fcsd.errors import ConfigError
from fcsd.models import build
from fcsd.models.archs import ARCHS
from fcsd.models.build import unwired, wire
from fcsd.models.desync import desync_layers
from fcsd.models.wiring_block import Wiring, kept_reductions

ALL = (0, 1, 2, 3)
# (reduce, converted layers) -> the reductions that are kept: (layer, 0 after attention or 1 after the MLP).
PATTERNS = {
    ("2x", ALL): {(0, 1), (1, 1), (2, 1), (3, 1)},
    ("3x", ALL): {(1, 0), (2, 1), (3, 1)},
    ("4x", ALL): {(1, 1), (3, 1)},
    ("8x", ALL): {(3, 1)},
    ("last", ALL): {(3, 1)},
    ("last", (0, 2, 3)): {(0, 1), (3, 1)},
    ("m", ALL): {(0, 1), (1, 1), (2, 1), (3, 1)},
    ("-,m", ALL): {(1, 1), (3, 1)},
    ("a", (0, 1, 3)): {(0, 0), (1, 0), (1, 1), (3, 0), (3, 1)},
    ("a, am, -, m", ALL): {(0, 0), (1, 0), (1, 1), (3, 1)},
    ("a,-,m", (1, 2, 3)): {(1, 0), (3, 1)},
}


def slice_of_rank(linear, x, rank, degree):
    columns = slice(rank * x.shape[-1] // degree, (rank + 1) * x.shape[-1] // degree)
    return x[..., columns] @ linear.weight[:, columns].T


def projections(mlp):
    return [module for module in mlp.modules() if isinstance(module, torch.nn.Linear)]


@torch.no_grad()
def simulate(model, ids, kept, degree, converted):
    """Ladder §5, rank by rank: the outputs before ``o_proj`` and ``down_proj`` are cut into the ranks' columns."""
    embeds, _, kwargs, _ = literal.layer_inputs(model, ids)
    ranks, streams = [embeds] * degree, [embeds]
    for k, layer in enumerate(literal.decoder_of(model).layers):
        before_attn, after_attn, before_mlp, after_mlp = literal.around(model, layer)
        subblocks = (
            (
                lambda x, layer=layer, k=k, norm=before_attn: layer.self_attn(hidden_states=norm(x), **kwargs[k])[0],
                layer.self_attn.o_proj,
                after_attn,
            ),
            (lambda x, layer=layer, norm=before_mlp: layer.mlp(norm(x)), projections(layer.mlp)[-1], after_mlp),
        )
        for i, (run, projection, after) in enumerate(subblocks):
            partials = []
            for rank in range(degree):
                seen = []
                handle = projection.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
                run(ranks[rank])
                handle.remove()
                partials.append(after(slice_of_rank(projection, seen[0], rank, degree)))
            if k not in converted or (k, i) in kept:
                total = sum(partials) + sum(ranks) / degree
                ranks = [total] * degree
            else:
                ranks = [x + p for x, p in zip(ranks, partials, strict=True)]
        streams.append(sum(ranks) / degree)
    return [*streams, literal.logits_of(model, streams[-1])]


def last_of_every(group, converted):
    """The last of every ``group`` reductions of an unbroken run of layers, and the last of the run."""
    kept, pending = set(), 0
    for k in sorted(converted):
        for i in (0, 1):
            pending += 1
            if pending == group or (i == 1 and k + 1 not in converted):
                kept.add((k, i))
                pending = 0
    return kept


def compare(arch, wiring, kept):
    model, ids = tiny.model(arch, num_key_value_heads=4), tiny.tokens()
    *streams, logits = simulate(model, ids, kept, wiring.tp_degree, set(wiring.layers))
    wire(model, wiring)
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-5)
    for mine, true in zip(out.hidden_states[:-1], streams[:-1], strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-5)


# Which reductions are kept depends neither on the family nor on the number of ranks.
@pytest.mark.parametrize(
    ("arch", "layers"),
    [*((arch, layers) for arch in tiny.DESYNC for layers in (ALL, (1, 3))), ("llama", (0, 1, 2)), ("llama", (1, 2, 3))],
)
@pytest.mark.parametrize(
    ("name", "group", "degree"),
    [
        ("desync-2x", 2, 2),
        ("desync-4x", 4, 4),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("desync-2x", 2, 4), ("desync-4x", 4, 2))),
    ],
)
def test_desync_is_the_simulation(arch, name, group, degree, layers):
    compare(arch, Wiring(name, layers, tp_degree=degree), last_of_every(group, set(layers)))


@pytest.mark.parametrize(("reduce", "layers"), PATTERNS)
def test_a_pattern_is_the_simulation(reduce, layers):
    compare("llama", Wiring("desync", layers, tp_degree=2, reduce=reduce), PATTERNS[reduce, layers])


@pytest.mark.parametrize(("reduce", "layers"), PATTERNS)
def test_kept_reductions(reduce, layers):
    keeps = kept_reductions(layers, reduce)
    assert tuple(keeps) == layers
    assert {(k, i) for k, both in keeps.items() for i in (0, 1) if both[i]} == PATTERNS[reduce, layers]


@pytest.mark.parametrize("reduce", ["", "1x", "0x", "02x", "x", "every", "a,,m", "ma", "a;m", "am,m,m,m,m"])
def test_a_pattern_that_is_none_is_refused(reduce):
    with pytest.raises(ValueError, match="reduce"):
        Wiring("desync", ALL, tp_degree=2, reduce=reduce)


def test_blocks_of_desync():
    block = Wiring("desync", ALL, tp_degree=2, reduce="-,m").to_block()
    assert block["version"] == 1 and block["reduce"] == "-,m"
    assert Wiring.from_block(block) == Wiring("desync", ALL, tp_degree=2, reduce="-,m")
    # As every conversion before ``desync`` wrote it: without the key.
    former = {"version": 1, "wiring": "desync-4x", "variant": "full", "layers": [0, 1], "border": "full"}
    former |= {"tp_degree": 4, "distance": 1, "base_model": None, "base_revision": None, "base_sha256": None}
    assert Wiring.from_block(former) == Wiring("desync-4x", (0, 1), tp_degree=4)
    assert Wiring("desync-4x", (0, 1), tp_degree=4).to_block() == former
    for change in ({"reduce": "4x"}, {"wiring": "desync"}, {"wiring": "desync", "reduce": 4}):
        with pytest.raises(ValueError, match="reduce"):
            Wiring.from_block({**former, **change})


def test_a_directory_whose_degree_exceeds_its_heads_loads(tmp_path):
    """Conversions of this kind are refused today; one that was written before loads as it did."""
    twin = tiny.model("llama")
    config = build.converted_config(twin.config, Wiring("desync-2x", ALL, tp_degree=4).to_block())
    model = build.model_classes("llama")["AutoModelForCausalLM"](config).eval()
    model.load_state_dict(twin.state_dict())
    model.save_pretrained(tmp_path)
    ids = tiny.tokens()
    assert torch.equal(build.load_model(tmp_path)(ids).logits, model(ids).logits)


@pytest.mark.parametrize("arch", tiny.DESYNC)
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
    read = [*literal.decoder_of(model).parameters(), *model.lm_head.parameters()]
    assert all(p.grad is not None for p in read)
    assert torch.equal(before, wire(model, unwired())(ids).logits)


def test_desync_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="olmo2 cannot have the wiring desync-2x: it norms whole outputs"):
        wire(tiny.model("olmo2"), Wiring("desync-2x", ALL, tp_degree=2))
    with pytest.raises(ValueError, match="desync has no whole outputs"):
        desync_layers([], ARCHS["olmo2"].blocks, {}, 2)
    with pytest.raises(ConfigError, match="dense"):
        wire(tiny.model("qwen3_moe"), Wiring("desync-2x", ALL, tp_degree=2))
    with pytest.raises(ConfigError, match="tp_degree 4 does not divide the 2 key-value heads"):
        wire(tiny.model("llama"), Wiring("desync-2x", ALL, tp_degree=4))
    with pytest.raises(ConfigError, match="tp_degree 3 does not divide"):
        wire(tiny.model("llama"), Wiring("desync-2x", ALL, tp_degree=3))
    with pytest.raises(ConfigError, match="bias"):
        wire(tiny.model("llama", mlp_bias=True), Wiring("desync-2x", ALL, tp_degree=2))
    with pytest.raises(ValueError, match="farskip has no tp_degree: only desync has one"):
        Wiring("farskip", ALL, tp_degree=2)
    with pytest.raises(ValueError, match="desync-2x needs a tp_degree of 2 or more"):
        Wiring("desync-2x", ALL)
    with pytest.raises(ValueError, match="reduce"):
        Wiring("farskip", ALL, reduce="2x")
