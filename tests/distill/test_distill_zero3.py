"""ZeRO-3 in whole runs: the numbers and checkpoints of ZeRO-1 and ZeRO-2, while no process has a whole weight."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import texts
import tiny
import torch
import torch.distributed as dist
from benchmarks.train.random_run import random_corpus
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from fcsd.config import Recipe, ResolvedRecipe, accumulation
from fcsd.distill import loop
from fcsd.distill.data.of_run import training_rows
from fcsd.distill.inputs import student_source
from fcsd.distill.optim import update
from fcsd.distill.prepare import share_weights
from fcsd.distill.preview import preview
from fcsd.distill.step import engine
from fcsd.distill.step.one_step import train_step
from fcsd.distill.student import chosen_parts, student_config, train_parts
from fcsd.distill.teacher import targets
from fcsd.distill.teacher.shared import WithinPass
from fcsd.distill.teacher.targets import TeacherSource
from fcsd.errors import BadInputError, ConfigError, NonFiniteError
from fcsd.launch.world import World
from fcsd.models.archs import ARCHS
from fcsd.models.build import decoder_layers, experts_of, load_model
from fcsd.parallel import partitions
from fcsd.parallel.partitions import gathered, is_partitioned, whole_shape
from fcsd.parallel.weights.partitioned import load_partitioned
from fcsd.parallel.weights.tensor_map import state

# With these settings ZeRO-3 divides the smallest weight, too, and no weight is whole for longer than a pass needs it.
AT_ONCE = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 5000,
}
PLAIN = {
    "train__steps": 6,
    "train__eval_every": 3,
    "checkpoint__every_steps": 3,
    "optim__grad_clip": 0.5,
    "optim__weight_decay": 0.1,
    "early_stop": {"metric": "held_out", "every": 3},
}
OWN_SETTINGS = 77  # the seed of runs that have DeepSpeed's own settings
SHORT = {"train__steps": 2, "checkpoint__every_steps": 1}
FROZEN = {"objective__freeze_embeddings": True, "objective__freeze_lm_head": True}
BF16 = {**SHORT, "train__dtype": "bf16", "optim__accumulate_dtype": "fp32"}
ADAPTERS = {"train__adapter": {"rank": 4, "alpha": 8.0, "layers": "converted"}}
CONVERTED = {"init__wiring": "ladder", "init__layers": "last:2", "optim__train": ["converted"]}
# By name: the stage that the run is compared with, if any, its settings, and those that only ZeRO-3 gets.
CASES: dict[str, tuple[int | None, dict[str, Any], dict[str, Any]]] = {
    "plain": (1, PLAIN, {}),
    "recomputed": (
        1,
        {**SHORT, "train__micro_batch_size": 1, "objective__hidden": {"weight": 0.1, "layers": "all"}},
        {"train__activation_checkpointing": True, "train__sample_tokens": 2},
    ),
    "frozen": (2, {**SHORT, **FROZEN}, {}),
    "random": (2, {**SHORT, "init__weights": "random", "init__wiring": "desync-2x", "init__gpus": 2}, {}),
    "bf16": (2, BF16, {"checkpoint__overlap": True}),
    "adapters": (2, {**BF16, **ADAPTERS}, {"train__activation_checkpointing": True}),
    "adapters behind layers that both models share": (
        2,
        {**SHORT, **ADAPTERS, "init__wiring": "farskip", "init__layers": "last:2", "train__micro_batch_size": 1},
        {},
    ),
    "converted layers alone": (
        2,
        {**SHORT, **CONVERTED, "train__micro_batch_size": 1, "train__eval_every": 1},
        {"train__activation_checkpointing": True},
    ),
    "parts outside of layers, too": (
        2,
        {**BF16, **CONVERTED, "optim__train": ["last:1", "norms", "embeddings", "head"]},
        {"checkpoint__overlap": True},
    ),
    "parts beside adapters": (2, {**SHORT, **ADAPTERS, "optim__train": ["norms", "q_proj"]}, {}),
    "own settings, converted layers": (2, {**BF16, **CONVERTED, "seed": OWN_SETTINGS}, {}),
    "own settings": (None, {**BF16, "seed": OWN_SETTINGS}, {}),
}
# Other cases have every part of these settings, every day; converted layers train alone with DeepSpeed's own settings.
NIGHTLY = (
    "frozen",
    "adapters behind layers that both models share",
    "parts beside adapters",
    "converted layers alone",
)
UNTIED = ("recomputed", "frozen")  # the others train a model whose head is its embeddings
# Families whose parts read weights of others, whose files cut a weight, or with a tower beside the decoder.
PECULIAR = ("lfm2", "gemma3")
DENSE = sorted(name for name in ARCHS if name in tiny.CONFIGS and not experts_of(tiny.config(name)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher whose head is its embeddings, its conversion and a corpus."""
    folder = tmp_path_factory.mktemp("llama")
    runs.write_models(folder, "llama", tie_word_embeddings=True)
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a head of its own."""
    folder = tmp_path_factory.mktemp("qwen3")
    runs.write_models(folder, "qwen3")
    return folder


def recipe(folder: Path, out: Path, name: str, stage: int) -> ResolvedRecipe:
    _, settings, own = CASES[name]
    wired = dict.fromkeys(("model", "teacher"), str(folder / "teacher")) if "init__wiring" in settings else {}
    changes = {**settings, **(own if stage == 3 else {}), **wired}
    return runs.resolved(folder, output_dir=str(out), parallel__zero_stage=stage, **changes)


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other. Where ZeRO-3 divides all weights, none may be whole after a step."""
    divide_all()
    finish = loop.finish_step

    def finish_and_look(run: Any, *arguments: Any) -> None:
        finish(run, *arguments)
        if divides_all(run.recipe):
            assert not any(weight.numel() for weight in run.student.parameters())
            with run.training.source.teacher() as teacher:
                assert not any(weight.numel() for weight in teacher.parameters())

    loop.finish_step = finish_and_look
    for each in recipes:
        loop.distill_model(each)


