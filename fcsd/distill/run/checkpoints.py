"""Saves, finds and loads checkpoints. A checkpoint exists completely or not at all.

``checkpoints/step-N/`` holds ``model/`` (an ordinary Hugging Face directory; ``adapters/`` instead if these train),
``optimizer/`` (one file of DeepSpeed's optimizer for each rank that has a state of its own), one ``rank-R.json`` of
random state for each process, and ``MANIFEST.json``: the size and sha256 of every file, the position of the run, and
the facts on which the run depends. All files are written to a temporary directory and synced to disk, and then the
directory is renamed. A directory that does not match its manifest was therefore never complete, or was damaged later.
No file of a checkpoint is loaded before its hash matches.
"""

import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcsd.disk import left_over, sync, sync_directories
from fcsd.distill.run import manifest, snapshot
from fcsd.distill.run.identity import PROCESSES, differences
from fcsd.distill.run.snapshot import OPTIMIZER, Snapshot, write_states
from fcsd.distill.train_engine import Trained
from fcsd.errors import CheckpointError, CheckpointVersionError, ConfigError
from fcsd.launch.world import World
from fcsd.parallel.weights.saving import OwnPart

WriteModel = Callable[[OwnPart, Path, World], None]


def save(
    folder: Path,
    world: World,
    taken: Snapshot,
    *,
    step: int,
    identity: dict[str, Any],
    progress: dict[str, Any],
    write_model: WriteModel,
) -> Path:
    """Commits the checkpoint ``step-{step}`` in ``folder``. Every rank calls this.

    Args:
        identity: the facts that a resumed run must share, as a flat mapping; see ``run_identity``.
        progress: the progress of the run, which ``load`` returns.
        write_model: writes the model, or what trains of it, into a folder of the directory that it gets. Every rank
            calls it, and it must fail on all ranks or on none.

    Returns: the directory of the checkpoint.
    """
    final = folder / f"step-{step}"
    partial = world.on_first(lambda: _fresh(folder, final.name))
    world.everywhere(lambda: write_states(taken, partial, world.rank))
    write_model(taken.part, partial, world)
    # Every rank hashes a share of the files, no matter which rank wrote them. The files are still in the page cache of
    # the host or of the shared disk.
    parts = world.everywhere(lambda: manifest.described(partial, manifest.files(partial)[world.rank :: world.size]))
    files = {name: entry for part in parts for name, entry in sorted(part.items())}

    def commit() -> Path:
        content = {"step": step, "identity": identity, "progress": progress, "files": files}
        manifest.write_manifest(partial, content)
        sync_directories(partial)
        _rename(partial, final)
        return final

    return world.on_first(commit)


def load(checkpoint: Path, world: World, trained: Trained, identity: dict[str, Any]) -> dict[str, Any]:
    """Loads a checkpoint from ``find`` into the engine and the random generators, and returns its ``progress``.

    The engine's model has the weights of the checkpoint's ``model/`` already.

    Args:
        identity: the facts that this run and the run of the checkpoint must share, but for the number of processes.

    Raises:
        CheckpointError: the checkpoint belongs to another run; the message names what differs.
    """
    content = world.everywhere(lambda: manifest.read_manifest(checkpoint))[0]
    then = content["identity"]
    if changed := differences(then, {**identity, PROCESSES: then.get(PROCESSES)}):
        raise _of_another_run(checkpoint, changed)
    snapshot.restore(checkpoint, world, trained, then[PROCESSES])
    return content["progress"]


def require_model(checkpoint: Path, fields: dict[str, Any]) -> None:
    """Checks that the recipe still names the student that a checkpoint was made with, before the student is loaded.

    Args:
        fields: the recipe as a flat mapping.

    Raises:
        CheckpointError: it names another student, or wires it in another way; the message says what differs. Or the
            run was one with ZeRO-3, which was removed.
    """

    def of_model(facts: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in facts.items() if key == "model" or key.startswith("init.")}

    def trained(facts: dict[str, Any]) -> dict[str, Any]:
        keys = ("train.adapter", "train.draft_head", "optim.train")
        return {key: value for key, value in facts.items() if key.startswith(keys) and value not in (None, False)}

    identity = manifest.read_manifest(checkpoint)["identity"]
    if identity.get("parallel.zero_stage") == 3:
        raise CheckpointError(
            f"{checkpoint} is of a run with parallel.zero_stage 3, which was removed: its optimizer cannot be read",
            hint="export it (fcsd export --checkpoint), and start a run from the exported model in another output_dir",
        )
    then = of_model(identity)
    now = {key: value for key, value in of_model(fields).items() if key in then}
    changed = differences(trained(identity), trained(fields)) or differences({key: then[key] for key in now}, now)
    if changed:
        raise _of_another_run(checkpoint, changed)


