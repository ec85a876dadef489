"""Reads config.json and checks what it says before any class is built from it; the file is not trusted.

transformers accepts most of the numbers that are refused here: zero experts, more experts per token than experts, a
negative number of layers. The rewiring that a model already has is read, too: fcsd writes an ``fcsd`` block, AMD's
models have ``farskip*`` keys.
"""

import re
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from operator import gt, ne
from pathlib import Path
from typing import Any

from fcsd.checkpoint.files import contained, quoted, read_object
from fcsd.errors import BadInputError
from fcsd.models.arch import Arch
from fcsd.models.archs import ARCHS
from fcsd.models.config_keys import EXPERT_COUNTS, EXPERTS_PER_TOKEN, PREFIX, REFUSAL, WEIGHTS_FILE
from fcsd.models.export_template import CODE_FILES
from fcsd.models.products import unknown_type
from fcsd.models.quantised.method import MODELOPT_FILE, Method, read_method
from fcsd.models.selection import layers_text
from fcsd.models.wiring_block import Wiring

# The files that transformers reads as JSON objects, and may read an ``auto_map`` from.
MAY_NAME_CODE = ("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json")
MAY_NAME_CODE += ("preprocessor_config.json", "image_processor_config.json", "video_preprocessor_config.json")
CODE_ENDINGS = (".py", ".pyc", ".so")
_NAME = re.compile(r"[\w.-]{1,100}")
_HUB_CODE_KEYS = ("attn_implementation", "experts_implementation")
_DTYPES = ("float64", "float32", "bfloat16", "float16", "auto")
_MAX_LABELS = 10_000  # transformers makes a name for each label, and a language model has no tensor for them
_MAX_VALUES = 100_000  # transformers copies all of them dozens of times; a config of a language model has about fifty

# Key, at any depth -> the condition that its value must satisfy, in words. No tensor confirms these values. With a
# value that violates its condition, transformers uses up the memory, or computes something that fcsd cannot read.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        ("dtype", "torch_dtype"),
        (lambda value: str(value).removeprefix("torch.") in _DTYPES, f"one of {', '.join(_DTYPES)}"),
    ),
    "num_labels": (
        lambda value: type(value) is int and 0 <= value <= _MAX_LABELS,
        f"a whole number from 0 to {_MAX_LABELS}",
    ),
    **dict.fromkeys(
        ("id2label", "label2id"),
        (
            lambda value: isinstance(value, dict) and len(value) <= _MAX_LABELS,
            f"a table of at most {_MAX_LABELS} labels",
        ),
    ),
    "partial_rotary_factor": (lambda value: type(value) in (int, float) and 0 < value <= 1, "a share of a head"),
    "use_bidirectional_attention": (  # "vision": the tokens of an image see each other
        lambda value: value is False or value == "vision",
        "false: an encoder generates no text",
    ),
    "return_dict": (lambda value: type(value) is bool, "true or false"),
    "torchscript": (lambda value: value is False, "false, which fcsd needs"),
}


@dataclass(frozen=True)
class CheckpointConfig:
    """The content of config.json.

    Attributes:
        raw: the whole content.
        model_type: the model type of the base architecture, for a converted checkpoint too.
        text: the decoder's part of ``raw``; ``raw`` itself unless the model is multimodal.
        method: how the weights are quantised; None if they are not.
        rewired: the model's present rewiring, see :func:`read_rewiring`; None for an original.
    """

    raw: dict[str, Any]
    model_type: str
    text: dict[str, Any]
    method: Method | None
    rewired: dict[str, Any] | None

    @property
    def quantization(self) -> str | None:
        """The name of the method by which the weights are quantised; None if they are not."""
        return None if self.method is None else self.method.name

    @property
    def arch(self) -> Arch:
        """The row of a type that fcsd has, with its language model inside."""
        return ARCHS[self.model_type].around(self.text.get("model_type"))

    @property
    def foreign(self) -> bool:
        """Whether the model's own code computes something else than transformers' class of its type, as AMD's does."""
        return self.rewired is not None and self.rewired["by"] != "fcsd"


