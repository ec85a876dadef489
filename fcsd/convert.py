"""The command ``fcsd convert``: writes a converted copy of a checkpoint to another directory.

The shards are linked, config.json and code are written, and parity with the original is proven. No tensor is rewritten,
and none is scanned but the scales of quantised weights. The directory is built beside OUT and renamed into place, so
OUT exists as a whole or not at all.
"""

import json
import logging
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fcsd.checkpoint import open_checkpoint
from fcsd.checkpoint.config_json import AMD_CLASS, AMD_KEYS, CheckpointConfig, check_type, describe
from fcsd.checkpoint.files import with_floats
from fcsd.checkpoint.staging import check_out, copy_small, staged, take_over, without_code
from fcsd.disk import write_text
from fcsd.errors import ConfigError
from fcsd.models.arch import Arch
from fcsd.models.export_template import converted_files
from fcsd.models.selection import layers_text, select_layers
from fcsd.models.wiring_block import BORDERS, Wiring
from fcsd.parity import Proof, plan_proof, prove_parity

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConvertReport:
    """What :func:`convert_checkpoint` did, or with ``dry_run`` what it would do.

    Attributes:
        model: the original: its directory, or its id on the hub.
        revision: the commit on the hub; None for a directory.
        out: the converted directory.
        wiring: the ``fcsd`` block of the new config.json.
        depth: the number of decoder layers.
        shards: the number of weights files.
        bytes: the size of these files.
        copied_bytes: how many of these bytes were copied because their file could not be linked.
        files: the names of all files in OUT but the shards.
        parity: how many of the first layers were compared with the original; None if no layer was compared.
        parity_skipped: why no layer was compared; None if layers were compared.
        dry_run: whether the call was a dry run, which writes nothing.
    """

    model: str
    revision: str | None
    out: str
    wiring: dict[str, Any]
    depth: int
    shards: int
    bytes: int
    copied_bytes: int
    files: list[str]
    parity: int | None
    parity_skipped: str | None
    dry_run: bool

    def to_json(self) -> str:
        """All fields as JSON, in the order of the class."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """The report as text, one aligned line per fact."""
        from rich.filesize import decimal

        block = self.wiring
        extras = [f"{block['border']} border"] if _has_border(block) else []
        extras += [f"{key} {block[key]}" for key in ("distance", "tp_degree") if block[key] > 1]
        how = f"{decimal(self.copied_bytes)} copied" if self.copied_bytes else "linked, no byte copied"
        if self.dry_run:
            how = "to be linked, or copied to another file system"
        proven = f"bit-identical with the wiring off: first {self.parity} of {self.depth} layers"
        lines = {
            "model": self.model + (f" @ {self.revision}" if self.revision else ""),
            "wiring": ", ".join([describe({"by": "fcsd", **block}).removesuffix(", by fcsd"), *extras]),
            "weights": f"{decimal(self.bytes)} in {self.shards} file{'s' * (self.shards != 1)}, {how}",
            "files": ", ".join(self.files),
            "parity": proven if self.parity_skipped is None else f"not proven: {self.parity_skipped}",
            "out": self.out + (" (dry run: nothing was written)" if self.dry_run else ""),
        }
        return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def convert_checkpoint(
    model: str | Path,
    out: str | Path,
    *,
    wiring: str = "farskip",
    layers: str = "all",
    variant: str = "full",
    border: str | None = None,
    tp_degree: int = 1,
    reduce: str | None = None,
    distance: int = 1,
    check: bool = True,
    dry_run: bool = False,
    force: bool = False,
    trust_remote_code: bool = False,
) -> ConvertReport:
    """Write a converted copy of a checkpoint.

    Args:
        model: directory or hub id (``org/name[@revision]``) of an original.
        out: directory to write; it must be empty or not exist.
        wiring: see ``fcsd.models.wiring_block.NAMES``.
        layers: see ``fcsd.models.selection.select_layers``.
        variant: ``full``, ``attn-only`` or ``mlp-only``.
        border: ``full`` or ``partial``, the stream that a converted layer reads after a layer that is not converted;
            None is the wiring's default, see ``fcsd.models.wiring_block.BORDERS``.
        tp_degree: the simulated tensor-parallel degree, for Desync only.
        reduce: which reductions ``desync`` keeps, see ``fcsd.models.wiring_block.kept_reductions``.
        distance: the number of sub-block outputs that may be in flight at a rewired read.
        check: prove parity with the original before ``out`` appears.
        dry_run: check everything and write nothing. Only small files and headers of a hub repository are fetched.
        force: replace an ``out`` that fcsd wrote.
        trust_remote_code: accept a checkpoint that asks for code of its own. That code is never run or copied: fcsd
            uses the classes of transformers.

    Raises:
        BadInputError: the checkpoint cannot be used; see ``fcsd.checkpoint``.
        ConfigError: the wiring does not fit the checkpoint, ``out`` may not be written, or another process has
            written there in the meantime.
        DiskError: ``out`` may not be written, or the shards must be copied and there is not enough space for them.
        FcsdError: parity does not hold.
    """
    out = Path(out)
    how: dict[str, Any] = {
        "variant": variant,
        "border": border,
        "tp_degree": tp_degree,
        "reduce": reduce,
        "distance": distance,
    }
    source = open_checkpoint(model, headers=dry_run, trust_remote_code=trust_remote_code)
    former = check_out(out, [source.path], force=force)
    config = source.config
    if config.foreign and config.raw.get("architectures") == [AMD_CLASS]:
        check_type(config, source.path / "config.json")
    else:
        source.require_original()
    arch = config.arch
    asked_wiring(config, arch, wiring, layers, **how)  # what it refuses is refused before torch is imported
    comparison = source.verify()
    layout = source.layout
    if config.method is not None:
        from fcsd.checkpoint.weights import check_values

        check_values(layout, config.method, comparison.parameters)

    chosen = choose_wiring(config, arch, wiring, layers, **how)
    hashed = not (dry_run and source.repo_id)  # a dry run does not download the shards of a repository
    hashed = hashed and not config.foreign  # such a model's teacher is a copy, whose config.json differs
    block = chosen.to_block(**source.origin(hashed=hashed))
    raw = {key: value for key, value in config.raw.items() if key not in AMD_KEYS}
    texts = converted_files(raw, arch, block)
    others = source.side_files(texts.keys())
    texts |= without_code(others) | source.base_path_file()
    proof = plan_proof(layout, config, arch)
    skipped = _why_not(check, dry_run, proof)
    copied = 0
    if not skipped or dry_run:
        log.info(proof.to_text())
    if not dry_run:
        with staged(out, former) as stage:
            copied = take_over(layout.files, stage)
            copy_small(others, stage)
            for name, text in texts.items():
                write_text(stage / name, text)
            if not skipped:
                prove_parity(layout, stage, config, arch, proof.layers)
    return ConvertReport(
        source.name,
        source.revision,
        str(out),
        block,
        config.text["num_hidden_layers"],
        len(layout.shards),
        layout.bytes,
        copied,
        sorted(texts.keys() | others.keys()),
        None if skipped else proof.layers,
        skipped,
        dry_run,
    )


def _has_border(block: dict[str, Any]) -> bool:
    """Whether the border matters: a converted layer follows one that is not, and its attention has a choice."""
    follows = any(layer and layer - 1 not in block["layers"] for layer in block["layers"])
    return follows and block["wiring"] in BORDERS and block["variant"] != "mlp-only"


def _why_not(check: bool, dry_run: bool, proof: Proof) -> str | None:
    """Why the parity proof does not run; None if it does."""
    if dry_run:
        return "dry run"
    if not check:
        return "not asked for"
    if proof.layers == 0:
        return f"not one layer fits in {proof.free_bytes / 1e9:.1f} GB of free memory"
    return None


def asked_wiring(config: CheckpointConfig, arch: Arch, name: str, layers: str, **fields: Any) -> Wiring:
    """The wiring that the options of ``convert`` ask for, by config.json alone: torch is not imported.

    Args:
        layers: see ``fcsd.models.selection.select_layers``.
        fields: further fields of ``Wiring``; a field that is None takes its default.

    Raises:
        ConfigError: the architecture has no such wiring or layers, or its options do not go together.
    """
    if config.foreign:
        name, layers, fields = _as_trained(config, name, layers, fields)
    if name not in arch.wirings:
        guess = "".join(f"Did you mean {close}? " for close in get_close_matches(name, arch.wirings, n=1))
        raise ConfigError(f"{arch.model_type} has no wiring {name!r}", f"{guess}One of {', '.join(arch.wirings)}.")
    if fields.get("border") and fields.get("variant") == "mlp-only":
        raise ConfigError(f"{name} mlp-only has no border: its attention reads the full stream", "Leave out --border.")
    try:
        chosen = {key: value for key, value in fields.items() if value is not None}
        return Wiring(name, select_layers(layers, config.text["num_hidden_layers"]), **chosen)
    except ValueError as error:
        hint = "--gpus, in a recipe init.gpus, is the tp_degree." if "tp_degree" in str(error) else None
        raise ConfigError(str(error), hint) from error


def choose_wiring(config: CheckpointConfig, arch: Arch, name: str, layers: str, **fields: Any) -> Wiring:
    """``asked_wiring``, applied to a model on the meta device as a check.

    Raises:
        ConfigError: as ``asked_wiring``, and where the wiring does not fit the model.
    """
    import torch

    from fcsd.models.build import check_injected, model_classes, require_desync

    wiring = asked_wiring(config, arch, name, layers, **fields)
    try:
        if layers.strip() == "all":
            wiring = _all_that_can(_converted_config(config, arch, wiring), wiring)
        cls = model_classes(arch.model_type)["AutoModelForCausalLM"]
        with torch.device("meta"):
            model = cls(_converted_config(config, arch, wiring))
        require_desync(model.config, wiring)
        check_injected(model.config, wiring)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return wiring


def _all_that_can(config: Any, wiring: Wiring) -> Wiring:
    """``without_injected``, with a word about the layers that stay standard."""
    from fcsd.models.build import injected_layers, without_injected

    found = without_injected(config, wiring)
    if found.layers != wiring.layers:
        log.warning(
            "layers 0-%d stay standard: the model adds image features to the outputs of its first %d layers",
            min(found.layers, default=len(wiring.layers)) - 1,
            injected_layers(config),
        )
    return found


def _as_trained(
    config: CheckpointConfig, name: str, layers: str, fields: dict[str, Any]
) -> tuple[str, str, dict[str, Any]]:
    """The wiring that AMD trained a model with, as options. AMD's transformers file has a partial border."""
    defaults = {"variant": "full", "border": None, "tp_degree": 1, "reduce": None, "distance": 1}
    if (name, layers.strip()) != ("farskip", "all") or any(fields[key] != defaults[key] for key in fields):
        raise ConfigError(
            "the model was trained with a wiring of its own, which cannot be changed",
            "Leave out --wiring, --layers and the other options of a wiring: fcsd reads AMD's keys.",
        )
    own, depth = config.rewired or {}, config.text["num_hidden_layers"]
    found = list(range(own["start"], min(own["end"] + 1, depth)))
    border = None if own["variant"] == "mlp-only" else "partial"
    return "farskip", layers_text(found), {"variant": own["variant"], "border": border}


def _converted_config(config: CheckpointConfig, arch: Arch, wiring: Wiring) -> Any:
    from fcsd.models.build import config_class

    left_out = ("model_type", "quantization_config", *AMD_KEYS)
    raw = {key: value for key, value in config.raw.items() if key not in left_out}
    return config_class(arch.model_type).from_dict({**with_floats(raw), "fcsd": wiring.to_block()})