def divides_all(each: Recipe) -> bool:
    """The other runs have DeepSpeed's own settings, which keep weights as small as these whole."""
    return each.parallel.zero_stage == 3 and each.seed != OWN_SETTINGS


def divide_all() -> None:
    configure = engine.deepspeed_config

    def with_settings(each: Recipe, *arguments: Any, **options: Any) -> dict[str, Any]:
        config = configure(each, *arguments, **options)
        config["zero_optimization"] |= AT_ONCE if divides_all(each) else {}
        return config

    engine.deepspeed_config = with_settings


def run_cases(folder: Path, untied: Path, out: Path, names: Iterable[str]) -> None:
    """Runs cases with ZeRO-3 in ``NAME-3`` and with the other stage in ``NAME-1`` or ``NAME-2``."""
    stages = [(name, stage) for name in names for stage in (CASES[name][0], 3) if stage is not None]
    of = {name: untied if name in UNTIED else folder for name in CASES}
    ranks.results(2, distill, [recipe(of[name], out / f"{name}-{stage}", name, stage) for name, stage in stages])


@pytest.fixture(scope="module")
def finished(folder: Path, untied: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Where the runs of a case are. All of the day, or of the night, are run when the first of them is asked for."""

    @cache
    def all_of(night: bool) -> Path:
        out = tmp_path_factory.mktemp("runs")
        run_cases(folder, untied, out, [name for name in CASES if (name in NIGHTLY) == night])
        return out

    return lambda name: all_of(name in NIGHTLY)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] if name in NIGHTLY else [])
        for name, (other, *_) in CASES.items()
        if other is not None
    ],
)
def test_runs_are_those_of_the_other_stages(finished: Callable[[str], Path], name: str) -> None:
    """Equal up to rounding: the norm is summed in another order, and AdamW meets the weights in other places."""
    out = finished(name)
    mine, reference = runs.numbers(out / f"{name}-3"), runs.numbers(out / f"{name}-{CASES[name][0]}")
    assert len(mine[0]) == len(reference[0]) == CASES[name][1]["train__steps"]
    for one, other in zip(mine[0], reference[0], strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-7)
    assert mine[1].keys() == reference[1].keys()
    assert ("lm_head.weight" in mine[1]) == (name in UNTIED)
    for key, weight in reference[1].items():
        torch.testing.assert_close(mine[1][key], weight, rtol=0, atol=5e-5)
    assert (out / f"{name}-3" / "samples.jsonl").exists() == (name == "recomputed")


@pytest.mark.parametrize(
    "names",
    [
        ("plain", "bf16", "own settings", "adapters", "own settings, converted layers"),
        pytest.param(("converted layers alone",), marks=pytest.mark.nightly),
    ],
    ids=["day", "night"],
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(
    finished: Callable[[str], Path], folder: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    for name in names:
        steps, every = (CASES[name][1][key] for key in ("train__steps", "checkpoint__every_steps"))
        run = tmp_path / name
        shutil.copytree(finished(name) / f"{name}-3", run)
        shutil.rmtree(run / "final")
        shutil.rmtree(run / "checkpoints" / f"step-{steps}")
        assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps - every}"]
    ranks.results(2, distill, [recipe(folder, tmp_path / name, name, 3) for name in names])
    for name in names:
        assert runs.outcome(tmp_path / name) == runs.outcome(finished(name) / f"{name}-3")


@pytest.mark.parametrize(
    "names",
    [
        ("own settings, converted layers", "plain"),
        pytest.param(("converted layers alone",), marks=pytest.mark.nightly),
    ],
    ids=["day", "night"],
)
def test_another_number_of_processes_continues_a_run(
    finished: Callable[[str], Path], folder: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Weights, moments and fp32 weights are divided anew; what the processes compute differs by rounding."""
    for size in (1, 4):
        recipes = []
        for name in names:
            steps, every = (CASES[name][1][key] for key in ("train__steps", "checkpoint__every_steps"))
            run = tmp_path / f"{name}-{size}"
            shutil.copytree(finished(name) / f"{name}-3", run)
            shutil.rmtree(run / "final")
            shutil.rmtree(run / "checkpoints" / f"step-{steps}")
            assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{steps - every}"]
            recipes.append(recipe(folder, run, name, 3))
        ranks.results(size, distill, recipes)
        for name in names:
            mine, reference = (runs.numbers(run) for run in (tmp_path / f"{name}-{size}", finished(name) / f"{name}-3"))
            for one, other in zip(mine[0], reference[0], strict=True):
                assert one == pytest.approx(other, rel=2e-2 if "settings" in name else 1e-5, abs=1e-6)
            for key, weight in reference[1].items():
                torch.testing.assert_close(mine[1][key], weight, rtol=0, atol=2e-3 if "settings" in name else 5e-5)


def poisoned(each: ResolvedRecipe) -> None:
    """A run whose teacher gives NaN from step 3 on, on rank 1 only."""
    calls, real = 0, targets.final_hidden

    def final_hidden(model: Any, columns: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return real(model, columns) * (torch.nan if calls > 4 and dist.get_rank() == 1 else 1.0)

    targets.final_hidden = final_hidden
    distill([each])


def test_a_loss_that_is_not_finite_stops_every_rank(folder: Path, tmp_path: Path) -> None:
    each = runs.resolved(folder, output_dir=str(tmp_path / "run"), parallel__zero_stage=3)
    results = ranks.on_ranks(2, poisoned, each)
    assert all(isinstance(error, NonFiniteError) for error in results)
    assert all("step 3" in str(error) and "step-2" in error.hint for error in results)


def train_family(rank: int, folder: Path, archs: list[str], recipes: list[Any]) -> None:
    """Compares weights after some steps of ZeRO-1 with those of ZeRO-3, whose weights were read one by one."""
    divide_all()
    world = World(rank, dist.get_world_size(), torch.device("cpu"))
    for arch in archs:
        world.on_first(lambda arch=arch: tiny.model(arch).save_pretrained(folder / arch))
        found = []
        for resolved in recipes:
            how: Any = {"dtype": torch.float32, "device": world.device}
            divided = resolved.recipe.parallel.zero_stage == 3
            model = (load_partitioned if divided else load_model)(folder / arch, **how)
            assert divided == all(map(is_partitioned, model.parameters())) == (not any(map(len, model.parameters())))
            built = engine.build_training(model, TeacherSource(), resolved.recipe, world)
            update.install(built.engine, resolved.recipe)
            rows = training_rows(resolved.recipe, [random_corpus(tiny.VOCAB, resolved.recipe.data.seq_len)])
            losses = torch.tensor([train_step(built, rows, resolved.recipe, world, n)["loss"] for n in (1, 2)])
            found.append({"losses": losses})
            for name, tensor in state(model).items():
                with gathered(tensor):
                    found[-1][name] = tensor.detach().clone()
            built.engine.destroy()
        reference, mine = found
        assert mine.keys() == reference.keys()
        for name, value in reference.items():
            # AdamW's first steps move a weight whose gradient is nearly 0 by up to the learning rate, with the
            # sign of its rounding. A step that was not taken, or another decay, moves all weights.
            distance = (mine[name] - value).norm()
            assert distance <= 2e-3 * value.norm(), f"{arch} {name}: {distance}"


@pytest.mark.parametrize("archs", [PECULIAR, pytest.param(DENSE, marks=pytest.mark.nightly)])
def test_families_are_trained_alike(folder: Path, tmp_path: Path, archs: list[str]) -> None:
    changes = {"objective__kl": 0.0, "optim__weight_decay": 0.1}
    recipes = [runs.resolved(folder, **changes, parallel__zero_stage=stage) for stage in (1, 3)]
    ranks.in_group(2, train_family, tmp_path, archs, recipes)


def count_gathers(rank: int, folder: Path, resolved: ResolvedRecipe) -> None:
    """Takes steps in which every weight is released after each pass, and counts what is gathered in the last of them.

    In one micro-batch each layer is gathered for the teacher's pass and for both of the student's, whole and at once.
    Recomputed layers find their weights there. Beside the layers only embeddings and heads are gathered. If the last
    two layers alone train, the others are gathered for the teacher's pass only, and there is one head.
    """
    partitions.KEPT_WHOLE, partitions.LIVE = tiny.config("llama").hidden_size, 0
    configure = engine.deepspeed_config

    def at_once(*arguments: Any, **options: Any) -> dict[str, Any]:
        config = configure(*arguments, **options)
        config["zero_optimization"]["stage3_max_reuse_distance"] = 0
        return config

    engine.deepspeed_config = at_once
    coordinator, sizes, invalid = PartitionedParameterCoordinator, [], []
    gather, invalidate = coordinator._PartitionedParameterCoordinator__all_gather_params_, coordinator._invalidate_trace

    def gather_and_count(self: Any, weights: Any, *how: Any, **settings: Any) -> None:
        sizes.append(sum(weight.ds_numel for weight in weights if weight.ds_status is ZeroParamStatus.NOT_AVAILABLE))
        gather(self, weights, *how, **settings)

    coordinator._PartitionedParameterCoordinator__all_gather_params_ = gather_and_count
    coordinator._invalidate_trace = lambda self: invalid.append(self) or invalidate(self)
    recipe, world = resolved.recipe, World(rank, dist.get_world_size(), torch.device("cpu"))
    how: Any = {"dtype": torch.float32, "device": world.device}
    alone = bool(recipe.optim.train)
    config = student_config(recipe, student_source(recipe))
    student, teacher = (load_partitioned(folder / name, **how) for name in ("student", "teacher"))
    if alone:
        chosen = chosen_parts(recipe, student_source(recipe))
        assert chosen is not None
        student = load_partitioned(folder / "teacher", config=config, **how)
        parts = train_parts(student, recipe, chosen)
        built = engine.build_training(student, TeacherSource(), recipe, world, parts=parts)
        built = replace(built, source=WithinPass(share_weights(parts, recipe), built.engine.module))
    else:
        source = engine.live_teacher(teacher.requires_grad_(False), recipe, world.size)
        built = engine.build_training(student, source, recipe, world)
    update.install(built.engine, recipe)
    rows = training_rows(recipe, [random_corpus(tiny.VOCAB, recipe.data.seq_len)])
    for step in (1, 2, 3):  # the order is recorded in two passes
        sizes.clear()
        train_step(built, rows, recipe, world, step)
    layer = sum(n for n in (whole_shape(w).numel() for w in decoder_layers(teacher)[0].parameters()) if n > 64)
    outside = tiny.VOCAB * teacher.config.hidden_size
    layers, micros = len(decoder_layers(teacher)), accumulation(recipe, world.size)
    # The student's last layer is still whole when its backward pass begins. Its embeddings are gathered for that, too.
    expected = {layer: micros * (3 * layers - 1), outside: micros * 5}
    if alone:  # the head takes the place of the last layer, which is gathered again
        expected = {layer: micros * (layers + 2 * 2), outside: micros * 3}
    assert Counter(filter(None, sizes)) == expected and layers > 3
    assert not invalid, "the order of the passes is the recorded one, so weights are gathered ahead"


@pytest.mark.parametrize("alone", [False, True])
def test_a_layer_is_gathered_at_once_and_once_for_each_pass(untied: Path, alone: bool) -> None:
    changes = {"model": str(untied / "teacher"), **CONVERTED} if alone else {}
    resolved = runs.resolved(untied, parallel__zero_stage=3, train__activation_checkpointing=True, **changes)
    ranks.in_group(2, count_gathers, untied, resolved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel__ep_size": 2}, "zero_stage 3 cannot be combined with parallel.ep_size above 1"),
        (
            {"parallel__tp_size": 2},
            "tp_size above 1 cannot be combined with parallel.zero_stage 0 or 3: set it to 1 or 2",
        ),
        (
            {"parallel__quantised": {"dispatch": "int8"}},
            "zero_stage 3 cannot be combined with .* or parallel.quantised",
        ),
        ({"train__compile": True}, "zero_stage 3 cannot be combined with train.compile"),
        (
            {"optim__offload": "host"},
            "offload host cannot be combined with parallel.zero_stage 0 or 3: set it to 1 or 2",
        ),
    ],
)
def test_settings_that_are_not_proven_are_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        runs.resolved(folder, parallel__zero_stage=3, **changes)


def test_models_that_are_not_proven_are_refused_before_anything_loads(folder: Path, tmp_path: Path) -> None:
    tiny.config("qwen3_moe").save_pretrained(tmp_path / "experts")
    quantised = tiny.config("llama")
    quantised.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    quantised.save_pretrained(tmp_path / "quantised")
    for name in ("experts", "quantised"):
        texts.tokenizer().save_pretrained(tmp_path / name)
    for error, changes, message in [
        (ConfigError, {"model": str(tmp_path / "experts")}, "experts: parallel.zero_stage 3 does not divide experts"),
        (ConfigError, {"teacher": str(tmp_path / "experts")}, "experts: parallel.zero_stage 3 does not divide experts"),
        (BadInputError, {"teacher": str(tmp_path / "quantised")}, r"is quantised \(fp8\), and parallel.zero_stage 3"),
    ]:
        with pytest.raises(error, match=message):
            preview(runs.resolved(folder, parallel__zero_stage=3, **changes).recipe, 2)
