"""The commands `fcsd distill`, `cache-teacher` and `plan`."""

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, DryRun, Gpus, PlannedGpus, Recipe, RecipeOption, Sets, UnsafeExec, one_recipe
from fcsd.errors import ConfigError

if TYPE_CHECKING:
    from fcsd import config


def distill(
    recipe: Recipe = None,
    recipe_name: RecipeOption = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A recipe with a sweep: try its values, then run the best.")
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer reads the default and never changes it)
    gpus: Gpus = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines; prints what each must run, unless one is named.")] = 1,
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the nodes this is, from 0.")] = None,
    rendezvous: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where nodes meet, on node 0.")] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a script for sbatch instead of running.")] = False,
    join_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the other processes.")] = 300,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to continue from.")] = "auto",
    output_dir: Annotated[str | None, typer.Option(help="Overrides output_dir.")] = None,
    seed: Annotated[int | None, typer.Option(help="Overrides seed.")] = None,
    accept_unsafe_exec: UnsafeExec = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Heal a converted checkpoint by self-distillation. Prints the run directory, of a sweep the table."""
    from fcsd.config import load_recipe

    named = one_recipe(recipe, recipe_name, sweep)
    flags = {"output_dir": output_dir, "seed": seed}
    given = {key: value for key, value in flags.items() if value is not None}
    resolved = load_recipe(named, sets, given)
    if resolved.recipe.sweep is not None and sweep is None:
        raise ConfigError(f"The recipe {named} is a sweep.", f"Start it with: fcsd distill --sweep {named}")

    from fcsd.distill.sweep.trials import plan_of
    from fcsd.launch import nodes as several

    if sweep is not None:
        plan_of(resolved)
    if slurm:
        options = ["--resume", resume, *(["--accept-unsafe-exec"] if accept_unsafe_exec else [])]
        emit(several.slurm_script(resolved, nodes=nodes, gpus=gpus or 1, options=options))
        print("save it and hand it to sbatch, where output_dir is shared by all nodes", file=sys.stderr)
        return
    if sweep is not None:
        from fcsd.distill.sweep.process import ends_on_sigterm, launcher

        launch = launcher(gpus, accept_unsafe_exec, 1 if dry_run else nodes)
        _require_inputs(named, resolved.recipe)  # before torch is imported

        from fcsd.distill.sweep import search as sweeping
        from fcsd.distill.sweep.report_table import to_text

        with ends_on_sigterm():
            found = sweeping.sweep(resolved, launch, dry_run=dry_run)
        emit(json.dumps(found, indent=2) if as_json else to_text(found))
        sweeping.require_complete(found)
        return

    from fcsd.launch.world import ensure_world

    if nodes > 1 and node_rank is None and not dry_run:
        emit(several.node_commands(sys.argv[1:], nodes, rendezvous))
        return
    _require_inputs(named, resolved.recipe)
    if not dry_run:
        node = None if node_rank is None else several.node_of(nodes, node_rank, rendezvous)
        ensure_world(gpus, node, timeout=join_timeout, grace_seconds=resolved.recipe.faults.grace_seconds)

    scorer = None
    if resolved.recipe.early_stop.benchmark:
        from fcsd.eval.early_score import scorer as benchmark

        scorer = benchmark(resolved.recipe.early_stop, accept_unsafe_exec=accept_unsafe_exec)

    from fcsd.distill.loop import distill_model

    processes = (gpus or 1) * nodes
    directory = distill_model(
        resolved, resume=resume, dry_run=dry_run, processes=processes, scorer=scorer, join_timeout=join_timeout
    )
    if os.environ.get("RANK", "0") == "0":
        emit(json.dumps({"run": str(directory)}) if as_json else directory)


def cache_teacher(
    recipe: Recipe = None,
    recipe_name: RecipeOption = None,
    sets: Sets = [],  # noqa: B006
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Write the teacher cache of a recipe. What is there already stays; prints its directory."""
    from fcsd.config import load_recipe

    named = one_recipe(recipe, recipe_name)
    resolved = load_recipe(named, sets)
    _require_inputs(named, resolved.recipe)

    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.distill.teacher_pass import cache_teacher as run

    directory = run(resolved)
    if os.environ.get("RANK", "0") == "0":
        emit(json.dumps({"cache": str(directory)}) if as_json else directory)


