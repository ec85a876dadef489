"""Compares names, shapes and dtypes of the tensors in the headers with those that config.json describes.

Tensors that config.json ties to one another, such as the output head, but that the files hold apart, are compared too.
transformers keeps both if they differ, and other programs (vLLM, a model built without its weights) tie them by the
config. Such a checkpoint would compute different functions, so it is refused wherever tensors are verified.

The expected tensors are not listed here. transformers builds the base class on the meta device, which takes no memory,
and ``weights.stored`` says how files name its tensors.
"""

import math
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, fields
from inspect import getattr_static
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.checkpoint.config_json import CheckpointConfig
from fcsd.checkpoint.files import LAYERS, Layout, TensorInfo, quoted, shown, with_floats
from fcsd.errors import BadInputError
from fcsd.foreign_errors import reason_of
from fcsd.models.archs import ARCHS
from fcsd.models.config_keys import EXPERT_COUNTS, UNTIE, WEIGHTS_FILE
from fcsd.models.quantised.layouts import BESIDE, FLOATS, held_of
from fcsd.models.quantised.method import Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fcsd.checkpoint.weights import Reader

Shape = tuple[int, ...]
_WITHOUT_FILES = 2000  # tensors that are assumed where there are none, so that a config of any size ends in time
_SHOWN = 5  # the most names in a message
_NOT_FOR_BUILDING = ("auto_map", "fcsd", WEIGHTS_FILE, "quantization_config", "model_type", "architectures", "farskip")


