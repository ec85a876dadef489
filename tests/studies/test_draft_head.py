"""``draft_head``: drafts change no answer, a head learns its target alone, and vLLM's names are kept."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from benchmarks.programs import start
from benchmarks.vllm.speculation import eagle_head
from safetensors.torch import load_file
from studies.real.draft_head import speculate
from studies.real.runner import SEQ

from fcsd.distill.draft import start_head
from fcsd.models.draft_head import DraftHead

pytestmark = pytest.mark.lab


def test_answers_with_drafts_are_those_without_them() -> None:
    torch.manual_seed(0)
    model = tiny.model("llama", initializer_range=0.1).requires_grad_(False)
    head, prompts = start_head(model, 0).requires_grad_(False), tiny.tokens(5, 12)
    plain, alone = speculate(model, head, prompts, 20, 0)
    text = prompts
    for _ in range(20):  # without anything that was made for drafts
        text = torch.cat((text, model(text).logits[:, -1:].argmax(-1)), 1)
    assert torch.equal(plain, text[:, 12:]) and alone == {"passes": 95, "drafted": 0, "accepted": 0}
    for drafts in (1, 3):
        said, counted = speculate(model, head, prompts, 20, drafts)
        assert torch.equal(said, plain)
        assert counted["drafted"] == drafts * counted["passes"] and counted["passes"] + counted["accepted"] >= 95


def test_a_head_that_knows_the_target_has_all_its_drafts_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = tiny.model("llama", initializer_range=0.1).requires_grad_(False)
    embeddings = model.get_input_embeddings().weight

    def knowing(self: DraftHead, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        ids = (embedded[:, :, None] == embeddings).all(-1).float().argmax(-1)
        return model.model(torch.cat((first, ids), 1)).last_hidden_state[:, 1:]

    monkeypatch.setattr(DraftHead, "forward", knowing)
    prompts = tiny.tokens(3, 8)
    first = prompts[:, :1]
    _, counted = speculate(model, start_head(model, 0), prompts, 16, 3)
    assert counted["accepted"] == counted["drafted"] == 3 * counted["passes"] == 36


def test_the_pairs_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.model("llama", initializer_range=0.1).save_pretrained(tmp_path / "model")
    for part, rows in (("train", 8), ("held_out", 2)):
        (tmp_path / "text" / part).mkdir(parents=True)
        ids = tiny.tokens(rows, SEQ, seed=rows).tolist()
        table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))})
        pq.write_table(table, tmp_path / "text" / part / "part-00000.parquet")
    words = ["--text", f"own={tmp_path / 'text'}", "--tokens", "8192", "--batch", "2", "--seeds", "1", "--new", "8"]
    start("studies.real", "draft_head", str(tmp_path / "model"), str(tmp_path / "out"), *words)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(line["target"], line["head"]) for line in lines] == [
        ("original", "not trained"), ("original", "original"), ("not healed", "original"), ("healed", "original"),
        ("original", "original, one epoch more"), ("healed", "healed"),
    ]  # fmt: skip
    assert all(line["like greedy"] == line["answers"] == 2 for line in lines)
    tensors = load_file(tmp_path / "out" / "healed" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "healed" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["num_hidden_layers"] == 1
    eagle_head(tmp_path / "model", tmp_path / "loaded by vLLM")
    loaded = load_file(tmp_path / "loaded by vLLM" / "model.safetensors")
    assert {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in loaded.items()}
    before = load_file(tmp_path / "out" / "original" / "model.safetensors")
    assert tensors.keys() == before.keys() and not torch.equal(tensors["fc.weight"], before["fc.weight"])
