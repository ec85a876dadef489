"""The command ``fcsd export``: writes a run or a converted model as a directory that can be given to others.

The directory holds weights, code and a card, and appears after a fresh process has reloaded it. A run may still be
training. If it deletes the checkpoint that is being exported, another checkpoint is chosen.
"""

import json
import logging
from pathlib import Path
from typing import Any

from fcsd.checkpoint import Checkpoint, open_checkpoint
from fcsd.checkpoint.location import RUN_RECIPE
from fcsd.checkpoint.staging import check_out, copy_small, staged, take_over
from fcsd.config import load_recipe
from fcsd.disk import scratch, write_text
from fcsd.errors import BadInputError, CheckpointError, ConfigError, FcsdError
from fcsd.export.card import model_card
from fcsd.export.reload import RECORD, prove_logits, prove_reload
from fcsd.extras import require_extra
from fcsd.models.export_template import converted_files

log = logging.getLogger(__name__)

_CARD = "README.md"
_ATTEMPTS = 5  # how often an export is tried when a run that is still training deletes the chosen checkpoint


def export_model(
    run_or_model: str | Path,
    out: str | Path,
    *,
    checkpoint: str | None = None,
    force: bool = False,
    push: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    quantise: str | None = None,
    calibration: Path | None = None,
) -> Path:
    """Write a directory that can be given to others.

    Args:
        run_or_model: a run directory, or a converted model (directory or hub id).
        checkpoint: the checkpoint of a run: ``latest``, ``step-N``, or ``best``. The best one has the best
            early-stopping score or, without such scores, the lowest held-out loss. The default is ``best`` where one
            of them was measured, and ``latest`` otherwise.
        force: replace an ``out`` that fcsd wrote.
        push: hub repository to upload ``out`` to; the next three arguments are those of ``push_model``.
        quantise: a method of ``quantise.METHODS``, by which llm-compressor rounds the weights; None leaves them.
        calibration: the text (``.jsonl`` or ``.parquet``) that calibrates it; None for a method without a text.

    Returns:
        ``out``.

    Raises:
        BadInputError: ``run_or_model`` is neither a run nor a converted model, or it is damaged.
        CheckpointError: the run's checkpoint is damaged, or training deleted the checkpoint in every attempt.
        ConfigError: ``out`` may not be written, the run has no such checkpoint, or ``quantise`` and ``calibration``
            do not go together or with this machine.
        FcsdError: the directory does not reload to equal logits. It has been removed.
    """
    out = Path(out)
    if quantise or calibration:
        require_extra("quantise", "export --quantise")
        from fcsd.export.quantise import check_method

        check_method(quantise, calibration)
    how: dict[str, Any] = {"force": force, "title": push, "quantise": quantise, "calibration": calibration}
    if push:
        from fcsd.export.push import push_model, require_target

        require_target(push, create_pr=create_pr, revision=revision)
    if (Path(run_or_model) / RUN_RECIPE).is_file():
        _write_checkpoint(Path(run_or_model), checkpoint, out, **how)
    else:
        _write(open_checkpoint(run_or_model), None, out, **how)
    if push:
        log.info("pushed to %s", push_model(out, push, private=private, create_pr=create_pr, revision=revision))
    return out


def _write_checkpoint(run: Path, checkpoint: str | None, out: Path, *, force: bool, **how: Any) -> None:
    """Export a run's checkpoint; see ``export_model``."""
    from fcsd.distill.run.manifest import PARTS, verified_model

    for _ in range(_ATTEMPTS):
        chosen = _choose(run, checkpoint)
        log.info("exporting %s", chosen)
        try:
            if not (chosen / PARTS).is_dir():
                return _write(Checkpoint(verified_model(chosen)), run, out, force=force, **how)
            require_extra("train", "the export of a run with frozen weights")
            from fcsd.distill.parts import merge_checkpoint

            # One process merges, whatever the stage was. Runs of earlier versions may have had stage 3.
            recipe = load_recipe(run / RUN_RECIPE, ["parallel.zero_stage=2"]).recipe
            if recipe.train.draft_head:
                what = f"{run} has trained a draft head, which is no model to export"
                raise ConfigError(what, f"Give {run / 'final'} to vLLM, or to others, as it is.")
            check_out(out, _trained(run), force=force)
            parts = verified_model(chosen, PARTS)
            out.absolute().parent.mkdir(parents=True, exist_ok=True)
            with scratch(out.absolute().parent, ".merged-") as folder:
                log.info("merging what was trained into the weights")
                merge_checkpoint(recipe, parts, folder / "model")
                return _write(Checkpoint(folder / "model"), run, out, force=force, **how)
        except (FcsdError, OSError):
            if chosen.exists():
                raise
            log.warning("%s was deleted by the running training; choosing again", chosen)
    raise CheckpointError(
        f"{run}: training deleted the chosen checkpoint in each of {_ATTEMPTS} attempts",
        "Export after training has ended, or let the run keep more checkpoints.",
    )


