"""A run's or a converted model's final directory: weights, code, card; proven to reload before it appears."""

import json
import logging
import shutil
from pathlib import Path

from fcsd.checkpoint import read_config, read_layout, resolve, verify_tensors
from fcsd.checkpoint.staging import check_out, staged, take_over
from fcsd.convert import other_files, written_files
from fcsd.disk import write_text
from fcsd.errors import BadInputError, ConfigError
from fcsd.export.card import model_card
from fcsd.export.reload import RECORD, prove_reload

log = logging.getLogger(__name__)

_CARD = "README.md"


def export(
    run_or_model: str,
    out: str | Path,
    *,
    checkpoint: str = "latest",
    force: bool = False,
    push: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
) -> Path:
    """Write the directory that is given to others.

    Args:
        run_or_model: a run directory, or a converted model (directory or hub id).
        out: directory to write.
        checkpoint: of a run: ``latest``, ``step-N``, or ``best`` by its early-stopping score, else its held-out loss.
        force: replace an ``out`` that fcsd wrote.
        push: hub repository to upload it to; the other arguments are those of ``fcsd.export.push.push``.

    Returns:
        ``out``.

    Raises:
        BadInputError: it is neither a run nor a converted model, or it is damaged.
        CheckpointError: the run's checkpoint is damaged.
        ConfigError: ``out`` may not be written.
        FcsdError: the directory does not reload to equal logits; nothing is left of it then.
    """
    from fcsd.models.archs import ARCHS

    out = Path(out)
    run = Path(run_or_model) if (Path(run_or_model) / "config.resolved.yaml").is_file() else None
    source = resolve(str(_model_of(run, checkpoint)) if run else run_or_model)
    check_out(out, [source.path], force=force)
    config = read_config(source.path)
    if config.rewired is None or config.foreign:
        raise BadInputError(f"{source.path}: is not converted by fcsd", "Convert it first: fcsd convert MODEL OUT.")
    layout = read_layout(source.path)
    verify_tensors(layout, config)
    arch = ARCHS[config.model_type]

    texts = dict(written_files(config, arch, config.raw["fcsd"]))
    others = other_files(source.path, texts.keys() | layout.shards.keys() | {RECORD})
    raw = json.loads(texts["config.json"])
    texts[_CARD] = model_card(raw, arch, others.pop(_CARD, None), run, title=push or out.resolve().name)
    with staged(out) as stage:
        take_over(layout.files, stage)
        for name, file in others.items():
            (stage / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, stage / name)
        for name, text in texts.items():
            write_text(stage / name, text)
        record = prove_reload(layout, stage, config, arch)
        write_text(stage / RECORD, json.dumps(record, indent=2) + "\n")
    log.info("reloaded without fcsd: logits of the first %d of %d layers equal", record["layers"], record["of"])
    if push:
        from fcsd.export.push import push as upload

        log.info("pushed to %s", upload(out, push, private=private, create_pr=create_pr, revision=revision))
    return out


def _model_of(run: Path, checkpoint: str) -> Path:
    """The model directory of a run's checkpoint, whole: all that is known here of how a run is laid out.

    Raises:
        ConfigError: there is no such checkpoint, or the run measured no held-out loss.
        BadInputError: the run has no checkpoint yet.
        CheckpointError: the checkpoint is damaged.
    """
    from fcsd.distill.run import checkpoints, manifest, run_dir

    committed = checkpoints.checkpoints(run / run_dir.CHECKPOINTS)
    if not committed:
        raise BadInputError(f"{run}: has no checkpoint yet", "Let it run to its first one, or resume it.")
    named = {path.name: path for path in committed} | {"latest": committed[-1]}
    if checkpoint not in (*named, "best"):
        raise ConfigError(f"checkpoint {checkpoint!r}: there are best, {', '.join(reversed(named))}")
    return manifest.verified_model(_best(run, committed) if checkpoint == "best" else named[checkpoint])


def _best(run: Path, committed: list[Path]) -> Path:
    from fcsd.distill.run import checkpoints, manifest
    from fcsd.distill.run.report import read_metrics

    if scored := checkpoints.best(committed[0].parent, manifest.read_manifest(committed[-1])["progress"].get("best")):
        return scored
    steps = {int(path.name.removeprefix("step-")): path for path in committed}
    losses = {line["step"]: line["held_out_sft"] for line in read_metrics(run) if "held_out_sft" in line}
    if not (measured := losses.keys() & steps.keys()):
        raise ConfigError(f"{run}: no checkpoint's held-out loss was measured", "Export latest, or set eval_every.")
    return steps[min(measured, key=losses.__getitem__)]
