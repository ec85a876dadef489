"""The commands `fcsd distill`, `write` and `plan`."""

import json
import logging
import math
import os
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import (
    AsJson,
    BatchSize,
    DryRun,
    Gpus,
    Model,
    Recipe,
    RecipeOption,
    Sets,
    UnsafeExec,
    gpu_memory,
    one_recipe,
    require_models,
)
from fcsd.errors import ConfigError
from fcsd.extras import require_extra
from fcsd.launch.world import first_rank

if TYPE_CHECKING:
    from fcsd import config

log = logging.getLogger(__name__)


def distill(
    recipe: Recipe = None,
    recipe_name: RecipeOption = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="A recipe with a sweep: try its values, then run the best.")
    ] = None,
    sets: Sets = [],  # noqa: B006 (typer reads the default and never changes it)
    gpus: Gpus = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Take the settings that `fcsd plan` finds to fit these GPUs, or to be faster.")
    ] = False,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="With --sweep: what starts a run on several machines, with the recipe behind it (docs/launching.md).",
        ),
    ] = None,
    join_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait for the other processes.")] = 300,
    resume: Annotated[str, typer.Option(metavar="auto|never|PATH", help="Where to continue from.")] = "auto",
    output_dir: Annotated[
        str | None, typer.Option(help="The run directory; overrides output_dir of the recipe.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Overrides seed of the recipe.")] = None,
    accept_unsafe_exec: UnsafeExec = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Heal a converted checkpoint by self-distillation. Prints the run directory, or the table of a sweep."""
    from fcsd.config import load_recipe
    from fcsd.config.recipe import accumulation

    named = one_recipe(recipe, recipe_name, sweep)
    flags = {"output_dir": output_dir, "seed": seed}
    given = {key: value for key, value in flags.items() if value is not None}
    resolved = load_recipe(named, sets, given)
    if resolved.recipe.sweep is not None and sweep is None:
        raise ConfigError(f"The recipe {named} is a sweep.", f"Start it with: fcsd distill --sweep {named}")
    if sweep is not None:
        from fcsd.distill.sweep.trials import plan_of

        plan_of(resolved)  # refuses a recipe without a sweep
        _sweep(named, resolved, gpus, launch, accept_unsafe_exec, dry_run, as_json)
        return
    if launch is not None:
        raise ConfigError("--launch is for --sweep", "Start one run by the command itself, with the recipe behind it.")

    from fcsd.launch.world import ensure_world, gpus_here

    _require_extras(resolved.recipe)
    _require_inputs(named, resolved.recipe)
    gpus = gpus or gpus_here(partial(_divides, resolved.recipe))
    if "WORLD_SIZE" not in os.environ:
        accumulation(resolved.recipe, gpus)  # or every process would say that the batch cannot be divided
    if fit:
        resolved = load_recipe(named, [*sets, *_fitting(resolved.recipe, gpus)], given)
    if not dry_run:
        ensure_world(gpus, grace_seconds=resolved.recipe.faults.grace_seconds)

    scorer = None
    if resolved.recipe.early_stop.benchmark:
        from fcsd.eval.early_score import scorer as benchmark

        scorer = benchmark(resolved.recipe.early_stop, accept_unsafe_exec=accept_unsafe_exec)

    from fcsd.distill.loop import distill_model

    directory = distill_model(
        resolved, resume=resume, dry_run=dry_run, processes=gpus, scorer=scorer, join_timeout=join_timeout
    )
    if first_rank():
        emit(json.dumps({"run": str(directory)}) if as_json else directory)


def _divides(recipe: "config.Recipe", gpus: int) -> bool:
    """Whether so many GPUs can divide the batch, the experts and the layers of a recipe."""
    from fcsd.config.recipe import accumulation

    try:
        accumulation(recipe, gpus)
    except ConfigError:
        return False
    return gpus % recipe.parallel.tp_size == 0 and gpus % recipe.parallel.ep_size == 0


def _fitting(recipe: "config.Recipe", gpus: int) -> list[str]:
    """The assignments that ``fcsd plan`` suggests for these GPUs; none where the recipe is best as it is.

    Raises:
        DoesNotFitError: no change that these GPUs allow makes the recipe fit.
    """
    from fcsd.plan import plan_run
    from fcsd.plan.setup import present

    world, each = (int(os.environ.get(name, gpus)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    planned = plan_run(recipe, present(each, world // each, None))
    best = planned.change or planned.faster
    if best is None or any(not text.startswith("--set ") for text in best.written):
        planned.check()
        return []
    if first_rank():
        log.info("--fit: %s", planned.described(best))
    return [text.removeprefix("--set ") for text in best.written]


def _sweep(
    name: str,
    resolved: "config.ResolvedRecipe",
    gpus: int | None,
    command: str | None,
    accept_unsafe_exec: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Run the trials of a sweep, then the full run, and print the table."""
    _require_extras(resolved.recipe)
    from fcsd.distill.sweep.process import ends_on_sigterm, launcher

    launch = launcher(gpus, accept_unsafe_exec, command)
    _require_inputs(name, resolved.recipe)  # before torch is imported

    from fcsd.distill.sweep import search as sweeping
    from fcsd.distill.sweep.report_table import to_text

    with ends_on_sigterm():
        found = sweeping.sweep(resolved, launch, dry_run=dry_run)
    emit(json.dumps(found, indent=2) if as_json else to_text(found))
    sweeping.require_complete(found)


