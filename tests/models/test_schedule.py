"""The schedule of reductions: DESIGN's cases spelt out, and every wiring against an evaluation by set difference."""

from itertools import combinations, pairwise, product

import pytest
import tiny

from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers
from fcsd.models.schedule import (
    MLP_PARTS,
    Output,
    Read,
    Running,
    Step,
    kind_of,
    layer_plans,
    reads_of,
    reductions,
    run_step,
)
from fcsd.models.wiring import Blocks, Wiring, hf_parts

ALL = (0, 1, 2)
DENSE, MOE, SHARED = ["dense"] * 3, ["moe"] * 3, ["moe-shared"] * 3
LETTER = {"attn": "a", "shared": "s", "routed": "r"}
NORMED = Blocks(attn_norms=("before", "after"), mlp_norms=("before", "after"))


def name(output):
    return f"{LETTER[output.part]}{output.layer}"


def shown(reduction):
    """``a0+s0 -> attn1 under r0``: the sum, the read that awaits it, what is computed meanwhile."""
    read = "norm" if reduction.awaited_by.by == "norm" else f"{reduction.awaited_by.by}{reduction.awaited_by.layer}"
    cover = " ".join(map(name, reduction.covered_by)) or "nothing"
    return f"{'+'.join(map(name, reduction.sums))} -> {read} under {cover}"


# Three layers: what starts in layer 0, in layer 1 and in layer 2.
CASES = [
    # Standard: two blocking reductions.
    (Wiring("standard", ()), DENSE, ["a0 -> mlp0 under nothing", "s0 -> attn1 under nothing"], 3),
    (Wiring("standard", ALL), SHARED, ["a0 -> mlp0 under nothing", "s0+r0 -> attn1 under nothing"], 3),
    (Wiring("standard", ALL), MOE, ["a0 -> mlp0 under nothing", "r0 -> attn1 under nothing"], 3),
    # Ladder: the attention's under the MLP, the MLP's under the next attention.
    (Wiring("ladder", ALL), DENSE, ["a0 -> attn1 under s0", "s0 -> mlp1 under a1"], 2),
    (Wiring("ladder", ALL), SHARED, ["a0 -> attn1 under s0 r0", "s0+r0 -> mlp1 under a1"], 2),
    (Wiring("ladder", ALL), MOE, ["a0 -> attn1 under r0", "r0 -> mlp1 under a1"], 2),
    # FarSkip: attention and shared experts in one under the routed experts, those under the next attention.
    (Wiring("farskip", ALL), SHARED, ["a0+s0 -> attn1 under r0", "r0 -> mlp1 under a1"], 2),
    (Wiring("farskip", ALL), MOE, ["a0 -> attn1 under r0", "r0 -> mlp1 under a1"], 2),
    # A converted dense layer under FarSkip: one exposed.
    (Wiring("farskip", ALL), DENSE, ["a0+s0 -> attn1 under nothing"], 2),
    # Parallel: one; mlp-only is the same function.
    (Wiring("parallel", ALL), DENSE, ["a0+s0 -> attn1 under nothing"], 2),
    (Wiring("parallel", ALL), SHARED, ["a0+s0+r0 -> attn1 under nothing"], 2),
    (Wiring("farskip", ALL, variant="mlp-only"), SHARED, ["a0+s0+r0 -> attn1 under nothing"], 2),
    (Wiring("ladder", ALL, variant="mlp-only"), DENSE, ["a0+s0 -> attn1 under nothing"], 2),
    # attn-only: the attention's blocks.
    (
        Wiring("farskip", ALL, variant="attn-only"),
        SHARED,
        ["a0 -> mlp0 under nothing", "s0 -> attn1 under r0", "r0 -> mlp1 under a1"],
        2,
    ),
    (Wiring("ladder", ALL, variant="attn-only"), DENSE, ["a0 -> mlp0 under nothing", "s0 -> mlp1 under a1"], 2),
    # A distance of two: each part may travel under one sub-block more.
    (Wiring("ladder", ALL, distance=2), DENSE, ["a0 -> mlp1 under s0 a1", "s0 -> attn2 under a1 s1"], 1),
    (
        Wiring("farskip", ALL, distance=2),
        SHARED,
        ["a0 -> mlp1 under s0 r0 a1", "s0 -> attn1 under r0", "r0 -> attn2 under a1 s1 r1"],
        1,
    ),
]