def read_config(path: Path, *, trust_remote_code: bool = False) -> CheckpointConfig:
    """Read and check ``config.json`` of a checkpoint directory. No code is run and no class is built.

    A rewired checkpoint is accepted, and so is fcsd's own ``auto_map`` in it. Callers that need an original refuse a
    rewired checkpoint themselves.

    Args:
        trust_remote_code: accept a checkpoint with code of its own. That code is never run: fcsd uses the classes of
            transformers.

    Raises:
        BadInputError: the file is malformed, contradicts itself, is of an unsupported type, or asks for code to be run
            that fcsd did not write.
    """
    where = path / "config.json"
    raw = read_object(contained(path, "config.json"))
    _check_values(raw, where)
    declared = raw.get("model_type")
    if not isinstance(declared, str) or not _NAME.fullmatch(declared):
        raise BadInputError(f"{where}: has no model_type")
    architectures = raw.get("architectures") or []
    if not isinstance(architectures, list) or not all(_NAME.fullmatch(str(name)) for name in architectures):
        raise BadInputError(f"{where}: architectures is not a list of class names")
    rewired = read_rewiring(raw, declared, where)
    model_type = declared.removeprefix(PREFIX)
    row = ARCHS.get(model_type)
    text = raw.get(row.text_config, raw) if row is not None and row.text_config is not None else raw
    config = CheckpointConfig(raw, model_type=model_type, text=text, method=None, rewired=rewired)
    for part in (raw, config.text, raw.get("vision_config", {})):
        if not isinstance(part, dict):
            raise BadInputError(f"{where}: text_config and vision_config must be objects")
    if not config.foreign:
        check_type(config, where)  # before what another flag or another file of the same model could change
        if rewired is not None and not trust_remote_code:
            refuse_foreign_code(path, ARCHS[model_type].auto_map, CODE_FILES)
    config = replace(config, method=_method(raw, where))
    if rewired is None and not trust_remote_code:
        refuse_code(path)
    for part in (raw, config.text, raw.get("vision_config", {})):
        check_numbers(part, where)
    return config


def refuse_code(path: Path) -> None:
    """Check that an original asks for no code of its own to be run.

    Raises:
        BadInputError: a file holds an ``auto_map``.
    """
    for name in MAY_NAME_CODE:
        if (path / name).exists() and (content := read_object(contained(path, name))) != without_auto_map(content):
            raise BadInputError(
                f"{path / name}: auto_map asks for code of its own to be run",
                "With --trust-remote-code fcsd accepts the checkpoint. It never runs that code: it uses the classes of "
                "transformers, and leaves the code out of what it writes.",
            )


def refuse_foreign_code(path: Path, own_map: dict[str, str], own_files: Set[str]) -> None:
    """Check that the only code of a converted directory is the code that fcsd writes.

    Args:
        own_map: the ``auto_map`` that fcsd writes into its config.json.

    Raises:
        BadInputError: a file holds another ``auto_map``, or there is another code file.
    """
    hint = "fcsd did not write this. Remove it, or convert the base model again."
    for name in MAY_NAME_CODE:
        if not (path / name).exists():
            continue
        content = read_object(contained(path, name))
        if name == "config.json" and content.get("auto_map") == own_map:
            del content["auto_map"]
        if content != without_auto_map(content):
            raise BadInputError(f"{path / name}: auto_map names code that is not fcsd's", hint)
    for entry in sorted(path.iterdir()):
        if entry.name.endswith(CODE_ENDINGS) and entry.name not in own_files:
            raise BadInputError(f"{path}: {quoted(entry.name)} is code that is not fcsd's", hint)


def without_auto_map(value: Any) -> Any:
    """A JSON value without the keys ``auto_map`` that name something. Its depth was limited by the parser."""
    if isinstance(value, dict):
        return {key: without_auto_map(item) for key, item in value.items() if key != "auto_map" or item is None}
    if isinstance(value, list):
        return [without_auto_map(item) for item in value]
    return value


def _check_values(raw: dict[str, Any], where: Path) -> None:
    for count, (key, value) in enumerate(_walk(raw)):
        if count == _MAX_VALUES:
            hint = "A language model needs about fifty: remove the tables that are not its settings."
            raise BadInputError(f"{where}: holds more than {_MAX_VALUES} values", hint)
        if key in _VALUES and value is not None and not _VALUES[key][0](value):
            shown = f"a table of {len(value)}" if isinstance(value, dict) else quoted(str(value))
            hint = "A language model has no labels: remove the table." if key.endswith(("2label", "2id")) else None
            raise BadInputError(f"{where}: {key} is {shown}, not {_VALUES[key][1]}", hint)
        if key.endswith(_HUB_CODE_KEYS) and isinstance(value, str) and "/" in value:
            raise BadInputError(
                f"{where}: {quoted(key)} asks for code of its own to be run, {quoted(value)}",
                "Remove the key: fcsd chooses the implementation itself.",
            )
        # transformers would read the file named here instead of the ones that are checked.
        if key == WEIGHTS_FILE and value != REFUSAL:
            raise BadInputError(f"{where}: {quoted(key)} names weights of its own", "Remove the key.")


