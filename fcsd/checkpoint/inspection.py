"""The command ``fcsd inspect``: describes a model by its headers, compared as ``convert`` compares them."""

import json
import re
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from fcsd.checkpoint.config_json import (
    AMD_CLASS,
    GATED_ATTENTION,
    CheckpointConfig,
    describe,
    has_gated_attention,
    read_config,
)
from fcsd.checkpoint.files import INDEX, LAYERS, SINGLE, Layout, read_layout, read_object, shown
from fcsd.checkpoint.location import open_checkpoint
from fcsd.checkpoint.staging import OTHER_WEIGHTS, side_files
from fcsd.checkpoint.tokenizer import tokenizer_file
from fcsd.checkpoint.verify import Comparison, compare_tensors, differing_copies
from fcsd.errors import BadInputError
from fcsd.models.archs import ARCHS
from fcsd.models.config_keys import EXPERTS_PER_TOKEN, PREFIX, SHARED_EXPERTS, expert_count, first_count
from fcsd.models.products import product

_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
# The files of Granite's MoE have all experts' tensors in the block itself.
_SHARED = re.compile(r"shared?_(?:experts?|mlp)\.")
_EXPERT = re.compile(
    rf"{LAYERS}(\d+)\.(?:(?:\w+\.)?experts|block_sparse_moe\.(?:in|out)put_linear|moe\.(?:gate|up|down)_proj)\.(?!e_score_correction_bias)"
)


