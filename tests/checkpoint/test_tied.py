"""A head that differs from the embedding to which config.json ties it is refused wherever a checkpoint is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from fcsd.checkpoint import SINGLE, inspect_checkpoint, read_config, read_layout, verify_tensors
from fcsd.checkpoint.verify import differing_copies
from fcsd.convert import convert_checkpoint
from fcsd.engine.weights import load_tensor_parallel
from fcsd.errors import BadInputError
from fcsd.models.build import load_model
from fcsd.parallel.tensor.tp_plan import TensorGroup

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FIX = '"tie_word_embeddings": false'


def write(path: Path, change: Callable[[dict[str, torch.Tensor]], object], tied: bool = True) -> Path:
    """A tiny mixtral whose tensors ``change`` changes; they include a head that equals the embedding."""
    tiny.model("mixtral", tie_word_embeddings=True).save_pretrained(path)
    tensors = load_file(path / SINGLE)
    tensors[HEAD] = tensors[EMBEDDING].clone()
    change(tensors)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))
    return path


def other_head(tensors: dict[str, torch.Tensor]) -> None:
    """One value of the last row differs."""
    tensors[HEAD][-1, -1] += 0.5


def opened(path: Path) -> dict[str, Any]:
    """Every way in that needs one process: what it does with a checkpoint."""
    group = TensorGroup(None, 2, 0)
    return {
        "verify": lambda: verify_tensors(read_layout(path), read_config(path)),
        "convert": lambda: convert_checkpoint(path, path.with_name("out"), check=False),
        "load_model": lambda: load_model(path),
        "engine": lambda: load_tensor_parallel(path, dtype=torch.float32, device="cpu", ranks=group),
    }


def test_a_differing_head_is_refused_everywhere(tmp_path: Path) -> None:
    path = write(tmp_path / "model", other_head)
    for name, way in opened(path).items():
        with pytest.raises(BadInputError, match="ties") as caught:
            way()
        assert HEAD in str(caught.value) and FIX in (caught.value.hint or ""), name
        assert "\n" not in f"{caught.value}{caught.value.hint}"
    assert not (tmp_path / "out").exists()
    [problem] = inspect_checkpoint(path).problems
    assert problem == f"{HEAD} differs from {EMBEDDING}, to which config.json ties it"


def test_the_fix_that_is_named_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "model", other_head, tied=False)
    ways = opened(path)
    assert inspect_checkpoint(path).problems == []
    ways["verify"](), ways["convert"]()
    whole, half = ways["load_model"](), ways["engine"]()
    stored = load_file(path / SINGLE)
    assert torch.equal(whole.lm_head.weight, stored[HEAD]) and torch.equal(half.lm_head.weight, stored[HEAD][:128])


def test_equal_values_are_tied(tmp_path: Path) -> None:
    """Also if one of the two is stored in another dtype, or both hold a NaN at the same place."""

    def in_bf16(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16()
        tensors[HEAD] = tensors[EMBEDDING].float()

    def with_nan(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EMBEDDING][3, 4] = tensors[HEAD][3, 4] = torch.nan

    for name, change in {"same": lambda tensors: None, "bf16": in_bf16, "nan": with_nan}.items():
        path = write(tmp_path / name, change)
        verify_tensors(read_layout(path), read_config(path))
    model: Any = load_model(tmp_path / "same")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_head_of_the_first_rows_alone_differs(tmp_path: Path) -> None:
    path = write(tmp_path / "model", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING][:-1].clone()}))
    assert len(differing_copies(read_layout(path), {HEAD: EMBEDDING})) == 1


def test_absent_untied_heads_and_other_sizes_are_refused(tmp_path: Path) -> None:
    def absent(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[HEAD]

    def padded(*names: str) -> Callable[[dict[str, torch.Tensor]], None]:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors.update({name: torch.cat([tensors[name], torch.zeros(64, 64)]) for name in names})

        return change

    cases = {
        "absent": (absent, False, HEAD),
        "head padded": (padded(HEAD), True, HEAD),
        "both padded": (padded(HEAD, EMBEDDING), True, EMBEDDING),
        "both padded, untied": (padded(HEAD, EMBEDDING), False, EMBEDDING),
    }
    for name, (change, tied, culprit) in cases.items():
        for way, read in opened(write(tmp_path / name, change, tied)).items():
            with pytest.raises(BadInputError) as caught:
                read()
            hint = caught.value.hint or ""  # where transformers' own message is no help, the hint names the command
            assert culprit in str(caught.value) or "fcsd inspect" in hint, (name, way)


def test_tensors_are_compared_to_their_last_row(tmp_path: Path) -> None:
    """Tensors are compared in parts; a difference behind the first part counts."""
    rows = 5000
    embedding = torch.arange(rows * 2, dtype=torch.float32).view(rows, 2)
    head = embedding.clone()
    head[-1] += 1
    save_file({HEAD: head, EMBEDDING: embedding, "equal": embedding.clone()}, tmp_path / SINGLE)
    layout = read_layout(tmp_path)
    assert differing_copies(layout, {"equal": EMBEDDING, "elsewhere": EMBEDDING}) == []
    [problem] = differing_copies(layout, {HEAD: EMBEDDING})
    assert problem.startswith(f"{HEAD} differs")