def _of_another_run(checkpoint: Path, changed: list[str]) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint} belongs to another run: {'; '.join(changed)}",
        hint="undo the change, or start anew in another output_dir",
    )


def find(folder: Path, resume: str, report: Callable[[str], None]) -> Path | None:
    """Finds and verifies the checkpoint from which a run continues.

    Args:
        resume: ``auto`` for the newest complete checkpoint in ``folder``, ``never`` for a new run, or the path of a
            checkpoint.
        report: prints a message about a damaged checkpoint.

    Returns: the directory of the checkpoint, or None if the run starts anew.

    Raises:
        CheckpointVersionError: the checkpoint is of another version.
        CheckpointError: the checkpoint at the given path is damaged, or all checkpoints in ``folder`` are.
        ConfigError: ``resume`` is ``never`` or the path of an older checkpoint, but ``folder`` has checkpoints that the
            run would replace.
    """
    if resume == "auto":
        return _newest(folder, report)
    if resume == "never":
        if checkpoints(folder):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run", hint="use --resume auto or another output_dir"
            )
        return None
    asked = Path(resume)
    if not asked.is_dir():
        raise CheckpointError(
            f"{resume}: there is no such checkpoint to resume from",
            f"Give auto, never, or a directory such as {folder / 'step-100'}.",
        )
    manifest.verify(asked)
    step = manifest.read_manifest(asked)["step"]
    if newer := [path.name for path in checkpoints(folder) if (manifest.step_of(path) or 0) > step]:
        raise ConfigError(
            f"{folder} has {', '.join(newer)}, which a run from step {step} would have to write again",
            hint="move what is newer out of that folder, or set another output_dir",
        )
    return asked


def _newest(folder: Path, report: Callable[[str], None]) -> Path | None:
    """The newest complete checkpoint. Newer ones that are damaged are renamed, and unfinished ones are deleted."""
    remove_unfinished(folder)
    for checkpoint in reversed(checkpoints(folder)):
        try:
            manifest.verify(checkpoint)
        except CheckpointVersionError:
            raise  # it is not damaged, so it keeps its name
        except CheckpointError as error:
            report(f"{error}; set aside")
            checkpoint.rename(checkpoint.with_name(f"{checkpoint.name}.corrupt-{uuid.uuid4().hex[:8]}"))
        else:
            return checkpoint
    if damaged := sorted(folder.glob("step-*.corrupt-*")):
        raise CheckpointError(
            f"{folder}: no checkpoint is whole, {len(damaged)} are damaged",
            hint="nothing was deleted; to start anew, use another output_dir",
        )
    return None


def remove_unfinished(folder: Path) -> None:
    """Deletes the temporary directories of interrupted saves."""
    for partial in left_over(folder, r"step-\d+\.tmp-", directories=True):
        shutil.rmtree(partial)


def checkpoints(folder: Path) -> list[Path]:
    """The committed checkpoints in ``folder``, oldest first. They are not verified."""
    committed = [path for path in folder.glob("step-*") if manifest.step_of(path) is not None]
    return sorted(committed, key=lambda path: manifest.step_of(path) or 0)


def best(folder: Path, step: int | None) -> Path | None:
    """The checkpoint of step ``step``, the best one; None if the best step is not known or its checkpoint is gone."""
    return next((path for path in checkpoints(folder) if path.name == f"step-{step}"), None)


def retain(folder: Path, keep: int, best_step: int | None) -> None:
    """Deletes all checkpoints except for the newest ``keep`` and the best. Call this after a new one is committed."""
    for old in checkpoints(folder)[:-keep]:
        if old == best(folder, best_step):
            continue
        removed = old.with_name(f"{old.name}.tmp-{uuid.uuid4().hex[:8]}")
        old.rename(removed)  # a half-deleted checkpoint must not look like a damaged one
        shutil.rmtree(removed)


def _fresh(folder: Path, name: str) -> Path:
    partial = folder / f"{name}.tmp-{uuid.uuid4().hex[:8]}"
    (partial / OPTIMIZER).mkdir(parents=True)
    return partial


def _rename(partial: Path, final: Path) -> None:
    """Renames a complete temporary directory. From then on the checkpoint exists."""
    partial.rename(final)
    sync(final.parent)
