"""Chooses values by short runs: a grid of trials for each stage, then the full run with the best values.

FarSkip section 5.1 chooses the batch size first and then the learning rate, by the training loss of runs of 2000 steps.
A trial that two stages have in common is run once. Every trial is an ordinary run of an ordinary recipe,
``OUT/trials/NAME.yaml``, in the directory ``OUT/trials/NAME``, so that a sweep that was killed continues where it
stopped. With ``horizon: full``, a trial follows the schedule of the full run. The full run then continues from the
checkpoint of the chosen trial, in the directory of that trial. With ``horizon: trial``, each trial has a complete
schedule of its own, and the full run starts anew in ``OUT/full``.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fcsd.config import ResolvedRecipe, Sweep
from fcsd.disk import require_folder, write_text
from fcsd.distill.run import run_dir
from fcsd.distill.run.report import read_metrics
from fcsd.distill.sweep.process import Exit, Launch
from fcsd.distill.sweep.report_table import write_report
from fcsd.distill.sweep.trials import TRIALS, Trial, all_trials, plan_of, points, starting_values, trial_of
from fcsd.errors import BadInputError, ConfigError, FcsdError, NonFiniteError, PreemptedError
from fcsd.foreign_errors import reason_of
from fcsd.recipes import strict_yaml
from fcsd.strict_json import finite_number, read_file

RECORD = "sweep.json"
FULL = "full.yaml"


def sweep(resolved: ResolvedRecipe, launch: Launch, *, dry_run: bool = False) -> dict[str, Any]:
    """Runs the trials one after the other, and then the full run with the chosen values.

    A trial whose loss is not finite cannot be chosen. If a trial fails for another reason, the remaining trials of its
    stage are run, and then the sweep ends without a choice. The same command then repeats the failed trials.

    Args:
        resolved: a recipe with a ``sweep`` section; its ``output_dir`` is the directory of the sweep.
        launch: runs a recipe as ``fcsd distill`` does, in a process of its own.
        dry_run: checks every possible trial and plans the first stage; nothing is written.

    Returns:
        The content of ``OUT/sweep.json``: ``trials`` by name, the choice of each of the ``stages``, the directory of
        the full ``run`` or None, and the ``error`` that ended the sweep or None; see ``require_complete``.
        ``OUT/table.md`` and ``OUT/sweep.png`` show the same results.

    Raises:
        ConfigError: the recipe has no sweep section, some values do not make a valid recipe, or the directory holds
            other trials or is that of a model; this is raised before any run.
        DiskError: the directory cannot be written; this is raised before any run.
        PreemptedError, KeyboardInterrupt: a run was ended by a signal.
    """
    plan, out = plan_of(resolved), Path(resolved.recipe.output_dir)
    require_folder(out, "output_dir")
    for trial in all_trials(resolved):
        _require_same(out, trial)
    settings = plan.model_dump(include={"metric", "window", "steps", "horizon"})
    record = {"name": resolved.recipe.name, **settings, "trials": {}, "stages": [], "run": None, "error": None}
    values = starting_values(resolved)
    if dry_run:
        first = [trial_of(resolved, values | point) for point in points(plan.stages[0])]
        record["trials"] = {trial.name: _entry(trial, out) | {"status": "planned"} for trial in first}
        record["stages"] = [{"trials": list(record["trials"]), "chosen": None}]
        return record
    with run_dir.claim(out):
        (out / TRIALS).mkdir(exist_ok=True)
        if (out / RECORD).exists():
            record["trials"] = _known_trials(out / RECORD)
        try:
            for stage in plan.stages:
                trials = [trial_of(resolved, values | point) for point in points(stage)]
                values = _decide(trials, record, out, plan, launch)
            if plan.then == "continue":
                record["run"] = _continue(trial_of(resolved, values), out, launch)
        except PreemptedError:
            raise
        except FcsdError as error:
            record["error"] = {"message": str(error), "hint": error.hint, "exit_code": error.exit_code}
        _write(out, record)
    return record


def _known_trials(path: Path) -> dict[str, Any]:
    """The trials in the record of an earlier start of the sweep.

    Raises:
        BadInputError: the record is damaged.
    """
    try:
        trials = read_file(path)["trials"]
        for name, trial in trials.items():
            kinds = {"values": dict, "recipe": str, "run": str, "status": str}
            if trial["status"] == "done":
                kinds |= {"step": int, "tokens": int}
                finite_number(trial["value"])
            if not all(type(trial[key]) is kind for key, kind in kinds.items()):
                raise ValueError(f"trial {name!r:.80} is not one of a sweep")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "Delete it: trials that are done end at once when they are started again."
        raise BadInputError(f"{path}: is damaged: {reason_of(error)}", hint) from error
    return trials


def require_complete(record: dict[str, Any]) -> None:
    """Checks that a sweep came to its end.

    Raises:
        FcsdError: an error ended the sweep; the exit code is that of the cause.
    """
    if record["error"] is not None:
        failure = FcsdError(record["error"]["message"], record["error"]["hint"])
        failure.exit_code = record["error"]["exit_code"]
        raise failure


def _decide(trials: list[Trial], record: dict[str, Any], out: Path, plan: Sweep, launch: Launch) -> dict[str, Any]:
    """Runs the trials of a stage that are not done, updates ``record`` after each, and returns the best values.

    Raises:
        FcsdError: some trials failed, or all diverged.
    """
    done = record["trials"]
    record["stages"].append({"trials": [trial.name for trial in trials], "chosen": None})
    for trial in trials:
        if done.get(trial.name, {}).get("status") not in ("done", "diverged"):
            done[trial.name] = _run(trial, out, plan, launch)
        _write(out, record)
    if failed := [
        f"{trial.name}: {done[trial.name]['error']}" for trial in trials if done[trial.name]["status"] == "failed"
    ]:
        message = f"{len(failed)} of {len(trials)} trials failed: {'; '.join(failed)}"
        raise FcsdError(message, "Start the same command again; it repeats the runs that failed, and no others.")
    finite = [trial for trial in trials if done[trial.name]["status"] == "done"]
    if not finite:
        raise NonFiniteError("no trial of the stage has a finite loss", "Try smaller learning rates in the sweep.")
    chosen = min(finite, key=lambda trial: done[trial.name]["value"])
    record["stages"][-1]["chosen"] = chosen.name
    _write(out, record)
    return chosen.values


def _run(trial: Trial, out: Path, plan: Sweep, launch: Launch) -> dict[str, Any]:
    """Runs or resumes a trial and returns its entry in the record."""
    entry = _entry(trial, out)
    recipe = Path(entry["recipe"])
    write_text(recipe, trial.resolved.to_yaml())  # an existing file has the same values, see _require_same
    print(f"trial {trial.name}", file=sys.stderr)
    ended = _launched(launch, recipe)
    if ended.code == NonFiniteError.exit_code:
        return {**entry, "status": "diverged", "error": ended.error}
    if ended.code:
        return {**entry, "status": "failed", "error": ended.error}
    return {**entry, "status": "done", **outcome(Path(entry["run"]), plan)}


def _entry(trial: Trial, out: Path) -> dict[str, Any]:
    recipe = out / TRIALS / f"{trial.name}.yaml"
    return {"values": trial.values, "recipe": str(recipe), "run": trial.resolved.recipe.output_dir}


def outcome(run: Path, plan: Sweep) -> dict[str, Any]:
    """The end of a trial: its last ``step``, its ``tokens``, and ``value``, the metric's mean over the last steps."""
    records = [line for line in read_metrics(run) if line["step"] <= plan.steps]
    first = records[-1]["step"] - plan.window + 1 if records else 0
    values: list[Any] = [line[plan.metric] for line in records if line["step"] >= first and plan.metric in line]
    if not values or None in values or "tokens" not in records[-1]:
        raise BadInputError(f"{run}: its metrics.jsonl lacks {plan.metric} of the last steps", "Delete this directory.")
    return {"step": records[-1]["step"], "tokens": records[-1]["tokens"], "value": sum(values) / len(values)}


