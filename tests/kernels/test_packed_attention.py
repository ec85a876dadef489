"""Packed attention equals attention with a mask, alone and in every decoder that takes it."""

import pytest
import tiny
import torch
from torch import Tensor

from fcsd.distill.teacher.documents import documents_of, stay_inside_documents
from fcsd.distill.teacher.targets import _document_masks
from fcsd.kernels.packed_attention import (
    attend,
    attend_masked,
    document_borders,
    packed_arguments,
    takes_borders,
    use_packed_attention,
)
from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers, decoder_of, wire
from fcsd.models.wiring import Wiring

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7]])


def test_borders_of_documents() -> None:
    assert document_borders(POSITIONS).tolist() == [0, 3, 5, 8, 16]
    assert document_borders(POSITIONS).dtype == torch.int32


def literal(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Document by document, token by token."""
    out = torch.zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype)
    for row in range(q.shape[0]):
        first = 0
        for token in range(q.shape[2]):
            first = token if positions[row, token] == 0 else first
            for head in range(q.shape[1]):
                shared = head // (q.shape[1] // k.shape[1])
                scores = q[row, head, token] @ k[row, shared, first : token + 1].T * q.shape[-1] ** -0.5
                out[row, token, head] = scores.softmax(-1) @ v[row, shared, first : token + 1]
    return out


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[1:].repeat(2, 1)], ids=["packed", "one document a row"])
def test_attention_stays_inside_documents(positions: Tensor) -> None:
    q, k, v = (torch.randn(2, h, 8, w, dtype=torch.float64) for h, w in ((4, 6), (2, 6), (2, 4)))
    borders = document_borders(positions)
    expected = literal(q, k, v, positions)
    torch.testing.assert_close(attend_masked(q, k, v, borders), expected)
    torch.testing.assert_close(attend(q, k, v, borders), expected)


WINDOWED = {"gpt_oss", "llama4_text", "llama4", "cwm", "exaone_moe", "mimo_v2_flash"}
WINDOWED |= {"deepseek_v32", "glm_moe_dsa"}  # they choose keys by a mask
WINDOWED |= {"olmo3", "exaone4", "gemma2", "gemma3_text", "gemma3", "gemma4_text", "gemma4", "afmoe", "laguna"}


@pytest.mark.parametrize("arch", sorted(tiny.CONFIGS))
def test_decoders_take_borders(arch: str) -> None:
    """Hidden states and gradients are those of position ids alone; a model with windows is left as it is."""
    model = tiny.model(arch)
    assert use_packed_attention(model) == takes_borders(model) == (arch not in WINDOWED)
    if arch in WINDOWED:
        return
    wire(model, Wiring("farskip", tuple(range(len(decoder_layers(model))))))
    decoder = model.base_model
    ids = torch.randint(0, model.config.get_text_config().vocab_size, POSITIONS.shape)
    found, expected = [], []
    borders, rows = document_borders(POSITIONS), {}
    if ARCHS[arch].blocks.linear is not None:  # which stays inside documents in a way of its own
        stay_inside_documents(decoder_layers(model))
        rows = {"documents": documents_of(borders, POSITIONS.numel())}
    masks = {} if ARCHS[arch].packs else {"attention_mask": _document_masks(decoder_of(model), ids, POSITIONS)}
    for results, arguments in ((expected, {**masks, **rows}), (found, {**packed_arguments(borders), **rows})):
        model.zero_grad()
        hidden = decoder(input_ids=ids, position_ids=POSITIONS, use_cache=False, **arguments).last_hidden_state
        hidden.square().sum().backward()
        results += [hidden, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("one_row", [False, True], ids=["two rows", "one row"])
def test_the_rows_of_all_simulated_ranks_have_borders(one_row: bool) -> None:
    model = tiny.model("llama").double()
    assert use_packed_attention(model)
    wire(model, Wiring("desync-2x", tuple(range(len(decoder_layers(model)))), tp_degree=2))
    positions = POSITIONS[:1] if one_row else POSITIONS
    ids = torch.randint(0, model.config.vocab_size, positions.shape)
    found = [
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False, **arguments)[0]
        for arguments in ({}, packed_arguments(document_borders(positions)))
    ]
    torch.testing.assert_close(*found)


def test_recomputed_layers_find_the_borders() -> None:
    model = tiny.model("llama").double().train()
    assert use_packed_attention(model)
    ids = torch.randint(0, model.config.vocab_size, POSITIONS.shape)
    gradients = []
    for recompute in (False, True):
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.zero_grad()
        arguments = packed_arguments(document_borders(POSITIONS))
        model.base_model(input_ids=ids, position_ids=POSITIONS, use_cache=False, **arguments)[0].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert torch.equal(*gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("heads, key_heads, width, value_width", [(16, 16, 192, 128), (8, 2, 128, 128), (4, 4, 64, 64)])
def test_the_kernel_equals_the_mask(heads: int, key_heads: int, width: int, value_width: int) -> None:
    """In bf16 the kernel's error against float64 is at most 1.5 times the masked attention's."""
    torch.manual_seed(0)
    lengths = [[300, 1, 211], [512]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    borders = document_borders(positions).cuda()
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    inputs = [torch.randn(2, h, 512, w, device="cuda", dtype=torch.bfloat16) for h, w in shapes]
    upstream = torch.randn(2, 512, heads, value_width, device="cuda", dtype=torch.bfloat16)
    errors = {}
    for name, function, dtype in (
        ("exact", attend_masked, torch.float64),
        ("masked", attend_masked, torch.bfloat16),
        ("packed", attend, torch.bfloat16),
    ):
        own = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*own, borders)
        results = [out, *torch.autograd.grad(out, own, upstream.to(dtype))]
        if name == "exact":
            exact = results
        else:
            errors[name] = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(results, exact, strict=True)]
    assert all(packed <= 1.5 * masked for packed, masked in zip(errors["packed"], errors["masked"], strict=True)), (
        errors
    )
