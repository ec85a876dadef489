"""Adapters beside the weights of a quantised checkpoint: these are frozen as they decode, and the teacher's as well."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import quantised
import runs
import tiny
import torch
from runs import train
from safetensors.torch import load_file

from fcsd.checkpoint import read_object
from fcsd.distill.experts import expert_parallel
from fcsd.models.build import load_model

PARTS = Path("parts") / "parts.safetensors"


@pytest.mark.parametrize("method", ["packed", "gptq", "float8_channel"])
def test_adapters_train_beside_the_decoded_weights(method: str, folder: Path, tmp_path: Path) -> None:
    original = quantised.write_by(method, "llama", tmp_path / "original")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / "student" / name).is_file():
            shutil.copy(folder / "student" / name, original)
    how: dict[str, Any] = {"init": {"wiring": "ladder", "layers": "50%"}, "train__adapter": {"rank": 4}}
    train(runs.resolved(folder, model=str(original), output_dir=str(tmp_path / "run"), **how))
    final = load_file(tmp_path / "run/final/model.safetensors")
    assert "quantization_config" not in read_object(tmp_path / "run/final/config.json")
    trained = load_file(tmp_path / "run/checkpoints/step-4" / PARTS)
    decoded = load_model(original, dtype=torch.float32, decode=True).state_dict()
    assert final.keys() == decoded.keys()
    for name, weight in decoded.items():
        path = name.removesuffix(".weight")
        expected = weight
        if f"{path}.lora_A.weight" in trained:
            expected = weight + trained[f"{path}.lora_B.weight"] @ trained[f"{path}.lora_A.weight"]
            assert not torch.equal(final[name], weight)
        torch.testing.assert_close(final[name], expected.to(final[name].dtype))


@pytest.mark.parametrize(("method", "exact"), [("packed", True), ("nvfp4", True), ("int8", False)])
def test_modules_that_round_what_they_read_lose_the_gradient(method: str, exact: bool, tmp_path: Path) -> None:
    """Why training decodes: transformers' own modules pass no gradient where they round activations."""
    base = quantised.write_by(method, "llama", tmp_path)
    found = []
    for decode in (True, False):
        model: Any = load_model(base, decode=decode).requires_grad_(False)
        embedded = model.get_input_embeddings()(tiny.tokens()).requires_grad_()
        model(inputs_embeds=embedded, use_cache=False).logits[..., :7].float().square().mean().backward()
        found.append(embedded.grad.float())
    missing = (found[0] - found[1]).norm() / found[0].norm()
    assert missing == 0 if exact else missing > 0.5


def test_weights_are_decoded_where_a_library_could_compute_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_parallel, "load_model", lambda *_, **how: how)  # on a GPU load_model would choose
    how: Any = expert_parallel.load(Path(), 1, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert how["decode"] is True
