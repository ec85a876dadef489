"""Writes the model of a GGUF file as a Hugging Face checkpoint, whose conversions and healing need bf16 weights.

    python -m studies.real read_gguf FILE.gguf OUT

It is for the files of this folder's runs, SmolLM2-135M-Instruct and Gemma-3-270m, and refuses architectures, keys and
vocabularies that they do not have. transformers reads the config, the tokenizer and the dequantised tensors. What some
of its versions misread of a tokenizer is set to what the file says, or refused.
"""

from itertools import islice
from pathlib import Path
from typing import Any

import gguf
import torch
from huggingface_hub import save_torch_state_dict

from fcsd.checkpoint.staging import check_out, staged
from fcsd.checkpoint.tokenizer import load_tokenizer, tokens_before
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of

ARGUMENTS = {"file": Path, "out": Path}
_DAMAGED = "If the file is damaged or not complete, download it again."
_OTHER = "Pass the safetensors checkpoint that it was made from."
_WORDS = 10_000  # of a vocabulary are tried: all 262,144 of Gemma take most of a minute
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}

# llama.cpp's architecture -> the keys of the file that transformers translates, and those without effect on the model.
_COMMON = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("rope.freq_base", "vocab_size"),
)
_PROVEN = {"llama": (*_COMMON, "rope.dimension_count"), "gemma3": (*_COMMON, "attention.sliding_window")}


def main(given: Any) -> None:
    """Write the checkpoint."""
    unpack_gguf(given.file, given.out)


