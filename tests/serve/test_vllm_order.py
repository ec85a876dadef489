"""Inductor keeps a start before its cover and a wait behind it; without the newest tensor it would not.

It adds no kernel to a converted layer: with sums at once this has those of the original.
"""

import re
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch._inductor.utils import run_and_get_code

from fcsd.models.arch import VllmNames
from fcsd.models.schedule import Step, layer_plans
from fcsd.models.wiring_block import Wiring
from fcsd.serve.vllm import reduction
from fcsd.serve.vllm.layer import Wired, take_apart
from fcsd.serve.vllm.reduction import Reducer, Sum


class Hasty(Reducer):
    """The negative control: nothing but the data orders starts and waits."""

    def wait(self, sum_: Sum, newest: Tensor) -> Tensor:
        return super().wait(sum_, sum_.total)

    def cover(self, x: Tensor, newest: Tensor, sums: tuple[Sum, ...]) -> None:
        pass


@pytest.fixture
def ranks(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks whose sums of shared experts are in flight."""
    in_flight = reduction.define_operators()
    stock = in_flight.start

    def start(x: Tensor, slot: int, *how: Any) -> Tensor:
        """The start of the sum of shared experts, which is in flight: what is awaited is this very tensor."""
        total = stock(x, slot, *how)
        in_flight.sums[slot] = reduction.Travelling(total.data_ptr(), lambda: None)
        return total

    monkeypatch.setattr(in_flight, "start", start)


class Row(nn.Module):
    """A part of a layer: a product of ``[tokens, 16]``."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Buffer(torch.randn(16, 16, generator=torch.Generator().manual_seed(seed)))
        self.reduce_results = True

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Attention(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.o_proj = Row(seed)

    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        return self.o_proj(x)


class Experts(Row):
    """The border of vLLM's ``MoERunner``; shared experts are computed inside an operator, and so are routed ones then.

    As vLLM does for few tokens, it computes the routed ones first, and the shared ones beside them.
    """

    _fused_output_is_reduced = False
    _forward_entry: Any = None

    def __init__(self, seed: int, shared: nn.Module) -> None:
        super().__init__(seed)
        self._shared_experts: Any = SimpleNamespace(_layer=shared)
        RUNNERS[seed] = self
        self.seed = seed

    def _select_forward(self) -> None:
        return None

    def _maybe_reduce_shared_expert_output(self, output: Tensor) -> Tensor:
        return output

    def forward(self, x: Tensor) -> Tensor:
        if self._shared_experts is None:
            return super().forward(x)
        shared, routed = torch.ops.double.moe(x, self.seed)
        shared = self._maybe_reduce_shared_expert_output(shared)
        return routed if shared is None else shared + routed


RUNNERS: dict[int, Experts] = {}


@torch.library.custom_op("double::moe", mutates_args=())
def moe(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """vLLM's operator: the outputs of shared and of routed experts."""
    routed = Row.forward(RUNNERS[seed], x)
    return RUNNERS[seed]._shared_experts._layer(x), routed


@moe.register_fake
def _(x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


class Moe(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.shared_experts = Row(seed)
        self.experts = Experts(seed + 1, self.shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x)


class Norm(nn.Module):
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        whole = x if residual is None else x + residual
        normed = nn.functional.rms_norm(whole, (16,))
        return normed if residual is None else (normed, whole)


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Attention(10 * index), Moe(10 * index + 1)


class BareLayer(Layer):
    """A layer that reads the stream as it is, and passes it on whole."""

    def forward(self, positions: Tensor, hidden: Tensor) -> Tensor:
        raise NotImplementedError("the plugin's stands in its place")


def order(reducer: Reducer, count: int, beside: bool = False, bare: bool = False) -> list[str]:
    """Starts, waits and products in the order of the code that Inductor generates for farskip layers."""
    layers = [(BareLayer if bare else Layer)(index) for index in range(count)]
    names, wiring, kinds = VllmNames(shared="shared_experts"), Wiring("farskip", tuple(range(count))), ["moe-shared"]
    if bare:
        names = replace(names, whole=True, attn_norms=(None, None), mlp_norms=(None, None))
    for i, plan in layer_plans(wiring, kinds * count, range(count)).items():
        take_apart(layers[i], Wired(names, plan, reducer, beside, multiplier=0.5 if bare else None))

    def model(positions: Tensor, hidden: Tensor) -> Tensor:
        residual = None
        if bare:
            for layer in layers:
                hidden = layer(positions, hidden)
            return hidden
        for layer in layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual

    torch._dynamo.reset()
    positions, hidden = torch.arange(8), torch.randn(8, 16)
    with torch.no_grad():
        expected = model(positions, hidden.clone())
        found, code = run_and_get_code(torch.compile(model, fullgraph=True), positions, hidden.clone())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not reduction.define_operators().sums, "every sum is awaited"
    body = code[-1][code[-1].index("def call(") :]
    calls = re.findall(
        r"ops\.(?:fcsd|double)\.(?:reduce_)?(start|wait|hold|moe)\w*\.default\(|extern_kernels\.\w*?(mm)\(",
        body,
    )
    return ["".join(call) for call in calls]


def test_a_compiler_keeps_what_covers_a_sum(ranks: None) -> None:
    first = ["mm", "mm", "start", "mm", "start"]  # attention and shared experts; routed experts under their sum
    later = ["wait", "mm", "wait", "mm", "start", "mm", "start"]  # the attention under the routed experts' sum
    last = ["wait", "mm", "wait", "moe"]  # nothing is left to cover a sum of the shared experts
    assert order(Reducer(2, "tp:0"), 3) == [*first, *later, *last]
    assert order(Hasty(2, "tp:0"), 2) != [*first, *last]
    assert order(Reducer(2, "tp:0"), 2, bare=True) == [*first, *last], "a layer that passes on the whole stream"


def test_a_compiler_keeps_what_covers_a_sum_that_starts_inside_an_operator(ranks: None) -> None:
    first = ["mm", "hold", "moe", "start"]  # the sum of attention and shared experts
    later = ["wait", "mm", "wait", "hold", "moe", "start"]
    last = ["wait", "mm", "wait", "moe"]
    assert order(Reducer(2, "tp:0"), 3, beside=True) == [*first, *later, *last]


class Reduced(Row):
    """A product whose result vLLM sums over the ranks, or, where the plugin has said so, does not."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.ops.double.all_reduce(y) if self.reduce_results else y


class Dense(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = Row(seed), Reduced(seed + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


class DenseLayer(Layer):
    """The standard wiring, as in vLLM's classes. The kernel of the attention is an operator to the compiler."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.self_attn.o_proj, self.mlp = Reduced(10 * index), Dense(10 * index + 1)  # pyright: ignore

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Any]:
        if residual is None:
            x, residual = self.input_layernorm(hidden), hidden
        else:
            x, residual = self.input_layernorm(hidden, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(positions, x), residual)
        return self.mlp(x), residual


@torch.library.custom_op("double::all_reduce", mutates_args=())
def all_reduce(x: Tensor) -> Tensor:
    """vLLM's operator, over two ranks that hold the same."""
    return 2 * x


@all_reduce.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("double::attention", mutates_args=())
def attention(x: Tensor) -> Tensor:
    """The kernel of an attention, at which vLLM divides what it compiles."""
    return 2 * x


@attention.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class CutAttention(Attention):
    def forward(self, positions: Tensor, x: Tensor) -> Tensor:
        return super().forward(positions, torch.ops.double.attention(x))


@pytest.mark.parametrize(
    ("name", "double", "kind"), [("ladder", DenseLayer, "dense"), ("farskip", Layer, "moe-shared")]
)
def test_what_travels_in_a_piece_starts_and_is_awaited_in_it(ranks: None, name: str, double: Any, kind: Any) -> None:
    """vLLM takes the operators in the order in which they are traced, and begins a piece at each attention."""
    layers = [double(index) for index in range(3)]
    names, reducer = VllmNames(shared="shared_experts"), Reducer(2, "tp:0", pieces=True)
    for i, plan in layer_plans(Wiring(name, (0, 1, 2)), [kind] * 3, range(3)).items():
        layers[i].self_attn = CutAttention(10 * i)
        take_apart(layers[i], Wired(names, plan, reducer))

    def model(positions: Tensor, hidden: Tensor) -> Tensor:
        residual = None
        for layer in layers:
            hidden, residual = layer(positions, hidden, residual)
        return hidden + residual

    pieces: list[list[str]] = [[]]
    travels: dict[int, bool] = {}  # by the slot of a sum

    def divide(traced: torch.fx.GraphModule, given: list[Tensor]) -> Any:
        for node in traced.graph.nodes:
            found = re.search(r"attention|reduce_(start|wait)", str(node.target))
            if found is None or node.op != "call_function":
                continue
            if found[0] == "attention":
                pieces.append([])
            elif found[1] == "start":
                slot, within = node.args[1], node.args[-1]
                pieces[-1].append("start" if within else "at once")
                travels[slot] = within
            elif travels.pop(node.args[-1]):
                pieces[-1].append("wait")
        return traced.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, fullgraph=True, backend=divide)(torch.arange(8), torch.randn(8, 16))
    assert pieces == [[], ["start", "at once", "wait"], ["start", "at once", "wait"], []]


class Wasteful(Reducer):
    """The negative control: something is done to each summand."""

    def start(self, x: Tensor, step: Step) -> Sum:
        return super().start(x * 2, step)


def kernels(count: int, reducer: Reducer | None) -> Counter[str]:
    """What the code that Inductor generates calls: products, all-reduces, and everything else that computes.

    Args:
        count: decoder layers.
        reducer: sums of a model with ladder in all layers; None is the original.
    """
    layers, norm = [DenseLayer(index) for index in range(count)], Norm()
    if reducer is not None:
        for i, plan in layer_plans(Wiring("ladder", tuple(range(count))), ["dense"] * count, range(count)).items():
            take_apart(layers[i], Wired(VllmNames(), plan, reducer))

    def model(positions: Tensor, hidden: Tensor) -> Tensor:
        residual = None
        for layer in layers:
            hidden, residual = layer(positions, hidden, residual)
        return norm(hidden, residual)[0]

    torch._dynamo.reset()
    code: list[str] = []

    def stop(written: str) -> None:
        """Nothing is run, so that no C++ has to be compiled."""
        code.append(written)
        raise InterruptedError

    # vLLM compiles with this form of operators that write their arguments.
    with (
        torch.no_grad(),
        torch._inductor.config.patch(enable_auto_functionalized_v2=False),
        patch.object(GraphLowering, "save_output_code", stop),
        pytest.raises(Exception, match="InterruptedError"),
    ):
        torch.compile(model, fullgraph=True)(torch.arange(8), torch.randn(8, 16))
    body = code[0][code[0].index("def call(") :]
    calls = re.findall(r"(cpp_fused|ops\.\w+\.\w+|extern_kernels\.\w+|copy_|clone)[\w.]*\(", body)
    nothing = ("ops.fcsd.reduce_wait", "ops.fcsd.reduce_cover")  # what they do for a sum at once
    same = {"ops.fcsd.reduce_start": "all-reduce", "ops.double.all_reduce": "all-reduce"}
    same |= {"extern_kernels.mm": "product", "extern_kernels.addmm": "product"}
    return Counter(same.get(call, call) for call in calls if call not in nothing)


def test_sums_at_once_add_no_kernel(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys.modules["vllm.distributed"], "tensor_model_parallel_all_reduce", torch.ops.double.all_reduce
    )
    original, ladder = kernels(2, None), kernels(2, Reducer(2, "tp:0"))
    assert original == {"product": 6, "all-reduce": 4, "cpp_fused": 7}  # 5 norms, 2 of silu
    # The last layer sums what its two outputs add up to: one all-reduce fewer. A product makes the addition.
    assert ladder == original - Counter({"all-reduce": 1})
    assert kernels(2, Wasteful(2, "tp:0"))["cpp_fused"] > ladder["cpp_fused"]
