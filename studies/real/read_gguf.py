"""Writes the model of a GGUF file as a Hugging Face checkpoint, whose conversions and healing need bf16 weights.

Usage: python -m studies.real.read_gguf FILE.gguf OUT

transformers reads the config, the tokenizer and the dequantised tensors. What it passes over without a word is refused
here: scaled rotary embeddings, experts, files in several parts, and keys of the format that nobody has proven. What
some of its versions misread of a tokenizer is set to what the file says, or refused.
"""

import math
import mmap
import shutil
import struct
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import gguf

from fcsd.checkpoint.staging import check_out, staged
from fcsd.checkpoint.tokenizer import load_tokenizer, tokens_before
from fcsd.disk import write_text
from fcsd.errors import BadInputError, ConfigError, DiskError
from fcsd.foreign_errors import reason_of

_DAMAGED = "If the file is damaged or not complete, download it again."
_OTHER = "Pass the safetensors checkpoint that it was made from."
_WORDS = 10_000  # of a vocabulary are tried: all 262,144 of Gemma take most of a minute
_SPECIAL = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
_NEWER = "A newer package gguf may know it: pip install -U gguf. Otherwise pass a file of another quantisation."

_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by GGUF's type

# llama.cpp's architecture -> the keys of the file that transformers translates, and those without effect on the model.
_COMMON = (
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("attention.layer_norm_rms_epsilon", "block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("rope.freq_base", "vocab_size"),
)
_PROVEN = {"llama": (*_COMMON, "rope.dimension_count"), "gemma3": (*_COMMON, "attention.sliding_window")}


def unpack_gguf(file: Path, out: Path) -> None:
    """Write the model of a GGUF file as a directory of bf16 weights, with its config and its tokenizer.

    Quantised values are dequantised, and rounded to bf16.

    Args:
        file: one whole GGUF file of one of llama.cpp's architectures ``llama`` and ``gemma3``.
        out: the directory to write; it must be empty or not exist.

    Raises:
        BadInputError: the file is missing, damaged, in several parts, of a quantisation that the package ``gguf``
            cannot undo, of an architecture, with keys or with a vocabulary that are not proven, or transformers
            misreads its tokenizer.
        ConfigError: ``out`` is not empty.
        DiskError: the weights would not fit.
    """
    if not file.is_file():
        raise BadInputError(f"{file}: there is no such file")
    check_out(out, [file], force=False)
    fields, sizes = _read_header(file)
    names = list(sizes)
    _check(file, fields, names)
    from rich.filesize import decimal

    above = next(path for path in out.absolute().parents if path.exists())
    if 2 * sum(sizes.values()) > shutil.disk_usage(above).free:
        raise DiskError(
            f"{above}: {decimal(2 * sum(sizes.values()))} of bf16 weights do not fit",
            "Free some space, or choose another directory.",
        )
    model, tokenizer = _load(file)
    _mend(fields, tokenizer)
    scalar = getattr(model.config, "query_pre_attn_scalar", model.config.head_dim)
    if scalar != model.config.head_dim:  # llama.cpp knows the scale of such models by their size
        raise BadInputError(
            f"{file}: heads have {model.config.head_dim} dimensions and queries are scaled for {scalar}, which is not "
            "proven for GGUF files",
            _OTHER,
        )
    weights = model.state_dict()
    if not all(weight.is_floating_point() for weight in weights.values()):
        raise BadInputError(f"{file}: this version of transformers keeps the weights quantised in memory")
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    if damaged := next((name for name, weight in weights.items() if not weight.isfinite().all()), None):
        raise BadInputError(f"{file}: {damaged} has values that are not finite numbers in bf16", _DAMAGED)
    if len(weights) != len(names):
        raise BadInputError(
            f"{file}: has {len(names)} tensors, and the model that transformers reads has {len(weights)}"
        )
    config = model.config.to_diff_dict()
    for key in ("_name_or_path", "quantization_config", "dtype"):
        config.pop(key, None)
    plain = type(model.config)(**config, architectures=[type(model).__name__], dtype="bfloat16")
    with staged(out) as stage:
        from huggingface_hub import save_torch_state_dict

        save_torch_state_dict(weights, stage)
        for shard in stage.glob("*.safetensors"):
            shard.chmod(0o644)  # they are written through temporary files, which only their owner may read
        plain.save_pretrained(stage)
        model.generation_config.save_pretrained(stage)
        tokenizer.save_pretrained(stage)
        _require_read(file, fields, load_tokenizer(stage))
        write_text(stage / "README.md", _card(file, fields))


def _read_header(file: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The short values of a file's header by key, and how many values each of its tensors has, by name."""
    try:
        lost = _walk(file)
        reader = gguf.GGUFReader(file)
        short = {key: field for key, field in reader.fields.items() if field.types[:1] != [gguf.GGUFValueType.ARRAY]}
        sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
        for tensor in {tensor.tensor_type: tensor for tensor in reversed(reader.tensors)}.values():
            try:
                gguf.dequantize(tensor.data[:1], tensor.tensor_type)
            except NotImplementedError:
                stored = f"{tensor.name} is stored as {tensor.tensor_type.name}"
                raise BadInputError(f"{file}: {stored}, which the package gguf cannot dequantise", _NEWER) from None
        if lost is not None:
            raise ValueError(f"the bytes of {lost} are not aligned, not in the file, or those of another tensor")
        return {key: field.contents() for key, field in short.items()}, sizes
    except (ValueError, OSError, IndexError, KeyError, struct.error) as error:
        if "GGMLQuantizationType" in str(error):
            raise BadInputError(f"{file}: the package gguf does not know a quantisation: {error}", _NEWER) from error
        raise BadInputError(f"{file}: this GGUF file cannot be read: {reason_of(error)}", _DAMAGED) from error


def _walk(file: Path) -> str | None:
    """Hold a header's counts and offsets against the size of the file, before a library believes them.

    Returns:
        A tensor whose bytes are not aligned, outside of the data or those of another tensor, too; None if none is.

    Raises:
        ValueError, struct.error: a count is larger than what is left of the file, or an array has arrays in it.
    """
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = 0

        def number(form: str) -> int:
            nonlocal at
            (value,) = struct.unpack_from(f"<{form}", data, at)
            at += struct.calcsize(f"<{form}")
            return value

        def skip(count: int, size: int) -> bytes:
            nonlocal at
            if count * size > len(data) - at:
                raise ValueError(f"a count of {count} at byte {at} goes past its end")
            at += count * size
            return data[at - count * size : at] if size == 1 else b""

        def value(kind: int, count: int = 1) -> None:
            if kind == gguf.GGUFValueType.STRING:
                if 8 * count > len(data) - at:
                    raise ValueError(f"a count of {count} at byte {at} goes past its end")
                for _ in range(count):
                    skip(number("Q"), 1)
            elif kind in _BYTES:
                skip(count, _BYTES[kind])
            else:
                raise ValueError(f"a value of type {kind} at byte {at}")

        if skip(4, 1) != b"GGUF" or number("I") not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3 in little-endian order")
        tensors, keys = number("Q"), number("Q")
        alignment = 32
        for _ in range(keys):
            key, kind = skip(number("Q"), 1), number("I")
            if key == b"general.alignment" and kind == gguf.GGUFValueType.UINT32:
                alignment = max(1, *struct.unpack_from("<I", data, at))
            if key.endswith(b".block_count") and kind == gguf.GGUFValueType.UINT32:
                (blocks,) = struct.unpack_from("<I", data, at)
                if blocks > tensors:
                    raise ValueError(f"it has {tensors} tensors for {blocks} layers")
            if kind == gguf.GGUFValueType.ARRAY:
                value(number("I"), number("Q"))
            else:
                value(kind)
        parts = []
        for _ in range(tensors):
            name, rank = skip(number("Q"), 1).decode(), number("I")
            values = math.prod(number("Q") for _ in range(min(rank, 5)))
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number("I"))]
            parts.append((number("Q"), -(-values // block) * size, name))
        begin = -(-at // alignment) * alignment
        end = 0
        for offset, size, name in sorted(parts):
            if offset % alignment or offset < end or begin + offset + size > len(data):
                return name
            end = offset + size
    return None


def _check(file: Path, fields: dict[str, Any], names: list[str]) -> None:
    """Refuse what transformers would read without a word and compute wrongly, or what is not proven."""
    arch = fields.get("general.architecture")
    if arch not in _PROVEN:
        raise BadInputError(f"{file}: GGUF files of {arch} are not proven; proven: {', '.join(_PROVEN)}", _OTHER)
    if fields.get("split.count", 1) > 1:
        raise BadInputError(
            f"{file}: is one part of {fields['split.count']}", "Join them with llama-gguf-split --merge."
        )
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
    import torch
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


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("Usage: python -m studies.real.read_gguf FILE.gguf OUT")
    try:
        unpack_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
    except (BadInputError, ConfigError, DiskError) as error:
        sys.exit(f"{error}. {error.hint or ''}")
