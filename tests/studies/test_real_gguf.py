"""GGUF files: the weights, config and tokenizer are those that were written; what is not proven is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
import tiny
import torch
from safetensors.torch import load_file
from studies.real import read_gguf
from studies.real.read_gguf import unpack_gguf
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from fcsd.checkpoint.location import gguf_lines
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, ConfigError

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {  # by llama.cpp's architecture
    "llama": ("llama", dict(tie_word_embeddings=False, intermediate_size=128), NAMES),
    # Files of Gemma 3 say neither how often full attention comes, nor the angles of the others, nor the queries' scale.
    "gemma3": ("gemma3_text", dict(num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1, head_dim=256,
                                   tie_word_embeddings=True), GEMMA_NAMES),
}  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of the rows of queries and keys: the two halves of a rotated pair are neighbours."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def write(
    path: Path,
    *,
    arch: str = "llama",
    quantised: Any = None,
    pieces: list[str] | None = None,
    kinds: list[int] | None = None,
    pre: str = "smollm",
    **more: Any,
) -> dict[str, torch.Tensor]:
    """A tiny model as a GGUF file; the tensors by transformers' names."""
    model_type, changes, names_of = MODELS.get(arch, MODELS["llama"])
    model = tiny.model(model_type, **changes, **({"vocab_size": len(pieces)} if pieces else {}))
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if arch == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if pieces is None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        names = ["<unk>", "<s>", "</s>", "a", "b", "ab", "aba"]
        writer.add_token_list(names + [f"<{number}>" for number in range(len(names), config.vocab_size)])
        writer.add_token_merges(["a b", "ab a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    else:  # as in files of Gemma
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores([-float(number) for number in range(len(pieces))])
        writer.add_token_types(kinds or [])
        writer.add_bos_token_id(2)
        writer.add_eos_token_id(1)
        writer.add_unk_token_id(3)
        writer.add_pad_token_id(0)
        writer.add_add_bos_token(True)
        writer.add_add_space_prefix(False)
    writer.add_license("mit")
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            number, rest = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            stored = f"blk.{number}.{names_of[rest]}.weight"
        else:
            stored = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
                name.removesuffix(".weight")
            ] + ".weight"
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        heads = heads if arch == "llama" else None
        rows = (weight if heads is None else interleaved(weight, heads)).numpy()
        if arch == "gemma3" and "norm" in name:
            rows = rows + 1  # llama.cpp multiplies by the weight itself
        if quantised is not None and rows.ndim == 2:
            packed = gguf.quants.quantize(rows, quantised)
            read = torch.from_numpy(gguf.quants.dequantize(packed, quantised).copy())
            if heads is not None:  # back to transformers' order of rows
                read = read.reshape(heads, -1, 2, read.shape[-1]).transpose(1, 2).reshape(read.shape)
            weights[name] = read
            writer.add_tensor(stored, packed, raw_dtype=quantised)
        else:
            writer.add_tensor(stored, rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize(
    ("arch", "quantised"),
    [
        ("llama", None),
        ("llama", gguf.GGMLQuantizationType.Q8_0),
        ("llama", gguf.GGMLQuantizationType.Q4_1),
        ("gemma3", None),
        ("gemma3", gguf.GGMLQuantizationType.Q5_0),
    ],
)
def test_a_conversion_has_the_weights_of_the_file(tmp_path: Path, arch: str, quantised: Any) -> None:
    expected = write(tmp_path / "m.gguf", arch=arch, quantised=quantised)
    model_type, changes, _ = MODELS[arch]
    before = (tmp_path / "m.gguf").read_bytes()
    original = tmp_path / "original"
    unpack_gguf(tmp_path / "m.gguf", original)
    found = load_file(original / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in expected.items())
    if quantised is None:
        plain = tiny.model(model_type, **changes)
        rounded = {name: weight.bfloat16().float() for name, weight in expected.items()}
        plain.load_state_dict(rounded, strict=not plain.config.tie_word_embeddings)
        loaded = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
        with torch.no_grad():
            assert torch.equal(loaded(tiny.tokens()).logits, plain(tiny.tokens()).logits)
    assert "license: mit" in (original / "README.md").read_text()
    assert (tmp_path / "m.gguf").read_bytes() == before


def test_words_of_a_file_are_merged_by_their_scores_and_the_users_words_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n\n", "\u2581\u2581"]
    kinds = [3, 3, 3, 3] + 256 * [6] + [4, 4]  # control, bytes, and words that the user has given
    words = ["\u2581t", "he", "\u2581the", "ab", "bc", "\u2581", "a", "b", "c", "e", "h", "t"]
    write(tmp_path / "m.gguf", arch="gemma3", pieces=[*pieces, *words], kinds=kinds + 12 * [1])
    unpack_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    found = tokenizer("the the  abc\n\n\u00e9")["input_ids"]
    told = ["<bos>", "t", "he", "\u2581the", "\u2581\u2581", "ab", "c", "\n\n", "<0xC3>", "<0xA9>"]
    assert found == [[*pieces, *words].index(word) for word in told]
    assert tokenizer.decode(found, skip_special_tokens=True) == "the the  abc\n\n\u00e9"

    load, whole = read_gguf._load, tokenizer.backend_tokenizer.to_str()
    fields = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}

    def misread(part: str, key: str, value: Any) -> Tokenizer:
        state = json.loads(whole)
        (state[part] if part else state)[key] = value
        return Tokenizer.from_str(json.dumps(state))

    for part, key, value, reason in (  # as transformers 5.17 reads such files
        ("model", "merges", [], "it divides every word"),
        ("", "post_processor", None, "it puts no BOS before a text"),
        ("", "normalizer", {"type": "Prepend", "prepend": "\u2581"}, "it puts a space before a text"),
    ):
        tokenizer._tokenizer = misread(part, key, value)
        with pytest.raises(BadInputError, match=reason) as caught:
            read_gguf._require_read(tmp_path / "m.gguf", fields, tokenizer)
        assert "Use transformers 5.23 or newer" in str(caught.value.hint)

    def loaded(file: Path) -> tuple[Any, Any]:
        model, tokenizer = load(file)
        tokenizer._tokenizer = misread("model", "merges", merges)
        tokenizer.eos_token = "<bos>"
        return model, tokenizer

    monkeypatch.setattr(read_gguf, "_load", loaded)
    merges = json.loads(whole)["model"]["merges"]
    unpack_gguf(tmp_path / "m.gguf", tmp_path / "mended")
    assert AutoTokenizer.from_pretrained(tmp_path / "mended").eos_token == "<eos>"
    merges = []
    with pytest.raises(BadInputError, match="it divides every word"):
        unpack_gguf(tmp_path / "m.gguf", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_each_digit_of_smollm_is_a_word(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    unpack_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    found = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab  12 a")
    assert [piece for piece, _ in found] == ["ab", "\u0120\u0120", "1", "2", "\u0120a"]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arch": "falcon"}, "GGUF files of falcon are not proven"),
        ({"pre": "llama-bpe"}, "byte-level vocabularies llama-bpe are not proven"),
        ({"llama__expert_count": 8}, "what llama.expert_count changes"),
        ({"llama__rope__scaling__factor": 8}, "what llama.rope.scaling.factor changes"),
        ({"arch": "gemma3", "gemma3__final_logit_softcapping": 30}, "what gemma3.final_logit_softcapping changes"),
    ],
)
def test_what_is_not_proven_is_refused_and_nothing_is_written(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    write(tmp_path / "m.gguf", **changes)
    with pytest.raises(BadInputError, match=reason):
        unpack_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_scale_of_queries_that_the_file_does_not_say_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 27B has heads of 128 dimensions and scales queries for 168, which llama.cpp knows by the model's size."""
    monkeypatch.setitem(MODELS, "gemma3", (*MODELS["gemma3"][:1], dict(MODELS["gemma3"][1], head_dim=128), GEMMA_NAMES))
    write(tmp_path / "m.gguf", arch="gemma3")
    with pytest.raises(BadInputError, match="heads have 128 dimensions and queries are scaled for 256"):
        unpack_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_weights_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    norm = next(t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors if t.name == "blk.1.attn_norm.weight")
    with (tmp_path / "m.gguf").open("r+b") as file:
        file.seek(norm.data_offset)
        file.write(struct.pack("<f", float("nan")))
    with pytest.raises(BadInputError, match=r"model.layers.1.input_layernorm.weight has values that are not finite"):
        unpack_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_damaged_files_and_existing_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="cannot be read"):
        unpack_gguf(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("a text, which is not such a file")
    with pytest.raises(BadInputError, match="cannot be read"):
        unpack_gguf(tmp_path / "text.gguf", tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(ConfigError):
        unpack_gguf(tmp_path / "text.gguf", tmp_path / "out")


def test_the_lines_that_fcsd_prints_make_a_checkpoint_that_it_converts(tmp_path: Path) -> None:
    expected = write(tmp_path / "m.gguf", quantised=gguf.GGMLQuantizationType.Q8_0)
    with pytest.raises(BadInputError, match="is a GGUF model") as caught:
        convert_checkpoint(tmp_path / "m.gguf", tmp_path / "out")
    lines = gguf_lines(tmp_path / "m.gguf", str(tmp_path / "saved"))
    printed = gguf_lines(tmp_path / "m.gguf", "OUT")
    assert all(line in str(caught.value.hint) for line in printed)
    exec("\n".join(lines), {})
    found = load_file(tmp_path / "saved/model.safetensors")
    assert all(torch.equal(found[name], weight.bfloat16()) for name, weight in expected.items())
    assert convert_checkpoint(tmp_path / "saved", tmp_path / "out", wiring="ladder").parity == 4
