"""Multimodal types: the layers of the decoder are rewired, images are seen as before, and added where they were."""

import json
import logging
from pathlib import Path
from typing import Any

import literal
import pytest
import tiny
import torch

from fcsd.checkpoint.inspection import inspect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, decoder_layers, load_model, unwired, wire
from fcsd.models.wiring import WiredLayer, Wiring

ALL = (0, 1, 2, 3)
TYPES = [arch for arch in tiny.CONFIGS if ARCHS[arch].text_config is not None]
INJECTED = [arch for arch in TYPES if ARCHS[arch].injected is not None]


def injected(arch: str, count: int = 1) -> Any:
    """A model that adds features of images to the outputs of its first ``count`` layers."""
    cls, own = tiny.CONFIGS[arch]
    vision = {**own["vision_config"], "deepstack_visual_indexes": list(range(count))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.CONFIGS, arch, (cls, {**own, "vision_config": vision}))
        return tiny.model(arch, initializer_range=0.2)


def logits_and_gradients(model: Any, images: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    out = model(**images, labels=images["input_ids"], use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("arch", TYPES)
def test_off_is_off_with_images(arch: str) -> None:
    model, images = injected(arch, 2) if arch in INJECTED else tiny.model(arch), tiny.image(arch)
    before = logits_and_gradients(model, images)
    wire(model, Wiring("standard", ALL))
    apart = logits_and_gradients(model, images)
    assert len(before) == len(apart) and all(map(torch.equal, before, apart))
    assert not torch.equal(before[0], model(**images | {"pixel_values": -images["pixel_values"]}).logits)


@pytest.mark.parametrize("arch", TYPES)
@pytest.mark.parametrize("name", ["farskip", "ladder", "parallel"])
def test_on_is_the_table_with_images(arch: str, name: str) -> None:
    model, images = tiny.model(arch, initializer_range=0.2), tiny.image(arch)
    *streams, logits = literal.evaluate(model, images["input_ids"], name, "full", set(ALL), **without_ids(images))
    wire(model, Wiring(name, ALL))
    with torch.no_grad():
        out = model(**images, output_hidden_states=True, use_cache=False)
    torch.testing.assert_close(out.logits, logits, rtol=1e-4, atol=1e-4)
    for mine, true in zip(out.hidden_states[:-1], streams[:-1], strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-4, atol=1e-4)


def without_ids(images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in images.items() if name != "input_ids"}


@pytest.mark.parametrize("arch", INJECTED)
@pytest.mark.parametrize(
    ("name", "layers", "border"),
    [
        ("farskip", (1, 2, 3), "full"),
        ("ladder", (2, 3), "partial"),
        ("ladder", (1, 2, 3), "full"),
        ("parallel", ALL, ""),
    ],
)
def test_features_are_added_to_the_full_stream(arch: str, name: str, layers: tuple[int, ...], border: str) -> None:
    model, images = injected(arch), tiny.image(arch)
    *_, logits = literal.evaluate(
        model, images["input_ids"], name, "full", set(layers), border=border or None, **without_ids(images)
    )
    with torch.no_grad():
        off = model(**images).logits
        on = wire(model, Wiring(name, layers, border=border))(**images).logits
    torch.testing.assert_close(on, logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(on, off, atol=1e-3)


@pytest.mark.parametrize("arch", INJECTED)
@pytest.mark.parametrize(
    ("wiring", "layer"),
    [(Wiring("farskip", ALL), 1), (Wiring("ladder", (2, 3)), 1), (Wiring("ladder", ALL, variant="attn-only"), 1)],
)
def test_a_layer_whose_output_gets_features_passes_on_one_stream(arch: str, wiring: Wiring, layer: int) -> None:
    with pytest.raises(ConfigError, match=f"layer {layer} would pass on a partial stream, .* outputs of layers 0-1"):
        wire(injected(arch, 2), wiring)


@pytest.mark.parametrize("arch", INJECTED)
@pytest.mark.parametrize(("name", "first"), [("farskip", 2), ("ladder", 3), ("parallel", 0)])
def test_all_layers_are_those_that_can_be_converted(
    arch: str, name: str, first: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "fcsd")
    injected(arch, 2).save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "out", wiring=name)
    block = json.loads((tmp_path / "out/config.json").read_text())["fcsd"]
    assert block["layers"] == list(range(first, 4))
    said = f"layers 0-{first - 1} stay standard: the model adds image features to the outputs of its first 2 layers"
    assert [record for record in caplog.messages if "stay standard" in record] == ([said] if first else [])
    with pytest.raises(ConfigError, match="layer 1 would pass on a partial stream"):
        convert_checkpoint(tmp_path / "base", tmp_path / "more", wiring="farskip", layers="0-3")


@pytest.mark.parametrize("arch", TYPES)
def test_a_converted_model_sees(arch: str, tmp_path: Path) -> None:
    tiny.model(arch).save_pretrained(tmp_path / "base")
    base, images = load_model(tmp_path / "base", auto="AutoModelForImageTextToText"), tiny.image(arch)
    report = convert_checkpoint(tmp_path / "base", tmp_path / "out")
    assert report.parity == 4
    loaded: Any = load_model(tmp_path / "out", auto="AutoModelForImageTextToText")
    assert loaded.state_dict().keys() == base.state_dict().keys()
    assert all(isinstance(layer, WiredLayer) for layer in decoder_layers(loaded))
    with torch.no_grad():
        off = base(**images).logits
        seen = loaded(**images).logits
        assert torch.equal(seen, wire(base, Wiring("farskip", ALL))(**images).logits)
        assert not torch.equal(seen, off)
        assert torch.equal(wire(loaded, unwired())(**images).logits, off)
        greedy: dict[str, Any] = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, suppress_tokens=[250])
        wire(loaded, Wiring("farskip", ALL))
        cached = loaded.generate(**images, use_cache=True, **greedy)
        assert torch.equal(cached, loaded.generate(**images, use_cache=False, **greedy))


@pytest.mark.parametrize("arch", ["qwen2_vl", "qwen2_5_vl"])
def test_a_config_that_has_the_language_model_beside_the_vision_tower(arch: str, tmp_path: Path) -> None:
    """Published models have it so: rope_theta and rope_scaling, and no text_config."""
    base: Any = tiny.model(arch)
    base.save_pretrained(tmp_path / "base")
    raw = json.loads((tmp_path / "base/config.json").read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (tmp_path / "base/config.json").write_text(json.dumps({**text, **raw}))
    assert inspect_checkpoint(str(tmp_path / "base")).layers == 4
    assert convert_checkpoint(tmp_path / "base", tmp_path / "out").parity == 4
    loaded, ids = load_model(tmp_path / "out"), tiny.tokens()
    with torch.no_grad():
        expected = wire(base, Wiring("farskip", ALL))(ids).logits
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-6)


def test_a_wrapper_of_any_text_is_refused_with_text_layers_that_are_not_proven() -> None:
    config = tiny.config("mistral3")
    assert arch_of(config).model_type == "mistral3"
    config.text_config = tiny.config("qwen3")
    with pytest.raises(BadInputError, match="mistral3 with text layers of qwen3 is not supported"):
        arch_of(config)
