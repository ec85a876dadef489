"""Decoded values equal those of the libraries that write quantised checkpoints, bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fcsd.errors import BadInputError
from fcsd.models.quantised import layouts, values
from fcsd.models.quantised.decode import plain_tensors
from fcsd.models.quantised.layouts import Scheme
from fcsd.models.quantised.method import Method, read_method
from fcsd.models.quantised.values import dequantise, unpacked

# quantised_by_libraries.py beside it made the file.
FILE = Path(__file__).parents[1] / "data" / "quantised_by_libraries.safetensors"
with safe_open(FILE, framework="pt") as file:
    CASES = sorted(file.metadata())


def stored(case: str) -> tuple[Method, dict[str, torch.Tensor], torch.Tensor]:
    with safe_open(FILE, framework="pt") as file:
        method = read_method(json.loads(file.metadata()[case]), FILE)
        names = [name for name in file.keys() if name.startswith(f"{case}.")]  # noqa: SIM118
        tensors = {name.removeprefix(f"{case}."): file.get_tensor(name) for name in names}
    return method, tensors, tensors.pop("expected")


@pytest.mark.parametrize("part", [values._PART, 1000])  # all at once, and some rows at a time
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_library(case: str, part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_PART", part)
    method, tensors, expected = stored(case)
    found = plain_tensors({f"layer.{suffix}": tensor for suffix, tensor in tensors.items()}, method, expected.dtype)
    assert list(found) == ["layer.weight"]
    assert torch.equal(found["layer.weight"][...], expected)


@pytest.mark.parametrize("case", CASES)
def test_a_scheme_names_the_tensors_that_the_library_writes(case: str) -> None:
    method, tensors, expected = stored(case)
    [scheme, *_] = method.schemes
    held = layouts.held_of(scheme, "layer.weight", tuple(expected.shape))
    assert {f"layer.{suffix}" for suffix in tensors} <= held.keys()
    assert {name for name, one in held.items() if one.needed} <= {f"layer.{suffix}" for suffix in tensors}
    for suffix, tensor in tensors.items():
        one = held[f"layer.{suffix}"]
        assert tuple(tensor.shape) in one.shapes, suffix
        assert tensor.dtype in [values.DTYPES[name] for name in one.dtypes], suffix
    # What grows with the matrix is counted; the rest is its shape, a scale of the whole, and the order of columns.
    counted = sum(t.nbytes for name, t in tensors.items() if name not in ("weight_shape", "g_idx", "weight_scale_2"))
    assert scheme.bytes(*expected.shape) == pytest.approx(counted, rel=0.05, abs=32)


def test_an_order_of_columns_is_followed() -> None:
    """As compressed-tensors did while it wrote such files: the scale of column i is that of group ``g_idx[i]``."""
    _, tensors, _ = stored("packed_zero_points")
    order = torch.arange(96)[torch.randperm(96, generator=torch.Generator().manual_seed(1))] // 32
    scheme = Scheme("packed", 4, (1, 32), symmetric=False, ordered=True)
    found = dequantise(scheme, {**tensors, "weight_g_idx": order.int()})
    codes = unpacked(tensors["weight_packed"], 4).int() - 8
    zeros = unpacked(tensors["weight_zero_point"].T, 4).T[:48].int() - 8
    for row in range(48):
        for column in range(96):
            group = order[column]
            value = (codes[row, column] - zeros[row, group]).bfloat16() * tensors["weight_scale"][row, group]
            assert found[row, column] == value


def test_numbers_of_any_width_are_unpacked_from_words() -> None:
    for bits in range(1, 9):
        numbers = [(7 * i + 3) % (1 << bits) for i in range(64)]
        whole = sum(number << (i * bits) for i, number in enumerate(numbers))
        words = [(whole >> (32 * i)) & 0xFFFFFFFF for i in range(64 * bits // 32)]
        signed = torch.tensor([word - (1 << 32) if word >> 31 else word for word in words], dtype=torch.int32)
        assert unpacked(signed, bits).tolist() == numbers


WORDS: dict[str, Any] = {
    "packed": "4-bit integers in groups of 32 (compressed-tensors)",
    "int8": "8-bit integers with a scale for each row (compressed-tensors)",
    "float8_block": "8-bit floats in blocks of 32 x 64 (compressed-tensors)",
    "nvfp4": "4-bit floats in groups of 16 (compressed-tensors)",
    "awq": "4-bit integers in groups of 32 (awq)",
    "gptq_8_bits": "8-bit integers in groups of 32 (gptq)",
    "modelopt_fp8": "8-bit floats with one scale for a matrix (modelopt)",
}


@pytest.mark.parametrize("case", WORDS)
def test_a_method_is_told_in_words(case: str) -> None:
    assert str(stored(case)[0]) == WORDS[case]


def test_of_the_settings_of_single_layers_the_first_counts_that_names_one() -> None:
    """As GPTQModel reads ``dynamic``: a layer that is to be quantised may stand before a pattern that excludes it."""
    head = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    eight: dict[str, Any] = {"+:.*down_proj": {"bits": 8}}
    tensors = stored("gptq_8_bits")[1]
    held = {f"layers.0.down_proj.{suffix}": tensor for suffix, tensor in tensors.items()}
    kept = read_method(head | {"dynamic": {**eight, "-:layers.0": {}}}, "config")
    scheme = kept.scheme_of("layers.0.down_proj.weight", held)
    assert scheme is not None and scheme.bits == 8
    left_out = read_method(head | {"dynamic": {"-:layers.0": {}, **eight}}, "config")
    with pytest.raises(BadInputError, match="does not say how"):
        left_out.scheme_of("layers.0.down_proj.weight", held)
    assert left_out.scheme_of("layers.1.down_proj.weight", held) is None, "the files hold it as it is"


def test_bits_that_are_no_whole_number_are_refused() -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4.0, "group_size": 32}}
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    for block in ({"quant_method": "gptq", "bits": 4.0, "group_size": 32}, packed):
        with pytest.raises(BadInputError, match=r"malformed .*4\.0"):
            read_method(block, "config")