def write(
    model: Model,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The directory for the text; a killed call goes on there.")],
    tokens: Annotated[str, typer.Option(metavar="N", help="How many tokens to write: 20000, 500K or 50M.")] = "50M",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Users' turns to answer (column `text`); by default the model invents them."),
    ] = None,
    form: Annotated[
        str | None, typer.Option(help="chat or document; chat is the default of a model with a chat template.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="The temperature at which tokens are drawn.")] = 1.0,
    greedy: Annotated[float, typer.Option(help="The share of answers written with the most likely tokens.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="The most tokens of a user's turn, an answer or a document.")] = 512,
    batch_size: BatchSize = None,
    seed: Annotated[int, typer.Option(help="The seed of the random numbers.")] = 0,
    gpus: Gpus = None,
    as_json: AsJson = False,
) -> None:
    """Let MODEL write the text on which its conversion is healed. Prints what a recipe says to read it."""
    require_extra("train", "fcsd write", "pyarrow")
    wanted = _tokens(tokens)

    from fcsd.distill.own_text_files import Writing

    Writing(temperature, greedy, form or "chat", max_tokens)  # refuses what has no meaning
    require_models(model)

    from fcsd.launch.world import ensure_world

    ensure_world(gpus)

    from fcsd.distill.own_text import to_text, write_own_text

    record = write_own_text(
        model,
        out,
        tokens=wanted,
        prompts=prompts,
        form=form,
        temperature=temperature,
        greedy=greedy,
        max_tokens=max_tokens,
        batch_size=batch_size,
        seed=seed,
    )
    if first_rank():
        emit(json.dumps(record, indent=1) if as_json else to_text(record, out))


def _tokens(text: str) -> int:
    """The number behind ``20000``, ``500K``, ``50M`` or ``1B``."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([KMB]?)", text.strip().upper())
    if found is None or not (number := float(found[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[found[2]]) >= 1:
        raise ConfigError(f"--tokens: {text!r} is not a number of tokens", "write for example 50M")
    return round(number)


def plan(
    recipe: Recipe = None,
    recipe_name: RecipeOption = None,
    sets: Sets = [],  # noqa: B006
    gpus: Annotated[
        int | None,
        typer.Option(
            "--gpus", min=1, help="GPUs of each machine; the default is what ep_size and tp_size of RECIPE need."
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Machines.")] = 1,
    gpu_mem: Annotated[
        str | None,
        typer.Option(
            metavar="80|80GB", help="Memory of a GPU, as sold; the default is that of this machine's GPUs, else 141 GB."
        ),
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, help="The price of one GPU for an hour.")] = None,
    mfu: Annotated[
        float | None, typer.Option(min=0.001, max=1, help="Share of the GPUs' peak reached; default: as measured.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a recipe, or a model directory, fits, how long it takes and what it costs. Reads no weight; exit 8 if
    it does not fit."""
    from fcsd.config import load_recipe

    named = one_recipe(recipe, recipe_name)
    if (Path(named) / "config.json").is_file():
        from fcsd.checkpoint import read_config

        converted = read_config(Path(named), trust_remote_code=True).rewired is not None
        layers = ["init.wiring=null", "init.layers=all"] if converted else ["init.layers=50%"]
        sets = [f"model={named}", *layers, *_OF_A_MODEL, *sets]
        named = _FOR_A_MODEL
        log.info("a model is planned as a recipe is: fcsd plan %s %s", named, " ".join(f"--set {one}" for one in sets))
    read = load_recipe(named, sets).recipe
    memory = None if gpu_mem is None else gpu_memory(gpu_mem)
    if conversion := _conversion(named, read):  # another model need not be here, because a plan reads no weights
        from fcsd.distill.inputs import require_model

        require_model(read, conversion)
    gpus = gpus or math.ceil(read.parallel.ep_size * read.parallel.tp_size / nodes)

    from fcsd.plan import Hardware, plan_run, report
    from fcsd.plan.setup import present

    hardware = present(gpus, nodes, price)
    if memory is not None:
        source = f"GPUs of {memory:g} GiB, as --gpu-mem says; hours assume the arithmetic of an H200"
        hardware = Hardware(gpus, nodes, memory, price, source)
    planned = plan_run(read, hardware, mfu)
    emit(json.dumps(report.to_json(planned), indent=2) if as_json else report.to_text(planned))
    planned.check()


# How a model is planned without a recipe: the last half of its layers is healed on text that it wrote.
_FOR_A_MODEL = "smollm2-135m-ladder"
_OF_A_MODEL = ["train.micro_batch_size=1", "train.compile=false", "train.dtype=bf16"]


def _require_extras(recipe: "config.Recipe") -> None:
    """Check that the packages are installed with which a recipe is run."""
    require_extra("train", "fcsd distill")
    if recipe.train.adapter is not None and recipe.train.adapter.base is not None:
        require_extra("nf4", "train.adapter.base nf4")
    if recipe.optim.moments == "8bit":
        require_extra("nf4", "optim.moments 8bit")
    if recipe.early_stop.benchmark:
        require_extra("eval", f"early_stop.metric {recipe.early_stop.benchmark}")


def _require_inputs(name: str, recipe: "config.Recipe") -> None:
    """Check that the model and the data exist, before torch is imported. Processes that torchrun started skip this."""
    if "WORLD_SIZE" in os.environ:
        return
    from fcsd.distill.inputs import require_inputs

    require_inputs(recipe, _conversion(name, recipe))


def _conversion(name: str, recipe: "config.Recipe") -> str | None:
    """The command that makes the model of a recipe, if the recipe's file says it."""
    from fcsd import recipes

    return recipes.conversion(recipes.find(name).read_text(encoding="utf-8"), recipe.model)
