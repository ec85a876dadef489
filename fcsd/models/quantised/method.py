"""Reads what a config says about quantised weights: the method, and the scheme of each linear layer.

The text of a config is not trusted: sizes and names are checked, and patterns are matched for a limited time.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from ...errors import BadInputError
from ...strict_json import StrictJsonError, read_file
from ...terminal import bounded
from .layouts import Scheme, lacking, stored_so

MODELOPT_FILE = "hf_quant_config.json"  # older files of ModelOpt have it in place of a part of config.json
EVERY = ("Linear",)  # what compressed-tensors calls the linear layers of any name
_SECONDS = 1.0  # for the pattern of a config against one name; those in use take microseconds
# What the names of quantised models end in; before it stands the name of the original.
_RELEASE = re.compile(
    r"[-_.](?:awq|gptq|autoround|auto-round|bnb|nf4|quantized|w\d+a\d+|int[48]|[48]-?bit|fp[48]|nvfp4|mxfp[48]|hqq|eetq|aqlm|quark"
    r"|quip|exl[23]|torchao)(?:[-_.].*)?$",
    re.IGNORECASE,
)


class _Unsupported(Exception):
    """A method that fcsd does not read; the message names its format and algorithm."""


@dataclass(frozen=True)
class Rule:
    """How the layers of some names are stored.

    Attributes:
        targets: names of layers, ``re:`` with a pattern, or ``EVERY``.
        scheme: None if they are not quantised.
    """

    targets: tuple[str, ...]
    scheme: Scheme | None


@dataclass(frozen=True)
class Method:
    """What a config says about quantised weights.

    Attributes:
        name: of the method, as its config has it.
        rules: the first one counts that names a layer, and whose tensors the layer has.
        ignore: names and patterns of layers that are not quantised.
    """

    name: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()

    def __str__(self) -> str:
        shown = dict.fromkeys(str(scheme) for scheme in self.schemes)
        return f"{' and '.join(shown)} ({self.name})"

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes, the one of the first rule first."""
        return tuple(dict.fromkeys(rule.scheme for rule in self.rules if rule.scheme is not None))

    def scheme_of(self, weight: str, held: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a weight; None if it is stored as it is.

        Args:
            weight: its name, as in files that are not quantised.
            held: see :func:`fcsd.models.quantised.layouts.stored_so`.

        Raises:
            BadInputError: the files hold it quantised, and the config says that it is not, or does not say how.
        """
        possible = [rule for rule in self.rules if rule.scheme is None or stored_so(rule.scheme, weight, held)]
        if all(rule.scheme is None for rule in possible):
            return None
        layer = weight.removesuffix(".weight")
        named = (rule.scheme for rule in possible if any(_names(target, layer) for target in rule.targets))
        found = takewhile(lambda scheme: scheme is not None, named)
        # Two schemes may have their codes in one name.
        scheme = min(filter(None, found), key=lambda one: len(lacking(one, weight, held)), default=None)
        ignored = next((entry for entry in self.ignore if _exactly(entry, layer)), None)
        if scheme is None or ignored is not None:
            why = f"ignores {_short(ignored)}" if ignored is not None else "does not say how"
            raise BadInputError(f"{_short(weight)}: the files hold it quantised, and quantization_config {why}")
        return scheme

    def scheme_named(self, layer: str) -> Scheme | None:
        """The scheme of a layer by its name alone, where no file is there to say whether it is quantised."""
        parts = layer.split(".")
        parents = [".".join(parts[: end + 1]) for end in range(len(parts))]
        if any(f".{entry}." in f".{layer}." or any(_exactly(entry, one) for one in parents) for entry in self.ignore):
            return None
        return next((rule.scheme for rule in self.rules if any(_names(one, layer) for one in rule.targets)), None)

    def unnamed(self, layers: Iterable[str]) -> list[str]:
        """The names in ``ignore`` that name nothing. Patterns may name nothing: they are written for many models.

        Args:
            layers: names of all layers and tensors.
        """
        text = "\n".join(f".{name}." for name in layers)
        plain = (entry for entry in self.ignore if not entry.startswith("re:") and "*" not in entry)
        whole = self.name == "compressed-tensors"  # the others take a part of a name, too
        return [entry for entry in plain if (f".{entry}." if whole else entry) not in text]


def _names(target: str, layer: str) -> bool:
    return target in EVERY or _exactly(target, layer) or f".{layer}".endswith(f".{target}")


def _exactly(entry: str, layer: str) -> bool:
    """Whether an entry of a config is the name of a layer, or a pattern of it."""
    if "*" in entry and not entry.startswith("re:"):
        entry = "re:" + ".*".join(map(re.escape, entry.split("*"))) + "$"
    if not entry.startswith("re:"):
        return entry == layer
    import regex  # as re, with a limit of time

    try:
        return regex.match(entry.removeprefix("re:"), layer, timeout=_SECONDS) is not None
    except (regex.error, TimeoutError) as error:
        raise BadInputError(f"quantization_config: {_short(entry)} is no pattern that can be used ({error})") from None


def _short(text: object) -> str:
    return bounded(str(text), 120)


def method_of(config: Any, path: str | Path | None = None) -> Method | None:
    """The method of a config of transformers, or of the file that ModelOpt writes beside it; None without one.

    Raises:
        BadInputError: see :func:`read_method`.
    """
    block = getattr(config, "quantization_config", None)
    if block is None and path is not None and (file := Path(path) / MODELOPT_FILE).is_file():
        try:
            block = read_file(file)
        except (StrictJsonError, OSError) as error:
            raise BadInputError(f"{file}: {error}") from None
    if block is None:
        return None
    return read_method(block if isinstance(block, dict) else block.to_dict(), path or "config")


def without_quantisation(config: Any) -> Any:
    """A copy of a config of transformers whose weights are plain."""
    plain = deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    return plain


def read_method(block: Any, where: str | Path) -> Method:
    """The method that a ``quantization_config``, or the content of ``MODELOPT_FILE``, describes.

    Args:
        where: the file or directory, for messages.

    Raises:
        BadInputError: fcsd does not read the method, or the config is malformed.
    """
    block = block if isinstance(block, dict) else {}
    inner = block.get("quantization")
    name = block.get("quant_method") or ("modelopt" if "quant_algo" in block or isinstance(inner, dict) else None)
    if name == "modelopt" and isinstance(inner, dict):
        block = inner
    try:
        if name not in _READERS:
            raise _Unsupported(f"quantisation {_short(repr(name))} is not supported")
        return _READERS[name](block)
    except _Unsupported as error:
        raise BadInputError(f"{where}: {error}", _way_out(Path(str(where)))) from None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise BadInputError(f"{where}: quantization_config is malformed ({type(error).__name__}: {error})") from None


def plain_copy(path: str | Path) -> str:
    """What to do where quantised weights cannot be used: the command that writes a copy in bf16, see ``load_model``."""
    line = f"import fcsd; fcsd.load_model({str(path)!r}).save_pretrained('OUT')"
    return f'Write a copy in bf16: python -c "{line}", and copy its tokenizer there.'


def _way_out(where: Path) -> str:
    """What to do about a method that is not read."""
    parts = (where.parent if where.suffix == ".json" else where).parts
    cached = next((part.split("--")[-1] for part in parts if part.startswith("models--")), None)  # the hub's cache
    folder = cached or (parts[-1] if parts else "")
    release = _RELEASE.sub("", folder)
    named = f"{release} in bf16" if release != folder else "the bf16 release that this model was made from"
    return (
        f"Supported: {', '.join(sorted(_READERS))}. Look for {named}, and pass that: fcsd convert ORG/NAME OUT. "
        "What comes out can be quantised (docs/quantised_models.md)."
    )


# One reader for each method


def _compressed(block: dict[str, Any]) -> Method:
    for key in ("sparsity_config", "transform_config"):
        inner = block.get(key) or {}
        if inner and inner.get("format", "") != "dense" and (key == "sparsity_config" or inner.get("config_groups")):
            told = inner.get("format") or "transforms of activations"
            raise _Unsupported(f"quantisation 'compressed-tensors' with {key} ({_short(told)}) is not supported")
    rules = []
    for group in block["config_groups"].values():
        weights = group.get("weights")
        scheme = None if weights is None else _of_group(weights, group.get("format") or block.get("format"))
        rules.append(Rule(_texts(group["targets"]), scheme))
    # a name is more than a class
    rules.sort(key=lambda rule: any(target in EVERY for target in rule.targets))
    return _made("compressed-tensors", rules, block.get("ignore"))


def _of_group(weights: dict[str, Any], form: str | None) -> Scheme:
    bits, floats, group = weights["num_bits"], weights.get("type", "int") == "float", weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    layouts = {"pack-quantized": "packed", "nvfp4-pack-quantized": "nvfp4"}
    layouts |= dict.fromkeys(("int-quantized", "float-quantized", "naive-quantized"), "plain")
    layout = layouts.get(form or "")
    told = f"{_short(form)}, {_short(bits)}-bit {'floats' if floats else 'integers'} by {_short(strategy)}"
    fits = {"packed": not floats and bits in range(1, 9), "plain": bits == 8, "nvfp4": floats and bits == 4}
    fits_strategy = strategy in ("tensor", "channel", "group", "tensor_group", "block")
    if layout is None or not fits[layout] or not fits_strategy or (layout == "packed" and strategy == "block"):
        raise _Unsupported(f"quantisation 'compressed-tensors' ({told}) is not supported")
    block = {"tensor": (0, 0), "channel": (1, 0)}.get(strategy)
    if block is None:
        block = _pair(weights["block_structure"]) if strategy == "block" else (1, _size(group))
    symmetric = weights.get("symmetric", True) is not False
    if layout == "packed" and not symmetric and strategy == "tensor":
        raise _Unsupported(f"quantisation 'compressed-tensors' ({told}, with a zero point) is not supported")
    ordered = str(weights.get("actorder")).lower() in ("group", "dynamic", "true")
    return Scheme(layout, bits, block, floats, symmetric, ordered)


def _awq(block: dict[str, Any]) -> Method:
    bits, version = block.get("bits", block.get("w_bit")), str(block.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or block.get("zero_point", True) is not True:
        told = f"{_short(bits)} bits, version {_short(version)}, zero_point {_short(block.get('zero_point'))}"
        raise _Unsupported(f"quantisation 'awq' ({told}) is not supported; 4 bits of version gemm with zero points are")
    scheme = Scheme("awq", 4, _groups(block.get("group_size", block.get("q_group_size"))), symmetric=False)
    return _made("awq", [Rule(EVERY, scheme)], block.get("modules_to_not_convert"))


def _gptq(block: dict[str, Any]) -> Method:
    form = block.get("checkpoint_format") or block.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2") or block.get("is_marlin_format"):
        form = "marlin" if block.get("is_marlin_format") else form
        raise _Unsupported(f"quantisation 'gptq' (checkpoint_format {_short(form)}) is not supported")

    def scheme(settings: dict[str, Any]) -> Scheme:
        if settings["bits"] not in (2, 3, 4, 8):
            raise _Unsupported(f"quantisation 'gptq' ({_short(settings['bits'])} bits) is not supported")
        ordered, offset = settings.get("desc_act") is True, int(form == "gptq")
        return Scheme("gptq", settings["bits"], _groups(settings.get("group_size")), False, False, ordered, offset)

    rules = []
    for pattern, own in (block.get("dynamic") or {}).items():  # settings of single layers, as GPTQModel writes them
        target = "re:" + pattern.removeprefix("+:").removeprefix("-:")
        rules.append(Rule((target,), None if pattern.startswith("-:") else scheme(block | own)))
    ignore = block.get("modules_to_not_convert")
    return _made("gptq", [*rules, Rule(EVERY, scheme(block))], ignore)


# How AutoRound packs -> what is added to zero points as GPTQ packs them; None where it packs as AWQ does.
_PACKED = {"auto_round:auto_gptq": 1, "auto_round:gptqmodel": 0, "auto_round": 0, "auto_round:auto_awq": None}


def _auto_round(block: dict[str, Any]) -> Method:
    packing = block.get("packing_format", "auto_round:auto_gptq")
    inputs = block.get("act_bits") or 16
    if packing not in _PACKED or block.get("data_type", "int") != "int" or inputs < 16 or block.get("rotation_config"):
        told = (
            f"packing_format {_short(packing)}, data_type {_short(block.get('data_type'))}, act_bits {_short(inputs)}"
        )
        told += ", rotation_config" if block.get("rotation_config") else ""
        raise _Unsupported(
            f"quantisation 'auto-round' ({told}) is not supported; integers packed as by GPTQ or AWQ are"
        )

    def scheme(settings: dict[str, Any]) -> Scheme:
        bits, groups, offset = settings["bits"], _groups(settings["group_size"]), _PACKED[packing]
        if bits not in ((2, 3, 4, 8) if offset is not None else (4,)):
            raise _Unsupported(f"quantisation 'auto-round' ({_short(bits)} bits, {packing}) is not supported")
        if offset is None:
            return Scheme("awq", bits, groups, symmetric=False)
        return Scheme("gptq", bits, groups, symmetric=False, offset=offset)

    rules = []
    for name, own in (block.get("extra_config") or {}).items():  # settings of single layers, by name or by pattern
        target = f"re:.*(?:{name})" if set(name) & set("*+?^$()[]{}|\\") else name
        rules.append(Rule((target,), None if (own.get("bits") or block["bits"]) >= 16 else scheme(block | own)))
    return _made("auto-round", [*rules, Rule(EVERY, scheme(block))], None)


def _fp8(block: dict[str, Any]) -> Method:
    for key, usual in (("expert_dtype", ("fp8",)), ("fmt", ("e4m3", "float8_e4m3fn"))):
        if block.get(key) not in (None, *usual):
            raise _Unsupported(f"quantisation 'fp8' ({key} {_short(block[key])}) is not supported")
    shape = block.get("weight_block_size", (128, 128))
    rules = [Rule(EVERY, Scheme("inverse", 8, (0, 0) if shape is None else _pair(shape), True))]
    if block.get("weight_block_size") is None:  # as AutoFP8 writes it, one for a matrix
        rules.append(Rule(EVERY, Scheme("plain", 8, (0, 0), True)))
    return _made("fp8", rules, block.get("modules_to_not_convert", block.get("ignored_layers")))


def _fbgemm(block: dict[str, Any]) -> Method:
    return _made("fbgemm_fp8", [Rule(EVERY, Scheme("plain", 8, (1, 0), True))], block.get("modules_to_not_convert"))


def _mxfp4(block: dict[str, Any]) -> Method:
    return _made("mxfp4", [Rule(EVERY, Scheme("mxfp4", 4, (1, 32), True))], block.get("modules_to_not_convert"))


def _modelopt(block: dict[str, Any]) -> Method:
    def scheme(algorithm: Any, group: Any) -> Scheme:
        blocks = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0)}
        if algorithm in blocks:
            return Scheme("modelopt8", 8, blocks[algorithm], True)
        if algorithm in ("NVFP4", "W4A16_NVFP4"):
            return Scheme("modelopt4", 4, (1, _size(16 if group is None else group)), True)
        raise _Unsupported(f"quantisation 'modelopt' ({_short(algorithm)}) is not supported")

    algorithm, ignore = block.get("quant_algo"), block.get("ignore", block.get("exclude_modules"))
    if algorithm == "MIXED_PRECISION":
        layers: dict[str, dict[str, Any]] = block["quantized_layers"]
        rules = [Rule((_text(name),), scheme(one["quant_algo"], one.get("group_size"))) for name, one in layers.items()]
        return _made("modelopt", rules, ignore)
    groups = block.get("config_groups") or {}
    size = next((group["weights"].get("group_size") for group in groups.values() if group.get("weights")), None)
    return _made("modelopt", [Rule(EVERY, scheme(algorithm, block.get("group_size", size)))], ignore)


_READERS: dict[Any, Callable[[dict[str, Any]], Method]] = {
    "compressed-tensors": _compressed,
    "auto-round": _auto_round,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


def _made(name: str, rules: list[Rule], ignore: Any) -> Method:
    method = Method(name, tuple(rules), _texts(ignore or []))
    if not method.schemes:
        raise ValueError("it quantises no layer")
    if (bits := next((scheme.bits for scheme in method.schemes if type(scheme.bits) is not int), None)) is not None:
        raise ValueError(f"{_short(bits)} is no number of bits")
    return method


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError("a list of names is none")
    return tuple(map(_text, value))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("a name is no text")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 < value <= 1 << 20:
        raise ValueError(f"{_short(value)} is no size of a group")
    return value


def _groups(value: Any) -> tuple[int, int]:
    return (1, 0) if value == -1 else (1, _size(value))


def _pair(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{_short(value)} is no size of a block")
    return _size(value[0]), _size(value[1])
