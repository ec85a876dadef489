"""The trials of a sweep: the list of possible trials, their names and their recipes."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fcsd.config import ResolvedRecipe, Sweep, value_of, vary
from fcsd.errors import ConfigError

TRIALS = "trials"


@dataclass(frozen=True)
class Trial:
    """One short run.

    Attributes:
        name: the name of the trial, which is also that of its directory.
        values: the value of every swept key.
        resolved: the recipe of the trial.
        full: the recipe of the full run with these values.
    """

    name: str
    values: dict[str, Any]
    resolved: ResolvedRecipe
    full: ResolvedRecipe


def plan_of(resolved: ResolvedRecipe) -> Sweep:
    """The ``sweep`` section of a recipe.

    Raises:
        ConfigError: the recipe has no such section.
    """
    if resolved.recipe.sweep is None:
        raise ConfigError(f"recipe {resolved.recipe.name} has no `sweep:` section", "packaged sweeps end in -sweep")
    return resolved.recipe.sweep


def points(stage: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    """All combinations of a stage's values."""
    return (dict(zip(stage, combination, strict=True)) for combination in itertools.product(*stage.values()))


def starting_values(resolved: ResolvedRecipe) -> dict[str, Any]:
    """The recipe's own value of every swept key, which is used until the stage of the key has chosen one."""
    return {key: value_of(resolved.recipe, key) for stage in plan_of(resolved).stages for key in stage}


def all_trials(resolved: ResolvedRecipe) -> list[Trial]:
    """All possible trials, for all possible choices of the stages. Each trial is listed once.

    Raises:
        ConfigError: some values do not make a valid recipe, two trials would have the same name, or a trial does not
            measure the metric of the sweep.
    """
    chosen = [starting_values(resolved)]
    found: dict[str, Trial] = {}
    for stage in plan_of(resolved).stages:
        chosen = [values | point for values in chosen for point in points(stage)]
        for trial in (trial_of(resolved, values) for values in chosen):
            if found.setdefault(trial.name, trial).values != trial.values:
                raise ConfigError(f"sweep: two trials would be called {trial.name!r}")
            _require_metric(trial, plan_of(resolved).metric)
    return list(found.values())


def trial_of(resolved: ResolvedRecipe, values: dict[str, Any]) -> Trial:
    """The trial with these values of the swept keys.

    Raises:
        ConfigError: the values do not make a valid recipe, or the full run would have fewer steps than a trial.
    """
    plan, out, name = plan_of(resolved), Path(resolved.recipe.output_dir), _name(values)
    full = vary(resolved, {**values, "sweep": None})
    if plan.steps > full.recipe.train.steps:
        raise ConfigError(f"sweep.steps ({plan.steps}): with {name} the full run has {full.recipe.train.steps}")
    run = str(out / TRIALS / name)
    short: dict[str, Any] = {"name": f"{resolved.recipe.name}-{name}"[:64], "output_dir": run}
    short |= {"train.steps": plan.steps, "train.tokens": None}
    short |= {"optim.horizon": full.recipe.schedule_steps if plan.horizon == "full" else None}
    full_run = run if plan.horizon == "full" else str(out / "full")
    return Trial(name, values, vary(full, short), vary(full, {"output_dir": full_run}))


def _name(values: dict[str, Any]) -> str:
    """The name of the trial with these values, such as ``batch_tokens-65536_lr-2e-05``. It can name a directory."""
    parts = [f"{key.rpartition('.')[2]}-{value}" for key, value in values.items()]
    return "_".join(re.sub(r"[^A-Za-z0-9._-]+", "-", part) for part in parts)[:100]


def _require_metric(trial: Trial, metric: str) -> None:
    recipe = trial.resolved.recipe
    known = ["loss", *recipe.objective.weights]
    if recipe.data.held_out is not None:
        known += [f"held_out_{name}" for name in recipe.objective.measures]
    if metric not in known:
        raise ConfigError(f"sweep.metric {metric!r} is not measured by {trial.name}", f"it has {', '.join(known)}")