@dataclass(frozen=True)
class Comparison:
    """The differences between config.json and the headers, by on-disk names.

    Attributes:
        parameters: every tensor of the base model without quantisation: name -> shape. Tied copies are left out.
        missing: tensors that are expected and not in the files.
        unexpected: tensors in the files that are neither expected nor declared by the base class as ignored.
        wrong: descriptions of the tensors that have another shape or dtype than expected.
        carried: tensors that the base class ignores (multi-token-prediction layers). They are kept and never loaded.
        tied: the copies that config.json ties to other tensors: name of the copy -> name of the other tensor.
        text: the decoder's config with transformers' defaults filled in.
    """

    parameters: dict[str, Shape]
    missing: list[str]
    unexpected: list[str]
    wrong: list[str]
    carried: list[str]
    text: dict[str, Any] = field(repr=False)
    tied: dict[str, str] = field(default_factory=dict)

    def problems(self) -> dict[str, str]:
        """The number and first names of the missing, unexpected and wrong tensors, without the kinds that have none."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected, "wrong": self.wrong}
        return {kind: _some(kind, names) for kind, names in kinds.items() if names}


def verify_tensors(layout: Layout, config: CheckpointConfig) -> Comparison:
    """Compare a checkpoint's headers with its config.

    Raises:
        BadInputError: a tensor is missing, is unexpected, or has another shape or dtype than in the base class. Tied
            copies may be present or absent; one that is present has the values of the tensor to which it is tied.
    """
    comparison = compare_tensors(layout, config)
    if problems := comparison.problems():
        hint = "config.json belongs to another model, or the checkpoint is incomplete: download it again."
        if problems.keys() == {"unexpected"} and all(_is_further(name, config) for name in comparison.unexpected):
            hint = f"They predict further tokens, which fcsd does not carry for {config.model_type}: remove them."
        if "fc.weight" in comparison.unexpected:
            hint = "It is a draft head: give it to vLLM beside its model, as `model` of --speculative-config."
        raise BadInputError(f"{layout.path}: the files do not match config.json: {'; '.join(problems.values())}", hint)
    if differing := differing_copies(layout, comparison.tied):
        raise BadInputError(f"{layout.path}: {'; '.join(differing)}", UNTIE)
    return comparison


def _is_further(name: str, config: CheckpointConfig) -> bool:
    """Whether a tensor lies in a layer after the last one, or in a module for multi-token prediction."""
    layer = re.search(rf"(?:^|\.){LAYERS}(\d+)\.", name)
    later = layer is not None and int(layer[1]) >= (config.text.get("num_hidden_layers") or math.inf)
    return later or re.search(r"(?:^|\.)(?:mtp|nextn)", name) is not None


def compare_tensors(layout: Layout, config: CheckpointConfig) -> Comparison:
    """Compare as :func:`verify_tensors` does, but report a mismatch instead of raising.

    Raises:
        BadInputError: transformers cannot build the config, or the config describes far more tensors than the files
            could hold.
    """
    from fcsd.checkpoint.weights import stored

    tensors = layout.tensors
    held = max(len(tensors), len(layout.weight_map or ())) if layout.shards or layout.weight_map else _WITHOUT_FILES
    _refuse_inflated(held, config, layout.path)
    model = _on_meta(config, layout.path)
    state = model.state_dict()
    tied = set(model.all_tied_weights_keys)
    parameters = _shapes(stored(model, {name: tensor for name, tensor in state.items() if name not in tied}, tensors))
    copies = _shapes(stored(model, {name: tensor for name, tensor in state.items() if name in tied}, tensors))
    expected, optional = _expected(parameters, tensors, config.method)
    optional |= {name: ((shape,), FLOATS) for name, shape in copies.items()}

    text = model.config.get_text_config()
    carried_patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"}
    lacking_patterns = model._keys_to_ignore_on_load_missing or ()
    named = [*tensors, *(name for name, _ in model.named_modules())]
    left_over = [name for name in tensors if name not in expected and name not in optional]
    if config.method is not None:
        carried_patterns |= {BESIDE}
    return Comparison(
        parameters,
        missing=[name for name in expected if name not in tensors and not _matches(name, lacking_patterns)],
        unexpected=[name for name in left_over if not _matches(name, carried_patterns)],
        wrong=_contradictions(config.method if tensors else None, expected, parameters, named)
        + [
            f"{shown(name)} is {found.dtype} {list(found.shape)}, not {'/'.join(dtypes)} {list(shapes[0])}"
            for name, (shapes, dtypes) in {**expected, **optional}.items()
            if (found := tensors.get(name)) and (found.shape not in shapes or found.dtype not in dtypes)
        ],
        carried=[name for name in left_over if _matches(name, carried_patterns)],
        text={**text.to_dict(), "num_hidden_layers": text.num_hidden_layers},
        tied={
            one: other
            for copy, source in model.all_tied_weights_keys.items()
            for one, other in zip(
                *(stored(model, {name: state[name]}, tensors) for name in (copy, source)), strict=True
            )
        },
    )


def _refuse_inflated(held: int, config: CheckpointConfig, where: Path) -> None:
    """Refuse a config with many more layers or experts than the files have tensors, before the model is built."""
    parts = [config.text, *filter(None, [config.raw.get("vision_config")])]
    layers = sum(part.get("num_hidden_layers") or 0 for part in parts)
    if layers > held:
        raise BadInputError(f"{where}: config.json says {layers} layers, but the files hold only {held} tensors")
    per_layer = max(config.text.get(key) or 0 for key in EXPERT_COUNTS)
    if layers * per_layer > 10 * held + 100_000:
        raise BadInputError(
            f"{where}: config.json says {per_layer} experts in {layers} layers, but the files hold only {held} tensors"
        )


def _on_meta(config: CheckpointConfig, where: Path) -> "PreTrainedModel":
    """The base class of transformers on the meta device, built without code from the checkpoint."""
    import torch
    import transformers

    from fcsd.models.build import causal_lm_class

    row = ARCHS[config.model_type]
    raw = deepcopy({key: value for key, value in config.raw.items() if key not in _NOT_FOR_BUILDING})
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key in [key for key in part if key.endswith("_implementation")]:
            del part[key]
    _refuse_shadowing(raw, getattr(transformers, row.config), where)
    try:
        built = getattr(transformers, row.config).from_dict(with_floats(raw), attn_implementation="eager")
        with torch.device("meta"):
            return causal_lm_class(built)(built)
    except Exception as error:  # unchecked values can fail anywhere in transformers
        raise BadInputError(f"{where}: transformers cannot build this config.json ({reason_of(error)})") from error


def _refuse_shadowing(raw: dict[str, Any], config_class: Any, where: Path) -> None:
    """Refuse keys that would replace a method or a table of transformers' config class."""
    own = {field.name for field in fields(config_class)}
    taken = {*dir(config_class), *dir(type(config_class))} - own  # looking up each key would be slow: they can be many
    for part in (raw, *(value for value in raw.values() if isinstance(value, dict))):
        for key in part.keys() & taken:
            attribute = getattr_static(config_class, key, None)
            if not isinstance(attribute, property | str | float | None):
                raise BadInputError(f"{where}: config.json has the key {quoted(key)}, which is no setting")


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Shape]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