@pytest.mark.parametrize(("wiring", "kinds", "first", "alike"), CASES)
def test_the_cases_of_the_rule(wiring, kinds, first, alike):
    """``first`` is layer 0's; the first ``alike`` layers are alike, but that the final norm reads after the last."""
    found = [[shown(reduction) for reduction in layer] for layer in reductions(wiring, kinds)]
    for i in range(alike):
        moved = [moved_by(line, i) for line in first]
        assert found[i] == [line.replace("attn3", "norm").replace("mlp3", "norm") for line in moved]


@pytest.mark.parametrize(
    ("wiring", "kinds", "first"),
    [
        # The sum of shared and routed experts is normed, so neither is settled. The attention's is normed by itself.
        (Wiring("standard", ALL), SHARED, ["a0 -> mlp0 under nothing", "s0+r0 -> attn1 under nothing"]),
        (Wiring("farskip", ALL), SHARED, ["a0 -> attn1 under s0 r0", "s0+r0 -> mlp1 under a1"]),
        (Wiring("farskip", ALL), MOE, ["a0 -> attn1 under r0", "r0 -> mlp1 under a1"]),
        (Wiring("farskip", ALL), DENSE, ["a0 -> attn1 under s0", "s0 -> attn1 under nothing"]),
        (Wiring("ladder", ALL), SHARED, ["a0 -> attn1 under s0 r0", "s0+r0 -> mlp1 under a1"]),
        (Wiring("parallel", ALL), DENSE, ["a0 -> attn1 under s0", "s0 -> attn1 under nothing"]),
        (Wiring("parallel", ALL), SHARED, ["a0 -> attn1 under s0 r0", "s0+r0 -> attn1 under nothing"]),
        (
            Wiring("farskip", ALL, variant="attn-only"),
            SHARED,
            ["a0 -> mlp0 under nothing", "s0+r0 -> mlp1 under a1"],
        ),
    ],
)
def test_outputs_that_are_normed_on_arrival(wiring, kinds, first):
    found = [[shown(reduction) for reduction in layer] for layer in reductions(wiring, kinds, NORMED)]
    assert found[0] == first
    assert found[1] == [moved_by(line, 1).replace("mlp3", "norm").replace("attn3", "norm") for line in first]


def test_desync_has_no_whole_outputs_that_could_be_normed():
    with pytest.raises(ValueError, match="desync-2x has no whole outputs"):
        reductions(Wiring("desync-2x", ALL, tp_degree=2), DENSE, NORMED)


def moved_by(line, layers):
    return "".join(str(int(c) + layers) if c.isdigit() else c for c in line)


@pytest.mark.parametrize("kinds", [DENSE, MOE, SHARED])
@pytest.mark.parametrize("wiring", ["farskip", "ladder", "parallel"])
def test_the_final_norm_awaits_all_of_the_last_layer_at_once(wiring, kinds):
    (last,) = reductions(Wiring(wiring, ALL), kinds)[-1]
    assert last.sums == tuple(Output(2, part) for part in ("attn", *MLP_PARTS[kinds[2]]))
    assert last.awaited_by == Read(3, "norm") and last.covered_by == ()


@pytest.mark.parametrize(
    ("wiring", "kinds", "expected"),
    [
        # The layer before the first converted one: AMD's training code and the paper, then AMD's transformers file.
        (Wiring("farskip", (1, 2)), SHARED, ["a0 -> mlp0 under nothing", "s0+r0 -> attn1 under nothing"]),
        (
            Wiring("farskip", (1, 2), border="partial"),
            SHARED,
            ["a0 -> mlp0 under nothing", "s0 -> attn1 under r0", "r0 -> mlp1 under a1"],
        ),
        (Wiring("farskip", (1, 2), border="partial"), DENSE, ["a0 -> mlp0 under nothing", "s0 -> attn1 under nothing"]),
        (Wiring("ladder", (1, 2)), SHARED, ["a0 -> mlp0 under nothing", "s0+r0 -> mlp1 under a1"]),
        (Wiring("ladder", (1, 2), border="full"), SHARED, ["a0 -> mlp0 under nothing", "s0+r0 -> attn1 under nothing"]),
        # A converted layer before one that is not: its attention reads everything.
        (Wiring("farskip", (0, 2)), SHARED, ["a0+s0+r0 -> attn1 under nothing"]),
        (Wiring("ladder", (0,)), DENSE, ["a0+s0 -> attn1 under nothing"]),
        # DeepSeek's dense first layer before MoE layers.
        (Wiring("farskip", ALL), ["dense", "moe-shared", "moe-shared"], ["a0+s0 -> attn1 under nothing"]),
    ],
)
def test_borders_and_partial_conversions(wiring, kinds, expected):
    assert [shown(reduction) for reduction in reductions(wiring, kinds)[0]] == expected


