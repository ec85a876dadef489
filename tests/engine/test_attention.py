"""Attention of a decoding step, without repeated keys or by the kernel that divides them, is that of transformers."""

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from kernel_device import DEVICE
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fcsd.engine import attention
from fcsd.engine.decode import Stepper
from fcsd.engine.fused import fuse
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.slots import Slots
from fcsd.models.build import wire
from fcsd.models.wiring import Wiring
from fcsd.parallel.all_reduce.ways import Way, Ways
from fcsd.parallel.tensor.tp_plan import TensorGroup

WINDOW: dict[str, Any] = {"sliding_window": 8}
ALL = (0, 1)


@pytest.mark.parametrize(("shared", "queries", "masked"), [(4, 1, True), (4, 1, False), (1, 1, True), (4, 3, True)])
def test_attention_is_that_of_repeated_keys(shared: int, queries: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 2 * shared, queries, 8, generator=generator)
    key, value = (torch.randn(3, 2, 16, 8, generator=generator) for _ in range(2))
    lengths = torch.tensor([16, 5, 1])[:, None, None, None]
    mask = torch.where(torch.arange(16) < lengths, 0.0, torch.finfo(torch.float32).min).expand(3, 1, queries, 16)
    module: Any = SimpleNamespace(num_key_value_groups=shared, is_causal=True)
    given = mask if masked else None
    found, _ = attention.attend(module, query, key, value, given, scaling=0.3)

    module.num_key_value_groups = 1
    whole = repeat_kv(key, shared), repeat_kv(value, shared)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *whole, given, scaling=0.3)
    torch.testing.assert_close(found, expected)


def test_a_step_uses_it_and_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def noted(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        shapes.append(tuple(query.shape))
        return stock(query, *args, **options)

    stock = attention.scaled_dot_product_attention
    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    model: Any = tiny.model("llama")
    assert model.config._attn_implementation == "sdpa"
    heads, shared = (
        model.config.num_key_value_heads,
        model.config.num_attention_heads // model.config.num_key_value_heads,
    )
    assert shared > 1
    with torch.no_grad():
        stepper = Stepper(model, Slots(2, 64, model.device), graphs=False)
        stepper.prefill([[5, 6, 7], [8, 9]], [0, 1])
        assert not shapes  # a prefill has many queries
        stepper.decode(1, [0, 1])
    assert {shape[:3] for shape in shapes} == {(2, heads, shared)}
    assert model.config._attn_implementation == "sdpa"


def test_a_stepper_needs_no_gradients() -> None:
    """Kernels without a backward pass, such as that of the experts of few tokens, are not used where one may follow."""
    model: Any = tiny.model("llama")
    stepper = Stepper(model, Slots(2, 64, model.device), graphs=False)
    modes: list[bool] = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    stepper.prefill([[5, 6, 7], [8, 9]], [0, 1])
    stepper.decode(1, [0, 1])
    assert torch.is_grad_enabled() and modes == [False, False]


@torch.no_grad()
def answers(
    model: Any, attention: str, slots: int = 3, lengths: tuple[int, ...] = (20, 7, 13), **options: Any
) -> tuple[list[int], list[list[int]], Any]:
    """The first tokens of prompts of these lengths, the tokens after them, and the logits of one more step."""
    stepper = Stepper(model, Slots(slots, 64, model.device), options.pop("graphs", False), attention=attention)
    ids = tiny.tokens(batch=3, length=20).tolist()
    prompts = [prompt[:length] for prompt, length in zip(ids, lengths, strict=True)]
    first = stepper.prefill(prompts[:slots], range(slots))
    return first, stepper.decode(2, list(range(slots))), stepper._step()


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("llama", {}),
        ("mixtral", WINDOW),  # a window in all layers
        ("qwen3", WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),  # a window in one of two layers
        ("deepseek_v2", {"q_lora_rank": None}),  # latents, and queries of full rank
        ("deepseek_v3", {}),  # values have another size than keys
        ("llama4_text", {}),  # chunks
    ],
)
def test_split_keys_give_the_same_tokens(arch: str, changes: dict[str, Any]) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1, num_hidden_layers=2, **changes).to(DEVICE)
    (first, tokens, logits), (again, found, split) = (answers(model, kind) for kind in ("grouped", "split"))
    assert (again, found) == (first, tokens)
    torch.testing.assert_close(split, logits, rtol=0, atol=2e-5)
    assert not torch.equal(split, logits), "another kernel adds up in another order"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("slots", [1, 2])