def check_type(config: CheckpointConfig, where: Path) -> None:
    """Check that fcsd has the model's type.

    Raises:
        BadInputError: it has not; or the attention is gated, and the model is not one that AMD trained, or of another
            type.
    """
    row = ARCHS.get(config.model_type)
    if has_gated_attention(config.raw) and (config.rewired is None or row is None or row.blocks.gated is None):
        raise BadInputError(f"{where}: {GATED_ATTENTION}", "Convert a model whose attention transformers implements.")
    if row is None:
        raise unknown_type(config.model_type, config.raw.get("architectures"), f"{where}: ")
    text = config.text.get("model_type")
    if row.unsupported(text):
        raise BadInputError(f"{where}: {row.unsupported(quoted(str(text)))}")
    ours = row.causal_lm
    found = config.raw.get("architectures")
    if config.rewired is None and found is not None and list(map(_plain, found)) != [_plain(ours)]:
        raise BadInputError(f"{where}: architectures is {quoted(str(found))}, not [{ours!r}]")


def _plain(name: str) -> str:
    """The name of a class without the differences of spelling between published files and transformers."""
    return name.replace("_", "").lower()


def _method(raw: dict[str, Any], where: Path) -> Method | None:
    """How the weights are quantised, by config.json or by the file that ModelOpt writes beside it."""
    inner = raw.get("text_config")
    block = raw.get("quantization_config")
    if block is None and isinstance(inner, dict) and "quantization_config" in inner:
        raise BadInputError(f"{where}: the language model alone is quantised, which is not supported")
    if block is None and (where.parent / MODELOPT_FILE).exists():
        where = where.parent / MODELOPT_FILE
        block = read_object(contained(where.parent, MODELOPT_FILE))
    return None if block is None else read_method(block, where)


def _walk(root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every (key, value) at any depth. A value below a key that can name code is given under that key."""
    stack = list(root.items())
    while stack:
        key, value = stack.pop()
        yield key, value
        if isinstance(value, dict):
            stack += [(key if key.endswith(_HUB_CODE_KEYS) else inner, item) for inner, item in value.items()]
        elif isinstance(value, list):
            stack += [(key, item) for item in value]


_AMD_FLAGS = ("farskip", "attn_only_farskip", "mlp_only_farskip")
AMD_CLASS = "InstellaMoEForCausalLM"  # whose file was read: what it computes, fcsd's class computes
AMD_KEYS = (*_AMD_FLAGS, "farskip_start_idx", "farskip_end_idx")
GATED_ATTENTION = (
    "its attention is gated (self_attn.gate_proj), which no class of transformers that fcsd uses has; nearest is "
    "deepseek_v3, whose layers are the same otherwise"
)


def read_rewiring(raw: dict[str, Any], model_type: str, where: str | Path) -> dict[str, Any] | None:
    """The model's rewiring; None if the model has the standard wiring.

    In AMD's code the two ``*_only`` flags have no effect without ``farskip``, and both together cancel it. In both
    cases the model has the standard wiring.

    Returns:
        ``{"by": "fcsd", **block}``, or ``{"by": "amd", "wiring": "farskip", "variant", "start", "end"}``, with the
        first layer and the end of the range as AMD's keys give them (the end may be past the last layer).

    Raises:
        BadInputError: a block or key that is unknown, malformed, or does not belong to the model type.
    """
    block = raw.get("fcsd")
    if block is None and not model_type.startswith(PREFIX):
        return _amd(raw, where)
    if not isinstance(block, dict) or not model_type.startswith(PREFIX):
        raise BadInputError(f"{where}: model_type {quoted(model_type)} and its fcsd block do not belong together")
    try:
        Wiring.from_block(block)
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(f"{where}: {error}", "Update fcsd, or convert the base model again.") from None
    return {"by": "fcsd", **block}


def describe(rewiring: dict[str, Any]) -> str:
    """The rewiring in a few words, for example ``farskip (attn-only), layers 0-26, by AMD``."""
    variant = f" ({rewiring['variant']})" if rewiring["variant"] != "full" else ""
    if rewiring["by"] == "amd":
        return f"farskip{variant}, layers from {rewiring['start']} up to {rewiring['end']}, by AMD"
    kept = f" (reduce {rewiring['reduce']})" if "reduce" in rewiring else ""
    return f"{rewiring['wiring']}{variant}{kept}, layers {layers_text(rewiring['layers'])}, by fcsd"


def has_gated_attention(raw: dict[str, Any]) -> bool:
    """Whether config.json describes AMD's Instella-MoE with gated attention; see ``GATED_ATTENTION``."""
    return raw.get("model_type") == "instella_moe" or raw.get("gated_attention") is True


def _amd(raw: dict[str, Any], where: str | Path) -> dict[str, Any] | None:
    flags = {key: raw.get(key) or False for key in _AMD_FLAGS}
    start, end = raw.get("farskip_start_idx", 0), raw.get("farskip_end_idx", 10_000)
    if not all(type(flag) is bool for flag in flags.values()) or {type(start), type(end)} - {int, float}:
        raise BadInputError(f"{where}: the farskip keys do not hold flags and layer numbers")
    attn_only, mlp_only = flags["attn_only_farskip"], flags["mlp_only_farskip"]
    if not flags["farskip"] or (attn_only and mlp_only):
        return None
    variant = "attn-only" if attn_only else "mlp-only" if mlp_only else "full"
    return {"by": "amd", "wiring": "farskip", "variant": variant, "start": int(start), "end": int(end)}


# key -> (least, most). The upper bounds are above the values of every known model, and small enough that a model with
# such values can be checked quickly.
_SIZES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("num_hidden_layers", "interleave_moe_layer_step", "decoder_sparse_step"), (1, 10_000)),
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), (0, 10_000)
    ),
    **dict.fromkeys(EXPERT_COUNTS, (1, 100_000)),
    **dict.fromkeys((*EXPERTS_PER_TOKEN, "n_group", "topk_group"), (1, 100_000)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("hidden_size", "intermediate_size", "intermediate_size_mlp"), (1, 1 << 22)),
    "moe_intermediate_size": (1, 1 << 22),
    "shared_expert_intermediate_size": (0, 1 << 22),  # 0 for none, as with n_shared_experts
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), (1, 1 << 22)),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), (1, 1 << 16)),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), (1, 1 << 16)),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), (1, 1 << 30)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), (0, 1 << 40)),
}


