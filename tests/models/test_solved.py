"""A solved start: its maps are ridge solutions, its folds are exact, and conversions come nearer to their originals."""

from typing import Any

import pytest
import tiny
import torch
from rewired import rewired
from torch import Tensor

from fcsd.models.build import decoder_of
from fcsd.models.solved import RIDGE, Batch, _fold, reads_of, ridge_map, solve_start
from fcsd.models.wiring import Wiring

ALL = (0, 1, 2, 3)


def forward(model, batch: Batch) -> None:
    decoder_of(model)(batch["ids"], use_cache=False)


def text(seed: int) -> list[tuple[Batch, Tensor]]:
    ids = tiny.tokens(batch=32, length=64, seed=seed)
    counts = torch.ones_like(ids, dtype=torch.bool)
    counts[:, -1] = False
    return [({"ids": rows}, counted) for rows, counted in zip(ids.split(16), counts.split(16), strict=True)]


@torch.no_grad()
def divergence(original, model) -> float:
    """KL(original ‖ model) in nats per token, on other text than ``text`` gives."""
    ids = tiny.tokens(batch=4, length=64, seed=99)
    left, right = (m(ids, use_cache=False).logits.log_softmax(-1) for m in (original, model))
    return (left.exp() * (left - right)).sum(-1).mean().item()


@pytest.mark.parametrize("arch", ["llama", "deepseek_v2", "qwen3_moe"])
@pytest.mark.parametrize("wiring", [Wiring("farskip", ALL), Wiring("ladder", (2, 3))], ids=lambda w: w.name)
def test_it_brings_a_conversion_nearer_to_its_original(arch: str, wiring: Wiring) -> None:
    found = {}
    for how in ("none", "norms", "linear"):
        original, model = rewired(arch, wiring)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if how != "none":
            solve_start(model, original, text(5), how, forward)
        found[how] = divergence(original, model)
        after = model.state_dict()
        assert {name: tensor.shape for name, tensor in after.items()} == {n: t.shape for n, t in before.items()}
        changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
        if how == "norms":
            assert changed and all("norm" in name for name in changed)
        if how == "linear":
            assert {"norm" in name for name in changed} == {True, False}
            assert not any(word in name for name in changed for word in ("embed", "lm_head", "o_proj", "down_proj"))
    assert max(found["norms"], found["linear"]) < found["none"]


@pytest.mark.parametrize("how", ["norms", "linear"])
def test_weights_in_bf16_are_corrected_and_few_tokens_change_them_little(how: str) -> None:
    """Fewer tokens than hidden units leave directions without data, in which the map is the identity."""
    found = []
    for counted in (0, 8, None):  # the number of tokens that count; None counts all
        pair: Any = rewired("deepseek_v2", Wiring("farskip", ALL))
        original, model = (each.to(torch.bfloat16) for each in pair)
        batches = text(5) if counted is None else text(5)[:1]
        if counted is not None:
            batches[0][1].view(-1)[counted:] = False
        solve_start(model, original, batches, how, forward)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
        found.append(divergence(original.float(), model.float()))
    none, few, many = found
    assert many < none and few < 2 * none


@pytest.mark.parametrize("arch", list(tiny.CONFIGS))
def test_a_folded_matrix_acts_on_the_normalised_input(arch: str) -> None:
    folded, hooked = tiny.model(arch), tiny.model(arch)
    for number, (read, other) in enumerate(zip(reads_of(folded), reads_of(hooked), strict=True)):
        if not read.readers:
            continue
        width = len(read.norm.weight)
        change = torch.eye(width) + 0.1 * torch.randn(width, width, generator=torch.Generator().manual_seed(number))
        with torch.no_grad():
            _fold(read, change.double())
        other.norm.register_forward_hook(lambda _m, _in, out, change=change: out @ change)
    with torch.no_grad():
        left, right = (model(tiny.tokens(), use_cache=False).logits for model in (folded, hooked))
        plain = tiny.model(arch)(tiny.tokens(), use_cache=False).logits
    assert (left - right).abs().max() < 1e-4 * right.abs().max() < (left - plain).abs().max()


def test_the_map_is_the_ridge_solution() -> None:
    draw = torch.Generator().manual_seed(0)
    given, wanted = (torch.randn(50, 6, dtype=torch.float64, generator=draw) for _ in range(2))
    squares = given.T @ given
    weight = (RIDGE * squares.diagonal().mean()).sqrt()
    rows = torch.cat([given, weight * torch.eye(6, dtype=torch.float64)])  # the penalty as rows of data
    expected = torch.linalg.lstsq(rows, torch.cat([wanted, weight * torch.eye(6, dtype=torch.float64)])).solution
    assert torch.allclose(ridge_map(squares, given.T @ wanted), expected)
    assert torch.allclose(ridge_map(squares, squares), torch.eye(6, dtype=torch.float64))


@pytest.mark.parametrize("how", ["norms", "linear"])
def test_what_reads_the_same_as_the_original_stays_bit_for_bit(how: str) -> None:
    original, model = rewired("deepseek_v2", Wiring("standard", ALL))
    solve_start(model, original, text(5), how, forward)
    assert all(torch.equal(tensor, original.state_dict()[name]) for name, tensor in model.state_dict().items())
    original, model = rewired("llama", Wiring("farskip", (2, 3)))
    solve_start(model, original, text(5), how, forward)
    for name, tensor in model.state_dict().items():
        first_reads = name.startswith(("model.layers.0.", "model.layers.1.")) or "layers.2.input_layernorm" in name
        if first_reads or "layers.2.self_attn" in name:
            assert torch.equal(tensor, original.state_dict()[name]), name


def test_processes_add_up_what_they_have_seen() -> None:
    batches, sums = text(5), []
    original, model = rewired("llama", Wiring("ladder", ALL))
    solve_start(model, original, batches, "linear", forward, lambda moments: sums.append(moments.clone()))
    original, half = rewired("llama", Wiring("ladder", ALL))
    solve_start(half, original, batches[:1], "linear", forward, lambda moments: moments.copy_(sums.pop(0)))
    assert not sums
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in half.state_dict().items())