def plan(
    recipe: Recipe = None,
    recipe_name: RecipeOption = None,
    sets: Sets = [],  # noqa: B006
    gpus: PlannedGpus = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpu_mem: Annotated[float, typer.Option(min=1, metavar="GIB", help="Memory of a GPU, as sold.")] = 141.0,
    price: Annotated[float | None, typer.Option(min=0, help="Of one GPU for an hour.")] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="Share of the GPUs' peak reached; default: as measured.")
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            help="Predict training steps of both wirings on 1 to 128 nodes with the links in this file; the default is "
            "parallel.machine."
        ),
    ] = None,
    wire: Annotated[str, typer.Option(help="With --machine: the format of the rows with a quantised wire.")] = "int8",
    picture: Annotated[Path | None, typer.Option(help="With --machine: draw the prediction into this PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a recipe fits, how long it takes and what it costs. Reads no weight; exit 8 if it does not fit."""
    from fcsd.config import load_recipe

    named = one_recipe(recipe, recipe_name)
    read = load_recipe(named, sets).recipe
    _require_model(named, read)
    gpus = gpus or math.ceil(read.parallel.ep_size / nodes)

    from fcsd.parallel.machine import read_machine
    from fcsd.plan import Hardware, plan_run
    from fcsd.plan.cluster import draw, predict
    from fcsd.plan.cluster import to_json as predictions_to_json
    from fcsd.plan.cluster import to_text as predictions_to_text
    from fcsd.plan.deduplication import expected_options
    from fcsd.plan.deduplication import to_json as options_to_json
    from fcsd.plan.deduplication import to_text as options_to_text
    from fcsd.plan.report import to_json, to_text

    if read.parallel.machine is not None:
        machine = machine or Path(read.parallel.machine)
    if picture is not None and machine is None:
        raise ConfigError("--picture draws the prediction for a cluster", hint="--machine FILE describes the cluster")
    cluster = None if machine is None else read_machine(machine)
    planned = plan_run(read, Hardware(gpus, nodes, gpu_mem, price), mfu)
    predictions = [] if cluster is None else predict(planned.numbers, planned.setup, cluster.links, wire)
    options = (
        expected_options(planned.numbers, planned.setup, cluster.links, read.parallel)
        if cluster is not None and read.parallel.dedup == "auto"
        else []
    )
    if picture is not None:
        draw(predictions, picture, planned.name)
    if as_json:
        found = to_json(planned) | ({"cluster": predictions_to_json(predictions)} if predictions else {})
        found |= {"dedup": options_to_json(options)} if options else {}
        emit(json.dumps(found, indent=2))
    else:
        parts = [to_text(planned)]
        parts += [options_to_text(options)] if options else []
        parts += [predictions_to_text(predictions)] if predictions else []
        emit("\n\n".join(parts))
    planned.check()


def _require_inputs(name: str, recipe: "config.Recipe") -> None:
    """Check that the model and the data exist, before torch is imported; the processes of a run leave it to the run."""
    if "WORLD_SIZE" in os.environ:
        return
    from fcsd.distill.inputs import require_inputs

    require_inputs(recipe, _conversion(name, recipe))


def _require_model(name: str, recipe: "config.Recipe") -> None:
    """Check that a model exists which the recipe says to convert first. A plan does without the weights of others."""
    from fcsd.distill.inputs import require_model

    if conversion := _conversion(name, recipe):
        require_model(recipe, conversion)


def _conversion(name: str, recipe: "config.Recipe") -> str | None:
    from fcsd import recipes

    return recipes.conversion(recipes.find(name).read_text(encoding="utf-8"), recipe.model)