def test_split_keys_under_desync(slots: int) -> None:
    model: Any = tiny.model("llama", initializer_range=0.1, num_hidden_layers=2).to(DEVICE)
    wire(model, Wiring("desync-2x", ALL, tp_degree=2))
    (first, tokens, logits), (again, found, split) = (answers(model, kind, slots) for kind in ("grouped", "split"))
    assert (again, found) == (first, tokens)
    torch.testing.assert_close(split, logits, rtol=0, atol=2e-5)


@torch.no_grad()
def test_split_steps_leave_latents_as_they_are() -> None:
    model: Any = tiny.model("deepseek_v2", initializer_range=0.1, num_hidden_layers=2).to(DEVICE)
    fuse(model, kernels=True)
    wire_tensor_parallel(model, Wiring("standard", ()), TensorGroup(None, 1, 0), Ways(Way("none")))
    classes = [type(module) for module in model.modules()]
    short = (5, 2, 3)  # the interpreter runs every kernel of the prefill for every token
    expected = answers(model, "grouped", lengths=short)
    expanded: list[int] = []

    def noted(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        expanded.append(inputs[0].shape[2])

    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.register_forward_pre_hook(noted)
    first, tokens, logits = answers(model, "split", lengths=short)
    assert (first, tokens) == expected[:2]
    torch.testing.assert_close(logits, expected[2], rtol=0, atol=2e-5)
    assert expanded == [5, 5], "a prefill expands the latents of its own tokens, and a step none"
    assert [type(module) for module in model.modules()] == classes


def test_a_step_attends_by_the_faster_kernel_if_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny.model("llama")
    assert attention.usual_attention(model) == ("grouped" if model.device.type == "cpu" else "split")
    monkeypatch.setattr(attention, "why_not_split", lambda model: None)
    assert attention.usual_attention(model) == "split"
    assert Stepper(model, Slots(1, 64, model.device), graphs=False)._attention == "split"


def test_ranges_end_where_a_step_stops_reading() -> None:
    slots = Slots(3, 64, torch.device("cpu"))
    slots.width = 32
    slots.positions.copy_(torch.tensor([0, 20, 60]))  # the last answer has ended
    assert slots.ranges().flatten(1).tolist() == [[0, 0], [0, 20], [0, 31]]
    assert slots.ranges(8).flatten(1).tolist() == [[0, 0], [13, 20], [24, 31]]


def test_other_attention_is_refused() -> None:
    assert attention.why_not_split(tiny.model("gpt_oss")) == "its attention is eager"
    assert attention.why_not_split(tiny.model("llama")) == "it is not on a GPU"


@pytest.mark.gpu
@pytest.mark.parametrize(("arch", "changes"), [("mixtral", WINDOW), ("deepseek_v2", {})])
def test_a_gpu_captures_steps_with_split_keys(arch: str, changes: dict[str, Any]) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1, num_hidden_layers=2, **changes).cuda()
    wiring, alone = Wiring("ladder", ALL), TensorGroup(None, 1, 0)
    assert attention.why_not_split(model) is None
    wire_tensor_parallel(model, wiring, alone, Ways(Way("none")))
    first, tokens, _ = answers(model, "grouped")
    fuse(model, kernels=True)
    wire_tensor_parallel(model, wiring, alone, Ways(Way("none")))
    assert answers(model, "split", graphs=True)[:2] == (first, tokens)