# Sizes of which a config may have one a layer, as Hunyuan's have.
_ONE_A_LAYER = ("moe_intermediate_size", "moe_topk")


def _indivisible(divisor: int, number: int) -> bool:
    return number % divisor != 0


# (key, other key, the relation of their values that is an error, the same relation in words)
_CONTRADICTIONS: list[tuple[str, str, Callable[[int, int], bool], str]] = [
    *[(chosen, key, gt, "exceeds") for chosen in ("num_experts_per_tok", "moe_k") for key in EXPERT_COUNTS],
    ("num_experts", "num_local_experts", ne, "is not"),  # both keys name the same number
    ("topk_group", "n_group", gt, "exceeds"),
    ("n_group", "n_routed_experts", _indivisible, "does not divide"),
    ("first_k_dense_replace", "num_hidden_layers", gt, "exceeds"),
    ("num_key_value_heads", "num_attention_heads", _indivisible, "does not divide"),
]


def check_numbers(config: dict[str, Any], where: str | Path) -> None:
    """Check the numbers of a config or of a config inside it.

    Raises:
        BadInputError: a size is not a whole number within its bounds, or two of them contradict each other.
    """
    for key, (least, most) in _SIZES.items():
        given = config.get(key)
        for value in given if key in _ONE_A_LAYER and isinstance(given, list) else [given]:
            if value is None or (type(value) is int and least <= value <= most):
                continue
            shown = quoted(value) if isinstance(value, str) else str(value)[:40]
            raise BadInputError(f"{where}: {key} is {shown}, not a whole number from {least} to {most}")
    if config.get("num_experts_per_tok", 1) is None:  # transformers accepts None and fails at the first token
        raise BadInputError(f"{where}: num_experts_per_tok is null")
    for key, other, wrong, words in _CONTRADICTIONS:
        a, b = config.get(key), config.get(other)
        if a is not None and b is not None and wrong(a, b):
            raise BadInputError(f"{where}: {key}, {a}, {words} {other}, {b}")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key)
        lists = [rope.get(name) for name in ("short_factor", "long_factor")] if isinstance(rope, dict) else []
        if len({len(factors) for factors in lists if isinstance(factors, list)}) > 1:
            raise BadInputError(f"{where}: {key} has a short_factor and a long_factor of different lengths")
    for key in ("mlp_only_layers", "moe_layers"):
        layers = config.get(key)
        last = (config.get("num_hidden_layers") or _SIZES["num_hidden_layers"][1]) - 1
        if layers is None:
            continue
        if not isinstance(layers, list) or not all(type(i) is int and 0 <= i <= last for i in layers):
            raise BadInputError(f"{where}: {key} is not a list of layers from 0 to {last}")
