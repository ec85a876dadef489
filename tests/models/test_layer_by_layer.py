"""A tool that calls the layers of a rewired model one by one computes the model's function, or ends in an error.

Layer-by-layer quantisers record what the first decoder layer is given, and then call each layer with the first output
of the layer before. Under most wirings this would be another function than the model's. ``test_quantising_tools.py``
runs the tools themselves.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, converted_config, decoder_layers, model_classes, wire
from fcsd.models.export_template import render
from fcsd.models.wiring import Wiring

ALL, LATER = (0, 1, 2, 3), (2, 3)
WIRINGS = [
    Wiring("ladder", ALL),
    Wiring("farskip", LATER),
    Wiring("farskip", LATER, border="partial"),
    Wiring("ladder", ALL, variant="attn-only", distance=2),
    Wiring("parallel", ALL),
]
DESYNC = [
    Wiring("desync-2x", ALL, tp_degree=2),
    Wiring("desync-4x", ALL, tp_degree=2),
    Wiring("desync", ALL, tp_degree=2, reduce="a,m"),
]
REFUSED = r"^a rewired layer got one tensor without the [^\n]*$"


def first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def refusals(model: Any) -> list[bool]:
    """For each layer but the first, whether it refuses the first output of the one before; else it computes the same.

    Asserts that exactly those layers refuse it that were given more by the model's own loop.
    """
    layers, calls = decoder_layers(model), []
    hooks = [
        layer.register_forward_hook(lambda _, args, kwargs, out: calls.append((args, kwargs, out)), with_kwargs=True)
        for layer in layers
    ]
    with torch.no_grad():
        model(tiny.tokens(), use_cache=False)
    for hook in hooks:
        hook.remove()
    beside = arch_of(model.config).blocks.passes  # where a layer gets a second value, streams may travel beside it
    found = []
    for layer, before, (args, kwargs, out) in zip(layers[1:], calls, calls[1:], strict=False):
        given, given_beside = args[0], kwargs.get(beside)
        alone = {**kwargs, **({beside: given_beside[0]} if isinstance(given_beside, tuple) else {})}
        several = isinstance(given, tuple) or isinstance(given_beside, tuple)
        with torch.no_grad():
            if several:
                with pytest.raises(ValueError, match=REFUSED):
                    layer(first(before[2]), *args[1:], **alone)
            else:
                again = layer(first(before[2]), *args[1:], **alone)
                assert torch.equal(first(again), first(out))
        found.append(several)
    return found


@pytest.mark.parametrize("wiring", WIRINGS, ids=lambda wiring: f"{wiring.name}-{wiring.border}-{wiring.distance}")
@pytest.mark.parametrize("arch", tiny.BUILDS)
def test_one_of_several_streams_is_refused(arch: str, wiring: Wiring) -> None:
    expected = {
        ("ladder", "full"): [True] * 3,
        ("farskip", "full"): [False, False, True],
        ("farskip", "partial"): [False, True, True],
        ("ladder", "partial"): [True] * 3,
        ("parallel", "full"): [False] * 3,
    }
    assert refusals(wire(tiny.model(arch), wiring)) == expected[wiring.name, wiring.border]


@pytest.mark.parametrize("wiring", DESYNC, ids=lambda wiring: wiring.name)
@pytest.mark.parametrize("arch", [arch for arch in tiny.BUILDS if arch_of(tiny.config(arch)).no_desync is None])
def test_the_mean_of_ranks_alone_is_refused(arch: str, wiring: Wiring) -> None:
    expected = {"desync-2x": [False] * 3, "desync-4x": [True, False, True], "desync": [True, False, True]}
    assert refusals(wire(tiny.model(arch), wiring)) == expected[wiring.name]


def test_rewired_again_a_layer_takes_what_its_new_wiring_passes_on() -> None:
    model = wire(tiny.model("llama"), Wiring("desync-4x", ALL, tp_degree=2))
    assert any(refusals(model))
    assert not any(refusals(wire(model, Wiring("parallel", ALL))))


@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_exported_code_refuses_it(arch: str, tmp_path: Path) -> None:
    base = tiny.model(arch)
    config = converted_config(base.config, Wiring("ladder", LATER).to_block())
    config.auto_map = ARCHS[arch].auto_map
    model = model_classes(arch)["AutoModelForCausalLM"](config)
    model.load_state_dict(base.state_dict())
    model.save_pretrained(tmp_path)
    for name, text in render(ARCHS[arch]).items():
        (tmp_path / name).write_text(text)
    cls = get_class_from_dynamic_module(config.auto_map["AutoModelForCausalLM"], tmp_path)
    loaded = cls.from_pretrained(tmp_path)
    assert type(loaded).__module__.startswith("transformers_modules.")
    assert refusals(loaded) == [False, True, True]