@pytest.mark.parametrize(
    ("wiring", "expected"),
    [
        (Wiring("desync-2x", ALL, tp_degree=2), [["a0+s0 -> attn1"], ["a1+s1 -> attn2"], ["a2+s2 -> norm"]]),
        (Wiring("desync-4x", ALL, tp_degree=2), [[], ["a0+s0+a1+s1 -> attn2"], ["a2+s2 -> norm"]]),
        (Wiring("desync", ALL, tp_degree=2, reduce="last"), [[], [], ["a0+s0+a1+s1+a2+s2 -> norm"]]),
        (
            Wiring("desync", ALL, tp_degree=2, reduce="a"),
            [["a0 -> mlp0"], ["s0+a1 -> mlp1"], ["s1+a2 -> mlp2", "s2 -> norm"]],
        ),
        (Wiring("desync-4x", (1, 2), tp_degree=2), [["a0 -> mlp0", "s0 -> attn1"], [], ["a1+s1+a2+s2 -> norm"]]),
    ],
)
def test_desync_blocks_where_a_reduction_is_kept(wiring, expected):
    found = [[shown(reduction) for reduction in layer] for layer in reductions(wiring, DENSE)]
    assert found == [[f"{line} under nothing" for line in layer] for layer in expected]


def wirings(depth):
    """Every wiring, variant, border and distance over every choice of layers; Desync apart."""
    choices = [layers for n in range(depth + 1) for layers in combinations(range(depth), n)]
    for layers in choices:
        yield from (Wiring(kind, layers) for kind in ("standard", "parallel"))
        for kind, variant, border, distance in product(
            ("farskip", "ladder"), ("full", "attn-only", "mlp-only"), ("full", "partial"), (1, 2, 3)
        ):
            yield Wiring(kind, layers, variant=variant, border=border, distance=distance)


def table(wiring, kinds, normed):
    """What each read includes, by taking away: the full stream without what the outputs before it have in flight.

    An output that an earlier read includes is not in flight any more. Where the sum of shared and routed experts is
    normed, the shared experts are in flight with the routed ones.
    """
    reads, landed, in_flight, everything = {}, set(), [], set()
    for k, kind in enumerate(kinds):
        for by, depth in zip(("attn", "mlp"), wiring.reads, strict=True):
            at_border = by == "attn" and k - 1 not in wiring.layers and wiring.border == "full"
            count = 0 if k not in wiring.layers or at_border else depth
            missing = set().union(*in_flight[::-1][:count])
            reads[Read(k, by)] = everything - (missing - landed)
            landed |= reads[Read(k, by)]
            parts = ("attn",) if by == "attn" else MLP_PARTS[kind]
            outputs = {Output(k, part) for part in parts}
            settled = {output for output in outputs if wiring.name == "farskip" and output.part == "shared"}
            settled = set() if normed and len(outputs) > 1 else settled
            everything = everything | outputs
            in_flight.append(outputs - settled)
    reads[Read(len(kinds), "norm")] = everything
    return reads


@pytest.mark.parametrize("blocks", [Blocks(), NORMED], ids=["plain", "normed"])
@pytest.mark.parametrize("kinds", list(product(MLP_PARTS, repeat=3)), ids="-".join)
def test_every_part_is_awaited_by_the_first_read_that_includes_it(kinds, blocks):
    for wiring in wirings(len(kinds)):
        reads = table(wiring, kinds, blocks is NORMED)
        assert reads_of(wiring, kinds, blocks) == reads, wiring
        # What a read includes, all later reads include: a tensor-parallel model keeps one running sum.
        sets = list(reads.values())
        assert all(earlier <= later for earlier, later in pairwise(sets)), wiring
        computed = [Output(k, part) for k, kind in enumerate(kinds) for part in ("attn", *MLP_PARTS[kind])]
        found = reductions(wiring, kinds, blocks)
        assert sorted(o for layer in found for r in layer for o in r.sums) == sorted(computed), wiring
        for k, layer in enumerate(found):
            # What one read needs is one reduction; what is normed apart is not summed before.
            sums = {(r.awaited_by, blocks is NORMED and r.sums[0].part == "attn") for r in layer}
            assert len(sums) == len(layer), wiring
            assert blocks is not NORMED or all(len({o.part == "attn" for o in r.sums}) == 1 for r in layer), wiring
            assert [r.starts_after for r in layer] == sorted((r.starts_after for r in layer), key=computed.index)
            for reduction in layer:
                assert {o.layer for o in reduction.sums} == {k}
                assert reduction.starts_after == max(reduction.sums, key=computed.index)
                for output in reduction.sums:
                    assert next(read for read, seen in reads.items() if output in seen) == reduction.awaited_by, wiring