def _continue(chosen: Trial, out: Path, launch: Launch) -> str:
    """Runs the full run with the chosen values and returns its directory."""
    write_text(out / FULL, chosen.full.to_yaml())
    print(f"full run with {chosen.name}", file=sys.stderr)
    ended = _launched(launch, out / FULL)
    if ended.code:
        failure = FcsdError(
            f"the full run failed: {ended.error}", "Start the same command again; it continues the full run."
        )
        failure.exit_code = ended.code if ended.code > 0 else 1
        raise failure
    return chosen.full.recipe.output_dir


def _launched(launch: Launch, recipe: Path) -> Exit:
    """Runs a recipe. A signal that ends the run ends the sweep as well."""
    ended = launch(recipe)
    if ended.interrupted:
        raise KeyboardInterrupt
    if ended.terminated:
        raise PreemptedError(f"{recipe}: ended by SIGTERM", "Start the same command again; it continues the sweep.")
    return ended


def _require_same(out: Path, trial: Trial) -> None:
    """Checks that an earlier sweep in this directory did not run a trial of this name with other values.

    Raises:
        ConfigError: the values differ.
    """
    from fcsd.distill.run.identity import differences, flat

    path = out / TRIALS / f"{trial.name}.yaml"
    if not path.exists():
        return
    then, now = flat(strict_yaml.parse_file(path)[0]), flat(trial.resolved.recipe.model_dump())
    if changed := differences(then, now):
        raise ConfigError(
            f"{out} holds another sweep: in trial {trial.name}, {'; '.join(changed)}",
            hint="undo the change, or set another output_dir",
        )


def _write(out: Path, record: dict[str, Any]) -> None:
    write_text(out / RECORD, json.dumps(record, indent=2) + "\n")
    write_report(out, record)
