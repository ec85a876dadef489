"""Checkpoint to converted checkpoint: the shards linked, config.json and code written, parity proven.

No tensor is rewritten and none is scanned. The directory is built beside OUT and renamed into place, so OUT exists
as a whole or not at all.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.checkpoint import (
    INDEX,
    CheckpointConfig,
    Layout,
    Source,
    contained,
    open_regular,
    read_config,
    read_layout,
    remote_headers,
    resolve,
    verify_tensors,
)
from fcsd.checkpoint.rewired import describe
from fcsd.checkpoint.source import SMALL_FILES
from fcsd.checkpoint.staging import check_out, staged, take_over, write
from fcsd.errors import BadInputError, ConfigError
from fcsd.parity import Proof, plan_proof, prove_parity

if TYPE_CHECKING:
    from fcsd.models.archs import Arch
    from fcsd.models.wiring import Wiring

log = logging.getLogger(__name__)

# What a converted directory takes over besides weights: everything small and flat, but for the same weights in
# another format. Code stays, for tokenizers that bring their own.
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_FOLDERS = ("additional_chat_templates",)


@dataclass(frozen=True)
class ConvertReport:
    """What was done, or with ``dry_run`` what would be.

    Attributes:
        layers: converted layers, of ``depth``.
        copied_bytes: of ``bytes`` in shards, those that could not be linked.
        files: everything in OUT but the shards.
        parity: the first layers whose logits were compared; None if the proof did not run, for ``parity_skipped``.
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
        """All fields, in this order."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """For people: one aligned line per fact."""
        from rich.filesize import decimal

        block = self.wiring
        extras = [f"{key} {block[key]}" for key in ("distance", "tp_degree") if block[key] > 1]
        how = f"{decimal(self.copied_bytes)} copied" if self.copied_bytes else "linked, no byte copied"
        if self.dry_run:
            how = "to be linked, or copied to another file system"
        proven = f"bit-identical with the wiring off: first {self.parity} of {self.depth} layers"
        lines = {
            "model": self.model + (f" @ {self.revision}" if self.revision else ""),
            "wiring": ", ".join(
                [describe({"by": "fcsd", **block}).removesuffix(", by fcsd"), f"{block['border']} border", *extras]
            ),
            "weights": f"{decimal(self.bytes)} in {self.shards} file{'s' * (self.shards != 1)}, {how}",
            "files": ", ".join(self.files),
            "parity": proven if self.parity_skipped is None else f"not proven: {self.parity_skipped}",
            "out": self.out + (" (dry run: nothing was written)" if self.dry_run else ""),
        }
        return "\n".join(f"{name:<8} {value}" for name, value in lines.items())


def convert(
    model: str,
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
    """Rewire a checkpoint.

    Args:
        model: directory or hub id (``org/name[@revision]``) of an original.
        out: directory to write.
        wiring: see ``fcsd.models.wiring.NAMES``.
        layers: see ``fcsd.models.selection.select_layers``.
        variant: ``full``, ``attn-only`` or ``mlp-only``.
        border: ``full`` or ``partial``, what the first converted layer after one that is not converted reads; None is
            the wiring's default, see ``fcsd.models.wiring.BORDERS``.
        tp_degree: simulated tensor-parallel degree, Desync only.
        reduce: which reductions ``desync`` keeps, see ``fcsd.models.desync.kept_reductions``.
        distance: sub-block outputs that may be in flight at a rewired read.
        check: prove parity with the original before OUT appears.
        dry_run: check everything, write nothing; of a hub repository only small files and headers are fetched.
        force: replace an OUT that fcsd wrote.
        trust_remote_code: accept a checkpoint that brings code; fcsd uses transformers' classes all the same.

    Raises:
        BadInputError: the checkpoint cannot be used; see ``fcsd.checkpoint``.
        ConfigError: the wiring does not fit it, or OUT may not be written.
        DiskError: OUT is on another, too full disk.
        FcsdError: parity does not hold.
    """
    from fcsd.models.archs import ARCHS

    out = Path(out)
    source = resolve(str(model), allow_patterns=SMALL_FILES if dry_run else None)
    check_out(out, [source.path], force=force)
    config = read_config(source.path, trust_remote_code=trust_remote_code)
    refuse_rewired(source, config)
    layout = read_layout(source.path, remote=remote_headers(source) if dry_run else None)
    verify_tensors(layout, config)
    arch = ARCHS[config.model_type]
    how = {"variant": variant, "border": border, "tp_degree": tp_degree, "reduce": reduce, "distance": distance}
    chosen = choose_wiring(config, arch, wiring, layers, **how)

    block = chosen.to_block(
        base_model=source.repo_id or str(source.path.resolve()),
        base_revision=source.revision,
        base_sha256=None if dry_run and source.repo_id else fingerprint(layout),
    )
    texts = written_files(config, arch, block)
    others = other_files(source.path, texts.keys() | layout.shards.keys())
    proof = plan_proof(layout, config, arch)
    skipped = _why_not(check, dry_run, proof)
    size = sum(max((tensor.end for tensor in header.values()), default=0) for header in layout.shards.values())
    copied = 0
    if not skipped or dry_run:
        log.info(proof.to_text())
    if not dry_run:
        with staged(out) as stage:
            copied = take_over(layout.files, stage)
            for name, file in others.items():
                (stage / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(file, stage / name)
            for name, text in texts.items():
                write(stage / name, text)
            if not skipped:
                prove_parity(layout, stage, config, arch, proof.layers)
    return ConvertReport(
        source.repo_id or str(source.path),
        source.revision,
        str(out),
        block,
        config.text["num_hidden_layers"],
        len(layout.shards),
        size,
        copied,
        sorted(texts.keys() | others.keys()),
        None if skipped else proof.layers,
        skipped,
        dry_run,
    )


def fingerprint(layout: Layout) -> str:
    """SHA-256 that tells one checkpoint's layout from another's without reading a tensor.

    Hashed, in this order: the bytes of config.json; those of the index, if there is one; then for every shard, by
    name, its name, its size in decimal, and its header with the eight bytes of length before it. Two checkpoints
    that differ in tensor values alone have the same fingerprint.
    """
    digest = hashlib.sha256()
    for name in ("config.json", *([INDEX] if layout.indexed else [])):
        digest.update(contained(layout.path, name).read_bytes())
    for name, path in sorted(layout.files.items()):
        with open_regular(path) as file:
            length = file.read(8)
            digest.update(f"{name} {path.stat().st_size} ".encode() + length)
            digest.update(file.read(int.from_bytes(length, "little")))
    return digest.hexdigest()


def refuse_rewired(source: Source, config: CheckpointConfig) -> None:
    """Raise a ``BadInputError`` if a checkpoint is no original."""
    if config.rewired is None:
        return
    if config.foreign:
        raise BadInputError(
            f"{source.path}: is rewired already, by AMD's farskip keys",
            "Only an original can be converted; this one was trained with its wiring and has none.",
        )
    base = config.rewired["base_model"]
    raise BadInputError(f"{source.path}: is converted already", f"Convert its base model instead: {base}")


def choose_wiring(config: CheckpointConfig, arch: "Arch", name: str, layers: str, **fields: Any) -> "Wiring":
    """The wiring that the options of ``convert`` ask for, tried on a model without memory.

    Args:
        config: of the original.
        arch: the architecture's row.
        name: the wiring.
        layers: see ``fcsd.models.selection.select_layers``.
        fields: further fields of ``Wiring``; one that is None takes its default.

    Raises:
        ConfigError: the wiring does not fit the model, or its options do not go together.
    """
    import torch

    from fcsd.models.build import check_desync, config_class, model_classes
    from fcsd.models.selection import select_layers
    from fcsd.models.wiring import Wiring

    if name not in arch.wirings:
        raise ConfigError(f"{arch.model_type} has no wiring {name!r}", f"One of {', '.join(arch.wirings)}.")
    if fields.get("border") and fields.get("variant") == "mlp-only":
        raise ConfigError(f"{name} mlp-only has no border: its attention reads the full stream", "Leave out --border.")
    try:
        chosen = {key: value for key, value in fields.items() if value is not None}
        wiring = Wiring(name, select_layers(layers, config.text["num_hidden_layers"]), **chosen)
        cls = model_classes(arch.model_type)["AutoModelForCausalLM"]
        raw = {key: value for key, value in config.raw.items() if key not in ("model_type", "quantization_config")}
        with torch.device("meta"):
            model = cls(config_class(arch.model_type).from_dict({**raw, "fcsd": wiring.to_block()}))
        check_desync(model.config, wiring)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return wiring


def written_files(config: CheckpointConfig, arch: "Arch", block: dict[str, Any]) -> Mapping[str, str]:
    """File name -> content of what fcsd writes into a converted directory: config.json and code.

    Args:
        config: the base's, or a converted one's.
        block: see ``Wiring.to_block``.
    """
    from fcsd.models.build import PREFIX
    from fcsd.models.export_template import auto_map, render

    base, _ = arch.classes["AutoModelForCausalLM"]
    own = {
        "model_type": PREFIX + arch.model_type,
        "architectures": [f"Fcsd{base}"],
        "auto_map": auto_map(arch),
        "fcsd": block,
    }
    return {"config.json": json.dumps(config.raw | own, indent=2) + "\n", **render(arch)}


def other_files(path: Path, written: set[str]) -> dict[str, Path]:
    """Name -> file of what is taken over as it is: tokenizer, generation config, chat template, licence, card."""
    files = {}
    for entry in sorted(path.iterdir()):
        if entry.is_dir() and entry.name in _FOLDERS:
            files |= {
                f"{entry.name}/{inner.name}": contained(path, entry.name, inner.name)
                for inner in sorted(entry.iterdir())
            }
        elif entry.is_file() and not entry.name.startswith(".") and not entry.name.endswith(OTHER_WEIGHTS):
            files[entry.name] = contained(path, entry.name)
    if (path / INDEX).exists():
        files[INDEX] = contained(path, INDEX)
    return {name: file for name, file in files.items() if name not in written}


def _why_not(check: bool, dry_run: bool, proof: Proof) -> str | None:
    """Why the parity proof does not run; None if it does."""
    if dry_run:
        return "dry run"
    if not check:
        return "not asked for"
    if proof.layers == 0:
        return f"not one layer fits in {proof.free_bytes / 1e9:.1f} GB of free memory"
    return None
