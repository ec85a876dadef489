"""Compiled parts of decoding steps give what the parts give, and all layers of a kind share one compiled function."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fcsd.engine import compiled
from fcsd.engine.decode import Stepper
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.merged import merge_projections
from fcsd.engine.slots import Slots
from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers
from fcsd.models.fused.rotary import fuse_rotary
from fcsd.models.wiring import Wiring
from fcsd.parallel.all_reduce.ways import Way, Ways
from fcsd.parallel.tensor.tp_plan import TensorGroup

ALONE, ALL, STEPS = TensorGroup(None, 1, 0), (0, 1, 2, 3), 4
# What differs between layers of one model: some have no rotary embedding, or no sinks.
DIFFERS = {
    "llama4_text": "use_rope",
    "exaone_moe": "is_sliding",
    "exaone4": "is_sliding",
    "afmoe": "is_local_attention",
    "laguna": "is_local_attention",
    "mimo_v2_flash": "num_key_value_groups",
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What ``torch.compile`` traces: the operators of each function, which run as they are."""
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        found.append(" ".join(str(node.target) for node in graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled._compiled.cache_clear()
    torch._dynamo.reset()
    yield found
    compiled._compiled.cache_clear()


@torch.no_grad()
def decode(model: Any, wiring: Wiring, compile_steps: bool, attention: str = "grouped") -> tuple[list[int], Tensor]:
    """The first token of three prompts, and the logits ``[steps, prompts, vocab]`` of the steps after it."""
    wire_tensor_parallel(model, wiring, ALONE, Ways(Way("none")), compile_steps=compile_steps)
    stepper = Stepper(model, Slots(3, 64, model.device), graphs=False, attention=attention)
    stepper.slots.width = 32
    ids = tiny.tokens(batch=3, length=20).tolist()
    first = stepper.prefill([ids[0], ids[1][:7], ids[2][:13]], [0, 1, 2])
    return first, torch.stack([stepper._step() for _ in range(STEPS)])


NO_SLOTS = ("deepseek_v32", "glm_moe_dsa")  # see why_no_slots
SHARDED = [arch for arch in tiny.CONFIGS if ARCHS[arch].no_tp is None and arch not in NO_SLOTS]


BOTH = ("llama", "qwen2_moe", "deepseek_v3")


@pytest.mark.parametrize(
    ("arch", "merged"),  # the engine merges projections always
    [*((arch, True) for arch in SHARDED), *((arch, False) for arch in BOTH)],
)
def test_a_function_is_traced_once_for_all_layers_and_changes_nothing(
    arch: str, merged: bool, counted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    different, compute = set(), compiled.compute

    def noted(function: Any, *args: Any, **kwargs: Any) -> Any:
        different.add((function.__name__, getattr(args[1], DIFFERS.get(arch, ""), None)))
        return compute(function, *args, **kwargs)

    monkeypatch.setattr(compiled, "compute", noted)
    model: Any = tiny.model(arch, initializer_range=0.1)
    if merged:
        merge_projections(model)
    # Layers of any family call the same functions under all wirings.
    wirings = (Wiring("farskip", ALL), Wiring("ladder", (1, 2)))
    for wiring in wirings if arch in BOTH else wirings[:1]:
        first, logits = decode(model, wiring, compile_steps=False)
        again, found = decode(model, wiring, compile_steps=True)
        assert again == first and torch.equal(found, logits)
        assert len(counted) == len(different) <= 4, "neither a layer, nor a step, nor a wiring is traced again"
        assert ("_before_experts" in {name for name, *_ in different}) == (not ARCHS[arch].dense)
        assert "topk" not in " ".join(counted)
    assert [layer.self_attn.layer_idx for layer in decoder_layers(model)] == list(ALL)


@pytest.mark.parametrize("arch", ["llama", "deepseek_v2", "deepseek_v3"])
def test_attention_that_kernels_rotate_is_compiled_in_real_numbers(
    arch: str, counted: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = tiny.model(arch, initializer_range=0.1)
    first, logits = decode(model, Wiring("ladder", ALL), False)
    fuse_rotary(model, ARCHS[arch])
    # A compiler does not know what is cached, and would read the version of transformers from its files.
    monkeypatch.setattr("fcsd.models.installed.version", lambda name: pytest.fail("the version is asked again"))
    again, found = decode(model, Wiring("ladder", ALL), True)
    assert again == first and "uncompiled" not in caplog.text
    torch.testing.assert_close(found, logits, rtol=0, atol=2e-5)
    assert "complex" not in " ".join(counted)


@pytest.mark.parametrize("attention", ["grouped", "split"])
def test_inductors_code_gives_the_same_logits(attention: str) -> None:
    model = tiny.model("llama", initializer_range=0.1)
    first, logits = decode(model, Wiring("ladder", ALL), False, attention)
    if attention == "split":
        merge_projections(model)
    # The code is made again, and its C++ compiled once for each kernel and not for each function that has it.
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        (again, found), code = run_and_get_code(decode, model, Wiring("ladder", ALL), True, attention)
    assert again == first
    torch.testing.assert_close(found, logits, rtol=0, atol=2e-5)
    assert not torch.equal(found, logits), "the compiled code adds up in another order"
    made = re.findall(r"empty_strided_cpu\(\(([^)]*)\)", "".join(code))
    assert "3, 64" in made, "a query is made"
    assert not [shape for shape in made if shape.startswith(("3, 2, 64", "3, 2, 32"))], "keys are written in place"


def test_what_has_no_fixed_shape_is_not_compiled(counted: list[str]) -> None:
    model: Any = tiny.model("llama")
    wire_tensor_parallel(model, Wiring("ladder", ALL), ALONE, Ways(Way("none")), compile_steps=True)
    with torch.no_grad():
        first = model(tiny.tokens(length=9), use_cache=True)  # transformers' own cache grows
        model(tiny.tokens(length=1), past_key_values=first.past_key_values, use_cache=True)
        model(tiny.tokens(length=9), use_cache=False)
    assert counted == []


def test_what_cannot_be_compiled_is_computed_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        tried.append(graph)
        raise OSError("no C compiler")

    tried: list[Any] = []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    compiled._compiled.cache_clear()
    model: Any = tiny.model("llama", initializer_range=0.1)
    expected = decode(model, Wiring("ladder", ALL), False)
    first, found = decode(model, Wiring("ladder", ALL), True)
    compiled._compiled.cache_clear()
    assert first == expected[0] and torch.equal(found, expected[1])
    assert len(tried) == 2, "each function is tried once"
    said = [record.message for record in caplog.records if record.name == "fcsd.engine.compiled"]
    assert len(said) == 2 and all("uncompiled" in line and "no C compiler" in line for line in said)


def test_more_shapes_than_are_compiled_are_computed_as_they_are(
    counted: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "_SHAPES", 2)
    norm, mlp = torch.nn.Identity(), torch.nn.Linear(4, 4)
    for tokens in (1, 2, 3, 4):
        x = torch.ones(tokens, 1, 4)
        out = compiled.dense(norm, mlp, x)
        assert torch.equal(out, mlp(x))
    assert len(counted) == 2 and [r.levelname for r in caplog.records if "uncompiled" in r.message] == ["WARNING"]


@pytest.mark.gpu
@torch.no_grad()
def test_a_gpu_captures_compiled_steps() -> None:
    model: Any = tiny.model("llama", initializer_range=0.1).cuda()
    answers = []
    for compile_steps in (False, True):
        wire_tensor_parallel(model, Wiring("ladder", ALL), ALONE, Ways(Way("none")), compile_steps=compile_steps)
        stepper = Stepper(model, Slots(3, 64, model.device), graphs=compile_steps)
        first = stepper.prefill(tiny.tokens(batch=3, length=20).tolist(), [0, 1, 2])
        answers.append((first, stepper.decode(40, [0, 1, 2])))
        assert not compile_steps or stepper.graphs, "a step was captured"
    assert answers[0] == answers[1]