def unpack_gguf(file: Path, out: Path) -> None:
    """Write the model of a GGUF file as a directory of bf16 weights, with its config and its tokenizer.

    Raises:
        BadInputError: the file cannot be read, or is none that is proven; or transformers misreads its tokenizer.
        ConfigError: ``out`` is not empty.
    """
    check_out(out, [file], force=False)
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise BadInputError(f"{file}: this GGUF file cannot be read: {reason_of(error)}", _DAMAGED) from error
    short = {key: field for key, field in reader.fields.items() if field.types[:1] != [gguf.GGUFValueType.ARRAY]}
    fields, names = {key: field.contents() for key, field in short.items()}, [one.name for one in reader.tensors]
    _check(file, fields, names)
    model, tokenizer = _load(file)
    _mend(fields, tokenizer)
    scalar = getattr(model.config, "query_pre_attn_scalar", model.config.head_dim)
    if scalar != model.config.head_dim:  # llama.cpp knows the scale of such models by their size
        raise BadInputError(
            f"{file}: heads have {model.config.head_dim} dimensions and queries are scaled for {scalar}, which is not "
            "proven for GGUF files",
            _OTHER,
        )
    weights = {name: weight.bfloat16() for name, weight in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    if damaged := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
        raise BadInputError(f"{file}: {damaged} has values that are not finite numbers in bf16", _DAMAGED)
    if len(weights) != len(names):
        raise BadInputError(f"{file}: has {len(names)} tensors, and the model that was read has {len(weights)}")
    config = model.config.to_diff_dict()
    for key in ("_name_or_path", "quantization_config", "dtype"):
        config.pop(key, None)
    plain = type(model.config)(**config, architectures=[type(model).__name__], dtype="bfloat16")
    with staged(out) as stage:
        save_torch_state_dict(weights, stage)
        for shard in stage.glob("*.safetensors"):
            shard.chmod(0o644)  # they are written through temporary files, which only their owner may read
        plain.save_pretrained(stage)
        model.generation_config.save_pretrained(stage)
        tokenizer.save_pretrained(stage)
        _require_read(file, fields, load_tokenizer(stage))
        (stage / "README.md").write_text(_card(file, fields))


def _check(file: Path, fields: dict[str, Any], names: list[str]) -> None:
    """Refuse what transformers would read without a word and compute wrongly, or what is not proven."""
    arch = fields.get("general.architecture")
    if arch not in _PROVEN:
        raise BadInputError(f"{file}: GGUF files of {arch} are not proven; proven: {', '.join(_PROVEN)}", _OTHER)
    known = {f"{arch}.{key}" for key in _PROVEN[arch]}
    own = {key for key in fields if key.startswith(f"{arch}.")}
    unknown = sorted(own - known) + [name for name in names if name.startswith("rope_")]
    if unknown:
        raise BadInputError(f"{file}: what {unknown[0]} changes in the model is not proven for GGUF files", _OTHER)
    pre = fields.get("tokenizer.ggml.pre", "of no name")
    if fields.get("tokenizer.ggml.model") == "gpt2" and pre != "smollm":
        raise BadInputError(
            f"{file}: byte-level vocabularies {pre} are not proven for GGUF files; proven: smollm", _OTHER
        )


def _load(file: Path) -> tuple[Any, Any]:
    """transformers' model in fp32 and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": file.name}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, **where, dtype=torch.float32, output_loading_info=True
        )
        model, found = loaded
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    except Exception as error:  # the parsers of transformers and tokenizers raise errors of every class
        raise BadInputError(f"{file}: transformers cannot read this GGUF file: {reason_of(error)}", _DAMAGED) from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found[kind]:
            raise BadInputError(f"{file}: {kind.replace('_', ' ')}: {sorted(found[kind])[0]}")
    return model, tokenizer


def _mend(fields: dict[str, Any], tokenizer: Any) -> None:
    """Set what transformers reads wrongly of a tokenizer and the file says.

    Version 5.17 takes BOS for EOS. No version up to 5.23 divides numbers as the merges of smollm do, each digit alone.
    """
    from tokenizers import pre_tokenizers

    for kind, key in _SPECIAL.items():
        number = fields.get(f"tokenizer.ggml.{key}")
        if number is not None and getattr(tokenizer, f"{kind}_token_id") != number:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    if fields.get("tokenizer.ggml.model") == "gpt2":
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def _require_read(file: Path, fields: dict[str, Any], tokenizer: Any) -> None:
    """Refuse a tokenizer that reads texts in another way than the file says.

    Models compute without an error on such tokens. transformers 5.17 divides every word of Gemma 3, and puts neither
    BOS nor a space before a text of a llama with a vocabulary of SentencePiece.
    """
    from transformers import __version__

    pieces = (piece.replace("\u2581", " ") for piece in tokenizer.get_vocab())
    every = (piece for piece in pieces if len(piece.strip()) > 1 and piece.strip().isalpha())
    words = list(islice(every, _WORDS))
    scored = fields.get("tokenizer.ggml.model") == "llama"
    bos = fields.get("tokenizer.ggml.add_bos_token", scored)
    space = fields.get("tokenizer.ggml.add_space_prefix", scored)
    wrong = []
    if (tokens_before(tokenizer) == [tokenizer.bos_token_id]) != bos:
        wrong.append(f"it puts {'no' if bos else 'a'} BOS before a text")
    if scored and tokenizer.tokenize("a")[0].startswith("\u2581") != space:
        wrong.append(f"it puts {'no' if space else 'a'} space before a text")
    if words and not any(len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1 for word in words):
        wrong.append("it divides every word")
    if wrong:
        raise BadInputError(
            f"{file}: transformers {__version__} reads the tokenizer of this file wrongly: {wrong[0]}",
            f"Use transformers 5.23 or newer. If it does the same: {_OTHER}",
        )


def _card(file: Path, fields: dict[str, Any]) -> str:
    """A README with the licence that the file names, and where the weights are from."""
    licence = fields.get("general.license")
    head = f"---\nlicense: {licence}\n---\n" if isinstance(licence, str) else ""
    name = fields.get("general.name", file.stem)
    return f"{head}# {name}\n\nThe weights of `{file.name}`, dequantised to bf16 by fcsd.\n"