Expected = dict[str, tuple[tuple[Shape, ...], tuple[str, ...]]]  # name -> the shapes and dtypes that it may have


def _expected(
    parameters: dict[str, Shape], tensors: Mapping[str, TensorInfo], method: Method | None
) -> tuple[Expected, Expected]:
    """The tensors that files must have, and those that they may have. A quantised model may hold any as it is."""
    needed: Expected = {}
    optional: Expected = {}
    for name, shape in parameters.items():
        scheme = None if method is None or len(shape) < 2 else method.scheme_of(name, tensors)
        if scheme is None:
            needed[name] = ((shape,), FLOATS)
            continue
        try:
            held = held_of(scheme, name, shape)
        except ValueError as error:
            raise BadInputError(f"{shown(name)}: {error}") from None
        for own, one in held.items():
            (needed if one.needed else optional)[own] = (one.shapes, one.dtypes)
    return needed, optional


def _contradictions(
    method: Method | None, expected: Expected, parameters: dict[str, Shape], names: list[str]
) -> list[str]:
    """In what the config of a quantised model contradicts its files as a whole."""
    if method is None:
        return []
    found = [f"quantization_config ignores {shown(name)}, which names nothing" for name in method.unnamed(names)]
    if all(dtypes == FLOATS for _, dtypes in (expected[name] for name in parameters if name in expected)) and (
        expected.keys() <= parameters.keys()
    ):
        found.append(f"no tensor is quantised as config.json says: {method}")
    return found


def _matches(name: str, patterns: Any) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _some(kind: str, names: list[str]) -> str:
    first = ", ".join(shown(name) for name in names[:_SHOWN])
    return f"{len(names)} {kind} ({first}{', ...' if len(names) > _SHOWN else ''})"


_ROWS = 4096  # rows that are compared at a time, so that no tensor is in memory as a whole


def differing_copies(layout: Layout, tied: Mapping[str, str]) -> list[str]:
    """The tied tensors whose values differ in the files, in words.

    Args:
        layout: the checkpoint. A tensor whose file is not on this machine is not compared.
        tied: on-disk name of a copy -> on-disk name of the tensor that it is tied to. Either may be missing from the
            files.
    """
    from fcsd.checkpoint.weights import Reader

    here = layout.here
    with Reader(layout) as reader:
        return [
            f"{shown(copy)} differs from {shown(source)}, to which config.json ties it"
            for copy, source in tied.items()
            if {copy, source} <= here and not _equal_values(layout, reader, copy, source)
        ]


def _equal_values(layout: Layout, reader: "Reader", copy: str, source: str) -> bool:
    import torch

    from fcsd.checkpoint.weights import DTYPES

    one, other = layout.tensors[copy], layout.tensors[source]
    if one.shape != other.shape:
        return False
    for start in range(0, one.shape[0], _ROWS):
        part = (start, min(_ROWS, one.shape[0] - start))
        if one.dtype == other.dtype and torch.equal(reader.raw(copy, part=part), reader.raw(source, part=part)):
            continue
        if not {one.dtype, other.dtype} <= DTYPES.keys():
            return False
        if not torch.equal(reader.tensor(copy, part=part).double(), reader.tensor(source, part=part).double()):
            return False
    return True