def run_on_numbers(wiring, kinds, blocks, values):
    """What each read of a model includes whose parts add numbers to a stream of 0, on one rank that runs its plans."""
    found, running, in_flight = {}, Running(0, None), []
    plans = layer_plans(wiring, kinds, range(len(kinds)), every=True, blocks=blocks)
    for k, plan in plans.items():
        outputs = [Output(k, part) for part in ("attn", *MLP_PARTS[kinds[k]])]
        for number, (step, output) in enumerate(zip(plan.steps, outputs, strict=True)):
            if number < 2:
                places = (plan.attn, plan.mlp)[number]
                running = running._replace(landed=running.landed + sum(in_flight[n] for n in places))
                in_flight = [value for n, value in enumerate(in_flight) if n not in places]
                found[Read(k, ("attn", "mlp")[number])] = running.landed
            running, sent = run_step(step, values[output], running, None, 1)
            in_flight += [] if sent is None else [sent.out]
    assert running.collected is None
    found[Read(len(kinds), "norm")] = running.landed + sum(in_flight)
    return found


@pytest.mark.parametrize("blocks", [Blocks(), NORMED], ids=["plain", "normed"])
@pytest.mark.parametrize("kinds", list(product(MLP_PARTS, repeat=3)), ids="-".join)
def test_plans_that_run_on_numbers_read_what_the_table_says(kinds, blocks):
    computed = [Output(k, part) for k, kind in enumerate(kinds) for part in ("attn", *MLP_PARTS[kind])]
    values = {output: 2**n for n, output in enumerate(computed)}  # no two sets have the same sum
    for wiring in wirings(len(kinds)):
        expected = {read: sum(map(values.get, seen)) for read, seen in reads_of(wiring, kinds, blocks).items()}
        assert run_on_numbers(wiring, kinds, blocks, values) == expected, wiring


@pytest.mark.parametrize(
    ("step", "before", "after", "sent"),
    [
        (Step("attn", "collect", joins=False, crosses=False), Running(1.0, None), Running(1.0, 8.0), None),
        (
            Step("shared", "start", joins=True, crosses=False),
            Running(1.0, 2.0),
            Running(1.0, None),
            (10.0, "start", True),
        ),
        (Step("mlp", "now", joins=False, crosses=False), Running(1.0, 2.0), Running(1.0, 2.0), (8.0, "now", True)),
        (
            Step("mlp", "local", joins=False, crosses=False),
            Running(1.0, None),
            Running(1.0, None),
            (8.0, "local", True),
        ),
        # Each rank adds its output, which the layer triples, and its part of the streams that the ranks had.
        (
            Step("mlp", "resync", joins=False, crosses=False),
            Running(6.0, None),
            Running(None, None),
            (27.0, "now", False),
        ),
    ],
    ids=lambda value: value.then if isinstance(value, Step) else "",
)
def test_what_becomes_of_an_output(step, before, after, sent):
    assert run_step(step, 8.0, before, lambda total: 3 * total, 2) == (after, sent)


@pytest.mark.parametrize("wiring", [Wiring("ladder", (3,)), Wiring("desync-2x", (3,), tp_degree=2)])
def test_a_layer_that_does_not_exist_is_refused(wiring):
    with pytest.raises(ValueError, match="layer 3 does not exist"):
        reductions(wiring, DENSE)


def test_desync_has_no_table_of_reads():
    with pytest.raises(ValueError, match="rank-local"):
        reads_of(Wiring("desync-2x", ALL, tp_degree=2), DENSE)


@pytest.mark.parametrize(
    ("arch", "kinds"),
    [
        ("llama", ["dense"] * 4),
        ("mixtral", ["moe"] * 4),
        ("qwen3_moe", ["moe", "moe", "dense", "moe"]),
        ("qwen2_moe", ["moe-shared"] * 4),
        ("deepseek_v2", ["dense", *["moe-shared"] * 3]),
        ("llama4_text", ["dense", "moe-shared"] * 2),
    ],
)
def test_kinds_of_real_layers(arch, kinds):
    blocks = ARCHS[arch].blocks
    assert [kind_of(hf_parts(blocks, layer)) for layer in decoder_layers(tiny.model(arch))] == kinds