def _write(
    source: Checkpoint,
    run: Path | None,
    out: Path,
    *,
    force: bool,
    title: str | None,
    quantise: str | None = None,
    calibration: Path | None = None,
) -> None:
    """Export a model directory, which ``run`` trained if it is given; see ``export_model``."""
    former = check_out(out, [source.path, *_trained(run)], force=force)
    config = source.config
    if config.rewired is None or config.foreign:
        raise BadInputError(f"{source.path}: is not converted by fcsd", "Convert it first: fcsd convert MODEL OUT.")
    source.verify()
    layout, arch = source.layout, config.arch
    title = title or out.resolve().name
    if quantise is not None:
        if config.quantization is not None:
            raise BadInputError(
                f"{source.path}: is quantised already, as {config.quantization}", "Quantise its bf16 original."
            )
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with scratch(out.absolute().parent, ".to-quantise-") as folder:
            _write(source, run, folder / "model", force=False, title=title)
            with staged(out, former) as stage:
                _quantise(folder / "model", stage, quantise, calibration)
        return

    texts = converted_files(config.raw, arch, config.raw["fcsd"])
    others = source.side_files(texts.keys() | {RECORD})
    raw = json.loads(texts["config.json"])
    texts[_CARD] = model_card(raw, arch, others.pop(_CARD, None), run, title=title)
    with staged(out, former) as stage:
        take_over(layout.files, stage)
        copy_small(others, stage)
        for name, text in texts.items():
            write_text(stage / name, text)
        record = prove_reload(layout, stage, config, arch)
        write_text(stage / RECORD, json.dumps(record, indent=2) + "\n")
    log.info("reloaded without fcsd: logits of the first %d of %d layers are equal", record["layers"], record["of"])


def _quantise(model: Path, stage: Path, name: str, calibration: Path | None) -> None:
    """Write an exported model with quantised weights into an empty directory, and prove that it reloads."""
    from fcsd.export.quantise import card_section, quantise_directory

    source = Checkpoint(model)
    config = source.config
    stored, ids, logits = quantise_directory(model, stage, name, calibration)
    texts = converted_files({**config.raw, "quantization_config": stored}, config.arch, config.raw["fcsd"])
    texts[_CARD] = (model / _CARD).read_text() + card_section(name, calibration is not None)
    copy_small(source.side_files(texts.keys() | {RECORD}), stage)
    for file, text in texts.items():
        write_text(stage / file, text)
    layers = config.text["num_hidden_layers"]
    record = prove_logits(stage, ids, logits, layers, layers)
    write_text(stage / RECORD, json.dumps(record, indent=2) + "\n")
    log.info("reloaded without fcsd: the logits of the quantised model are equal")


def _trained(run: Path | None) -> list[Path]:
    """What a run has trained. It would be lost if ``--force`` replaced it by an export."""
    if run is None:
        return []
    from fcsd.distill.run import run_dir

    return [run / run_dir.CHECKPOINTS, run / run_dir.FINAL]


def _choose(run: Path, checkpoint: str | None) -> Path:
    """The checkpoint of a run that is to be exported. Its files are not verified here.

    Raises:
        ConfigError: there is no such checkpoint, or ``best`` was asked for and nothing was measured.
        BadInputError: the run has no checkpoint yet.
        CheckpointError: a manifest is damaged.
    """
    from fcsd.distill.run import checkpoints, run_dir

    committed = checkpoints.checkpoints(run / run_dir.CHECKPOINTS)
    if not committed:
        raise BadInputError(f"{run}: has no checkpoint yet", "Wait for its first checkpoint, or resume the run.")
    named = {path.name: path for path in committed} | {"latest": committed[-1]}
    if checkpoint in named:
        return named[checkpoint]
    if checkpoint not in (None, "best"):
        raise ConfigError(
            f"{run}: there is no checkpoint {checkpoint!r}", f"Choose one of best, {', '.join(reversed(named))}."
        )
    if best := _best(run, committed):
        log.info("the best checkpoint of %s is %s (the latest is %s)", run, best.name, committed[-1].name)
        return best
    if checkpoint == "best":
        raise ConfigError(
            f"{run}: no checkpoint's held-out loss was measured",
            "Export the newest with --checkpoint latest. With train.eval_every, a run measures the loss.",
        )
    return committed[-1]


def _best(run: Path, committed: list[Path]) -> Path | None:
    """The checkpoint with the best early-stopping score, else with the lowest held-out loss; None without either."""
    from fcsd.distill.run import checkpoints, manifest
    from fcsd.distill.run.report import METRICS, read_metrics

    if scored := checkpoints.best(committed[0].parent, manifest.read_manifest(committed[-1])["progress"].get("best")):
        return scored
    if not (run / METRICS).is_file():
        return None
    texts = {path: manifest.read_manifest(path)["progress"].get("held_out_text") for path in committed}
    same = [path for path in committed if texts[path] == texts[committed[-1]]]  # losses on other texts say nothing
    steps = {int(path.name.removeprefix("step-")): path for path in same}
    # As in early stopping, the KL is used where the run has one, because the cross-entropy may rise while the KL falls.
    records = [line for line in read_metrics(run) if "held_out_sft" in line]
    losses = {line["step"]: line.get("held_out_kl", line["held_out_sft"]) for line in records}
    measured = losses.keys() & steps.keys()
    if measured and (lowest := min(losses, key=losses.__getitem__)) not in steps:
        log.warning("step %s had the lowest held-out loss; its checkpoint was not kept (checkpoint.keep)", lowest)
    return steps[min(measured, key=losses.__getitem__)] if measured else None