@dataclass(frozen=True)
class Inspection:
    """The description of a checkpoint.

    Parameters are counted over the tensors that the base class loads. ``bytes`` counts all weights files.

    Attributes:
        family: the names under which models of this type are published; None if fcsd does not know them.
        hub_id: ``org/name`` as config.json has it; None if it has none, or the path of a directory.
        active_parameters: the parameters that one token uses: all but those of the experts it is not routed to.
        dtypes: dtype -> the bytes that are stored in it.
        quantization: the method by which weights are quantised, by its name; None if they are not.
        stored_as: the same in words, with the bits and what shares a scale.
        wirings: the values that ``convert --wiring`` accepts for this model; empty if the model is rewired already.
        original: what a model that fcsd converted records of its original: its path on this machine or its hub id, or
            only its name if the directory came from elsewhere; None for other models.
        carried: tensors that are in the files and that the base class does not load.
        tokenizer: the name of the file that holds the tokenizer's vocabulary; None if there is none. Weights alone can
            be converted, but not trained or evaluated.
        verified: whether the tensors were compared with those of transformers' class. Those of AMD's models are not,
            because transformers has no class of them.
        problems: the shards and tensors that are missing or damaged, the first damaged file beside them, and the parts
            of the architecture that transformers does not implement, one line each. ``convert`` refuses a model with
            problems.
    """

    model: str
    revision: str | None
    gated: bool
    model_type: str
    family: str | None
    hub_id: str | None
    architecture: str
    layers: int
    dense_layers: int
    moe_layers: int
    experts: int
    experts_per_token: int
    shared_experts: int
    parameters: int | None
    active_parameters: int | None
    bytes: int
    shards: int
    dtypes: dict[str, int]
    quantization: str | None
    stored_as: str | None
    wirings: list[str]
    rewired: dict[str, Any] | None
    original: str | None
    carried: list[str]
    tokenizer: str | None
    verified: bool
    problems: list[str]

    def to_json(self) -> str:
        """All fields as JSON, in the order of the class."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """The description as text, one aligned line per fact."""
        experts = f", {self.shared_experts} shared" if self.shared_experts else ""
        files = f"{self.shards} file{'s' * (self.shards != 1)}"
        lines = {
            "model": self.model + (f" @ {self.revision}" if self.revision else "") + (" (gated)" if self.gated else ""),
            "architecture": f"{self.architecture} ({self.model_type})",
            "published as": ", ".join(filter(None, (self.family, self.hub_id and f"here {self.hub_id}"))),
            "layers": f"{self.layers}"
            + (f" ({self.dense_layers} dense, {self.moe_layers} MoE)" if self.experts else ""),
            "experts": f"{self.experts}, {self.experts_per_token} per token{experts}" if self.experts else "none",
            "parameters": f"{_short(self.parameters)}, {_short(self.active_parameters)} active",
            "size": f"{_short(self.bytes, 'kMGT')}B in {files}" if self.shards else "",
            "dtypes": ", ".join(self.dtypes) + (f" ({self.stored_as})" if self.stored_as else ""),
            "wirings": ", ".join(self.wirings) or f"none: {self._why_none()}",
            "rewired": describe(self.rewired) if self.rewired else "no",
            "original": self._original(),
            "not loaded": f"{len(self.carried)} tensors, kept as they are ({shown(self.carried[0])}, ...)"
            if self.carried
            else "",
            "tokenizer": "" if self.tokenizer else "none: to train or evaluate the model, copy its tokenizer.json here",
            "checked": self._checked(),
        }
        text = [f"{name:<13} {value}" for name, value in lines.items() if value]
        return "\n".join([*text, *(f"{'problem':<13} {problem}" for problem in self.problems)])

    def _why_none(self) -> str:
        if self.rewired and self.rewired["by"] != "fcsd" and self.architecture == AMD_CLASS and not self.problems:
            return "the model was trained with its own, which `fcsd convert` keeps"
        return "pass the original model to rewire it"

    def _original(self) -> str:
        if self.original is None:
            return ""
        gone = Path(self.original).is_absolute() and not Path(self.original).exists()
        return shown(self.original) + (", which is no longer there" if gone else "")

    def _checked(self) -> str:
        if self.verified:
            return "every tensor, against the class of transformers"
        if not self.shards:
            return "config.json alone: the class of transformers can be built from it"
        return "headers and config.json; transformers has no class of this model"


def inspect_checkpoint(model: str | Path, *, trust_remote_code: bool = False) -> Inspection:
    """Describe a model. For a model on the hub, only small files and the headers of its weights are fetched.

    Args:
        model: a directory or ``org/name[@revision]``.
        trust_remote_code: accept an ``auto_map``; no code of the checkpoint is ever run.

    Raises:
        BadInputError: the model is not a checkpoint, is malformed, is of an unsupported type, transformers cannot
            build it, or its only weights file is unusable. Missing tensors, and missing and damaged shards of several,
            are reported in the result instead, and so is that a directory has a config.json and no weights at all.
    """
    try:
        alone = _is_config_alone(Path(model))
        source = open_checkpoint(model, weights=not alone, headers=True, trust_remote_code=trust_remote_code)
    except BadInputError:
        if _names_another_type(Path(model)):
            read_config(Path(model))  # refuses the type, whatever else is missing
        raise
    config = source.config
    if alone:
        layout = Layout(source.path, None, {}, {}, {SINGLE: f"no weights: {source.path} holds config.json alone"})
    else:
        layout = read_layout(source.path, strict=False, remote=source.remote())
    if layout.problems and not layout.indexed and not alone:  # no tensor is left to describe
        [problem] = layout.problems.values()
        raise BadInputError(problem, "If the file is damaged, download it again.")
    comparison, differing = None, []
    if not config.foreign:
        comparison = compare_tensors(layout, config)
        differing = differing_copies(layout, comparison.tied)
    tensors, row = layout.tensors, ARCHS.get(config.model_type)
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + tensor.end - tensor.start
    return Inspection(
        model=source.name,
        revision=source.revision,
        gated=source.gated,
        model_type=config.model_type,
        family=product(config.model_type),
        hub_id=_hub_id(config.raw),
        **_shape(config, comparison, list(tensors)),
        bytes=layout.bytes,
        shards=0 if alone else len(layout.shards) + len(layout.problems.keys() - layout.shards.keys()),
        dtypes=dtypes,
        quantization=config.quantization,
        stored_as=None if config.method is None else str(config.method),
        rewired=config.rewired,
        original=source.original,
        carried=comparison.carried if comparison else [],
        tokenizer=tokenizer_file(source.path),
        verified=comparison is not None and not alone,
        problems=_problems(layout, comparison)
        + _damaged_beside(source.path)
        + differing
        + list(filter(None, [source.size_problem]))
        + _absent_layer(config)
        + ([GATED_ATTENTION] if has_gated_attention(config.raw) and (row is None or row.blocks.gated is None) else []),
    )


def _is_config_alone(path: Path) -> bool:
    """Whether a directory has the config.json of a model and no weights of any kind."""
    if "model_type" not in _raw(path):
        return False
    names = [entry.name for entry in path.iterdir()]
    return not any(name.endswith((*OTHER_WEIGHTS, INDEX)) or name == "model_index.json" for name in names)


def _names_another_type(path: Path) -> bool:
    """Whether the config.json of a directory names a type, or one of a language model inside, that fcsd lacks."""
    raw = _raw(path)
    declared, text = raw.get("model_type"), raw.get("text_config")
    row = ARCHS.get(str(declared).removeprefix(PREFIX))
    inside = text.get("model_type") if isinstance(text, dict) else None
    return declared is not None and (row is None or row.unsupported(inside) is not None)


def _raw(path: Path) -> dict[str, Any]:
    """The content of the config.json of a directory; empty if it cannot be read."""
    try:
        return read_object(path / "config.json")
    except BadInputError:
        return {}


def _hub_id(raw: dict[str, Any]) -> str | None:
    """The name on the hub under which the model was loaded when config.json was written."""
    name = raw.get("_name_or_path")
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else None


def _shape(config: CheckpointConfig, comparison: Comparison | None, names: list[str]) -> dict[str, Any]:
    """The fields that describe the architecture.

    They are taken from the comparison. For AMD's models they are taken from the config and the headers.
    """
    text = comparison.text if comparison else config.text
    parameters = comparison.parameters if comparison else {}
    layers = text.get("num_hidden_layers") or 0
    moe = {int(match[1]) for name in (parameters or names) if (match := _EXPERT.search(name))}
    moe = {layer for layer in moe if layer < layers}
    experts = expert_count(text) if moe else 0
    per_token = first_count(text, EXPERTS_PER_TOKEN) if experts else 0
    sizes = {name: prod(shape) for name, shape in parameters.items()}
    # A shared expert of width 0 computes nothing, although transformers gives it empty tensors.
    shared = bool(moe) and any(_SHARED.search(name) and sizes.get(name, 1) for name in sizes or names)
    routed = sum(size for name, size in sizes.items() if _EXPERT.search(name))
    total = sum(sizes.values())
    row = config.arch if config.model_type in ARCHS else None
    architectures = config.raw.get("architectures") or [row.causal_lm if row else "unknown"]
    return {
        "architecture": str(architectures[0]),
        "layers": layers,
        "dense_layers": layers - len(moe),
        "moe_layers": len(moe),
        "experts": experts,
        "experts_per_token": per_token,
        "shared_experts": (first_count(text, SHARED_EXPERTS) or 1) if shared else 0,
        "parameters": total if comparison else None,
        "active_parameters": (total - routed + routed * per_token // max(experts, 1)) if comparison else None,
        "wirings": list(row.wirings) if row and config.rewired is None else [],
    }


def _problems(layout: Layout, comparison: Comparison | None) -> list[str]:
    kinds = comparison.problems() if comparison else {}
    if layout.problems:
        kinds.pop("missing", None)  # tensors of an unusable shard are missing too; the shard is reported
    return [*layout.problems.values(), *kinds.values()]


def _absent_layer(config: CheckpointConfig) -> list[str]:
    """That the fcsd block rewires a layer that the model does not have."""
    layers, count = (config.rewired or {}).get("layers"), config.text.get("num_hidden_layers") or 0
    if layers and layers[-1] >= count:
        return [f"the fcsd block of config.json rewires layer {layers[-1]}, and the model has {count} layers"]
    return []


def _damaged_beside(path: Path) -> list[str]:
    """What is wrong with the first unusable file beside the weights, such as a tokenizer.json that was cut off."""
    try:
        side_files(path)
    except BadInputError as error:
        return [str(error)]
    return []


def _short(number: int | None, units: str = "kMBT") -> str:
    """A number in short form, for example ``108 B`` for 108 225 039 360 parameters."""
    if number is None:
        return "unknown"
    power = max(0, (len(str(number)) - 1) // 3)
    return f"{number / 1000**power:.3g} {('', *units)[power]}"
