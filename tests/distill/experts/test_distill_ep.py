"""Expert parallelism in whole runs: the numbers of one process without it, wherever experts, ranks and stages lie."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import runs
import tiny
import torch
from files import snapshot
from reloads import fork_reloads
from safetensors.torch import load_file, save_file

from fcsd.config import Parallel, ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.experts import expert_parallel
from fcsd.distill.experts.expert_parallel import wire_sharded
from fcsd.distill.optim import update
from fcsd.distill.run.report import read_metrics
from fcsd.distill.student import check
from fcsd.errors import CheckpointError, ConfigError
from fcsd.export.final import export_model
from fcsd.parallel.weights.tensor_map import pieces, take

ARCHES = ("qwen3_moe", "deepseek_v2", "llama4_text")
STEPS = {"train__steps": 3, "optim__lr": 1e-4, "optim__schedule": "constant", "optim__warmup_steps": 0}
STEPS |= {"checkpoint__every_steps": 0}
SHARDED = {"parallel__ep_size": 2}
BF16 = {"train__dtype": "bf16", "optim__grad_clip": 0.5}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> directory of a teacher, its conversion and a corpus."""
    folders = {arch: tmp_path_factory.mktemp(arch) for arch in ARCHES}
    for arch, folder in folders.items():
        runs.write_models(folder, arch)
    return folders


def own_gradients(model: Any) -> dict[tuple[str, int | None], torch.Tensor]:
    """By transformers' name and, where experts are divided, the expert's number: what this process has."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    mine = [piece for piece in pieces(model) if piece.here and piece.parts[0] in gradients]
    return {(piece.name, piece.row): take(gradients, piece).clone() for piece in mine}


def whole(gradients: list[dict[tuple[str, int | None], torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What several processes have, under transformers' names."""
    every = {key: value for own in gradients for key, value in own.items()}
    experts = {name: sum(other == name for other, _ in every) for name, row in every if row is not None}
    fused = {name: torch.stack([every[name, row] for row in range(count)]) for name, count in experts.items()}
    return {name: value for (name, row), value in every.items() if row is None} | fused


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other; the gradients of a first step at stage 0 are left, whole, beside the run."""
    norm = update.global_norm

    def watched(engine: Any, recipe: Any, world: Any) -> torch.Tensor:
        if not (file := out.with_suffix(".gradients")).exists():
            gradients = world.everywhere(lambda: own_gradients(engine.module.model))
            world.on_first(lambda: save_file(whole(gradients), file))
        return norm(engine, recipe, world)

    update.global_norm = watched
    for recipe in recipes:
        out = Path(recipe.recipe.output_dir)
        loop.distill_model(recipe)


def run_all(folder: Path, out: Path, size: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Metrics, weights and first gradients of runs in ``size`` processes, by the name of the case."""
    recipes = [runs.resolved(folder, output_dir=str(out / name), **{**STEPS, **cases[name]}) for name in cases]
    ranks.results(size, distill, recipes)
    found = {}
    for name in cases:
        gradients = (out / name).with_suffix(".gradients")
        weights = load_file(out / name / "final" / "model.safetensors")
        found[name] = (read_metrics(out / name), weights, load_file(gradients) if gradients.exists() else {})
    return found


def assert_same(one: Any, other: Any, what: str) -> None:
    """Two runs agree up to rounding, in every number they have."""
    for mine, reference in zip(one[0], other[0], strict=True):
        for key in ("loss", "grad_norm", *(key for key in reference if key.startswith("held_out"))):
            assert mine[key] == pytest.approx(reference[key], rel=1e-5), f"{what}: {key} of step {mine['step']}"
    assert one[1].keys() == other[1].keys(), what
    for name, weight in other[1].items():
        torch.testing.assert_close(one[1][name], weight, rtol=1e-5, atol=1e-5, msg=lambda m: f"{what} {name}: {m}")  # noqa: B023
    if one[2] and other[2]:
        assert one[2].keys() == other[2].keys(), what
        for name, grad in other[2].items():
            torch.testing.assert_close(one[2][name], grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{what} {name}: {m}")  # noqa: B023


def cases_of(folder: Path, arch: str, every: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The runs of one process, and the expert-parallel ones; the first word of a name is its reference.

    Args:
        every: whether settings are repeated of which other cases are of the same kind.
    """
    standard = {"model": str(folder / "teacher"), "teacher": str(folder / "teacher")}
    hidden = {"objective__hidden": {"weight": 0.1, "layers": "all"}}
    single: dict[str, Any] = {
        "farskip": {"parallel__zero_stage": 0},
        "standard": {**standard, "parallel__zero_stage": 0},
    }
    sharded: dict[str, Any] = {
        "farskip on": {"parallel__zero_stage": 0},
        "farskip stage 2, recomputed": {
            "parallel__zero_stage": 2,
            "train__activation_checkpointing": True,
            "train__micro_batch_size": 1,
        },
        "farskip stage 1, replicated teacher": {"parallel__teacher_placement": "replicated"},
        "standard": {**standard, "parallel__zero_stage": 0},
    }
    if arch == "qwen3_moe":
        config = folder / "config"  # and a tokenizer, no weights
        shutil.copytree(folder / "teacher", config, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        random = {**standard, "model": str(config), "init": {"weights": "random", "wiring": "farskip"}}
        single["random"] = sharded["random"] = random
        if not every:  # deepseek_v2 has these, too
            sharded = {name: sharded[name] for name in ("farskip on", "random")}
            del single["standard"]
    if arch == "deepseek_v2":
        single |= {"hidden": hidden, "bf16": BF16}
        sharded |= {
            "farskip eager-sync": {"parallel__zero_stage": 0, "parallel__overlap": "eager-sync"},
            "farskip off": {"parallel__zero_stage": 0, "parallel__overlap": "off"},
            "farskip stage 2, deduplicated": {"parallel__zero_stage": 2, "parallel__dedup": "rank"},
            "hidden": hidden,
            **{f"bf16 stage {stage}": {**BF16, "parallel__zero_stage": stage} for stage in (0, 1, 2)},
        }
        if not every:  # four ranks have a replicated teacher, ZeRO-0 and 2 a case in fp32, and test_overlap eager-sync
            for name in ("farskip stage 1, replicated teacher", "farskip eager-sync", "bf16 stage 0", "bf16 stage 2"):
                del sharded[name]
    return single, {name: {**SHARDED, **changes} for name, changes in sharded.items()}


@pytest.mark.parametrize(
    ("arch", "every"),
    [
        pytest.param("qwen3_moe", False, marks=pytest.mark.nightly),
        ("deepseek_v2", False),
        *(pytest.param(arch, True, marks=pytest.mark.nightly) for arch in ARCHES),
    ],
)
def test_two_ranks_equal_one_process(models: dict[str, Path], tmp_path: Path, arch: str, every: bool) -> None:
    single, sharded = cases_of(models[arch], arch, every)
    reference = run_all(models[arch], tmp_path / "single", 1, single)
    found = run_all(models[arch], tmp_path / "sharded", 2, sharded)
    assert reference["farskip"][2] and found["farskip on"][2]
    for name, result in found.items():
        if name.startswith("bf16"):
            assert_close(result, reference["bf16"], name)
        else:
            assert_same(result, reference[name.split()[0]], name)
    for name, result in found.items():  # overlapped and blocking runs are equal to the last bit
        kind, _, mode = name.partition(" ")
        if mode in ("eager-sync", "off"):
            on = found[f"{kind} on"]
            assert [m["loss"] for m in result[0]] == [m["loss"] for m in on[0]], name
            assert all(torch.equal(weight, on[1][key]) for key, weight in result[1].items()), name


def assert_close(one: Any, other: Any, what: str) -> None:
    """Two runs in bf16 agree as well as that precision lets them."""
    for mine, reference in zip(one[0], other[0], strict=True):
        assert mine["loss"] == pytest.approx(reference["loss"], rel=5e-3), what
        assert mine["grad_norm"] == pytest.approx(reference["grad_norm"], rel=2e-2), what


def lopsided(folder: Path) -> dict[str, Any]:
    """A student whose tokens all go to the first four of eight experts, without ties."""
    student = folder / "lopsided"
    shutil.copytree(folder / "student", student, dirs_exist_ok=True)
    weights = load_file(student / "model.safetensors")
    for name, gate in weights.items():
        if name.endswith("mlp.gate.weight"):
            gate[:4] = gate[0].clone() * torch.tensor([1.0, -1.0, 0.5, -0.5]).unsqueeze(1)
            gate[4:] = 0
    save_file(weights, student / "model.safetensors", metadata={"format": "pt"})
    return {"model": str(student)}


@pytest.mark.parametrize(
    "arch", ["deepseek_v2", *(pytest.param(a, marks=pytest.mark.nightly) for a in ("qwen3_moe", "llama4_text"))]
)
def test_four_ranks_equal_one_process(models: dict[str, Path], tmp_path: Path, arch: str) -> None:
    half = {"parallel__ep_size": 2}
    stage_2 = {**half, "parallel__zero_stage": 2, "train__micro_batch_size": 1}
    single: dict[str, Any] = {"all": {"parallel__zero_stage": 0}}
    sharded = {
        "all, two share, stage 0": {**half, "parallel__zero_stage": 0},
        "all, two share, stage 1, replicated teacher": {**half, "parallel__teacher_placement": "replicated"},
        "all, two share, stage 2": stage_2,
        "all, four share": {"parallel__ep_size": 4},
    }
    if arch == "deepseek_v2":  # every other rank has experts without a token
        single["lopsided"] = {**lopsided(models[arch]), "parallel__zero_stage": 0}
        del sharded["all, two share, stage 2"]
        sharded["lopsided, two share, stage 2"] = {**lopsided(models[arch]), **stage_2}
    reference = run_all(models[arch], tmp_path, 1, single)
    for name, result in run_all(models[arch], tmp_path, 4, sharded).items():
        assert_same(result, reference[name.split(",")[0]], name)


def resumed(folder: Path, run: Path, size: int, **changes: Any) -> tuple[Path, int, int]:
    """A run of four steps: the directory of its copy that was resumed after two, and what ``train`` gave for both."""
    recipe = {"parallel__ep_size": 2, **changes}
    whole = train(runs.resolved(folder, output_dir=str(run), **recipe), size)
    copy = runs.cut_short(run, run.with_name("resumed"))
    half = train(runs.resolved(folder, output_dir=str(copy), **{**recipe, "parallel__overlap": "off"}), size)
    return copy, whole, half


def counted(recipe: ResolvedRecipe) -> int:
    """Runs a recipe; how many groups of parameters torch's fused AdamW has stepped."""
    private: Any = torch
    kernel, calls = private._fused_adamw_, []

    def watched(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        kernel(*args, **kwargs)

    private._fused_adamw_ = watched
    loop.distill_model(recipe)
    return len(calls)


def train(recipe: ResolvedRecipe, size: int) -> int:
    """Runs a recipe in ``size`` processes; ``counted`` of the first."""
    results = ranks.results(size, counted, recipe)
    return results[0]


@pytest.mark.parametrize(
    ("size", "stage"), [(2, 1), *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((2, 0), (4, 1), (4, 2)))]
)
def test_two_steps_and_a_resume_are_four_steps(models: dict[str, Path], tmp_path: Path, size: int, stage: int) -> None:
    run = tmp_path / "run"
    copy, whole, half = resumed(models["deepseek_v2"], run, size, parallel__zero_stage=stage)
    assert runs.outcome(copy) == runs.outcome(run)
    assert whole == 2 * half and half >= 2 * 2  # experts are a group of their own, before and after the resume
    # With ZeRO every rank has a partition of the optimizer's state; without it, two ranks hold all experts' states.
    assert len(list(run.glob("checkpoints/step-4/optimizer/rank-*.pt"))) == (size if stage else 2)


def refusal(recipe: ResolvedRecipe) -> str:
    """What resuming says."""
    with pytest.raises(CheckpointError) as caught:
        loop.distill_model(recipe)
    return str(caught.value)


def test_every_checkpoint_is_an_export_and_a_start_and_belongs_to_its_degree(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_reloads(monkeypatch)
    folder, run, out = models["qwen3_moe"], tmp_path / "run", tmp_path / "out"
    trained = {**SHARDED, **STEPS, "output_dir": str(run), "train__steps": 2, "checkpoint__every_steps": 1}
    trained |= {"train__eval_every": 1}
    train(runs.resolved(folder, **trained), 2)
    losses = {line["step"]: line["held_out_sft"] for line in read_metrics(run)}
    chosen = export_model(str(run), out, checkpoint="best")  # reloads it to equal logits
    step = min(losses, key=losses.__getitem__)
    saved = run / "checkpoints" / f"step-{step}" / "model"
    assert (chosen / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    # An export is a student like any other: at a rate of nothing, its loss stays what it was.
    again = {**trained, "model": str(out), "output_dir": str(tmp_path / "again"), "optim__lr": 1e-30}
    train(runs.resolved(folder, **again, optim__horizon=9), 2)
    assert read_metrics(tmp_path / "again")[0]["held_out_sft"] == pytest.approx(losses[step], rel=1e-6)

    before = snapshot(run / "checkpoints")
    other = runs.resolved(folder, **{**trained, "parallel__ep_size": 1})
    expected = f"{run / 'checkpoints' / 'step-2'} belongs to another run: parallel.ep_size was 2 and is now 1"
    assert ranks.on_ranks(2, refusal, other) == [expected] * 2
    assert snapshot(run / "checkpoints") == before


def scored(recipes: list[ResolvedRecipe]) -> None:
    from fcsd.eval.early_score import scorer

    for recipe in recipes:
        loop.distill_model(recipe, scorer=scorer(recipe.recipe.early_stop))


def test_scores_and_the_best_checkpoint_are_those_of_one_process(
    models: dict[str, Path], tmp_path: Path, repo: Path
) -> None:
    task = {"metric": "piqa", "suite": "paper", "limit": 6, "data_mirror": str(repo / "assets/mirror")}
    watched = {name: {"early_stop": {**stop, "every": 1}} for name, stop in
        {"held out": {"metric": "held_out"}, "task": task}.items()}  # fmt: skip
    found: dict[int, dict[str, Path]] = {}
    for size, ep_size in ((1, 1), (2, 2)):
        out = tmp_path / str(size)
        cases = {name: {**STEPS, "parallel__ep_size": ep_size, **stop} for name, stop in watched.items()}
        cases["unwatched"] = {**STEPS, "parallel__ep_size": ep_size}
        found[size] = {name: out / name for name in cases}
        recipes = [runs.resolved(models["deepseek_v2"], output_dir=str(out / n), **case) for n, case in cases.items()]
        for result in ranks.on_ranks(size, scored, recipes):
            assert result is None, result
    for name in watched:
        one, two = (read_metrics(found[size][name]) for size in (1, 2))
        assert [line["score"] for line in two] == pytest.approx([line["score"] for line in one], rel=1e-4)
        assert all(line["score"] > 0 for line in one)
        assert [line["best_step"] for line in two] == [line["best_step"] for line in one]
        assert [line["loss"] for line in two] == [line["loss"] for line in read_metrics(found[2]["unwatched"])]


@pytest.mark.parametrize(
    ("device", "wanted", "fused"), [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_norms_and_rows_are_fused_on_gpus_if_the_recipe_says_so(
    monkeypatch: pytest.MonkeyPatch, device: str, wanted: bool, fused: bool
) -> None:
    given = {}
    monkeypatch.setattr("fcsd.parallel.overlap.overlap", lambda *_, **options: given.update(options))
    monkeypatch.setattr(expert_parallel, "fuse_parts", lambda model, arch, on: given.update(parts=on))
    model: Any = SimpleNamespace(config=tiny.config("qwen3_moe"), device=torch.device(device))
    wire_sharded(model, 2, Parallel(ep_size=2, fused=wanted))
    wire_sharded(model, 1, Parallel(fused=wanted))
    assert given["fused"] == given["parts"] == fused


@pytest.mark.nightly
def test_two_hundred_steps_follow_the_blocking_loss_to_the_last_bit(models: dict[str, Path], tmp_path: Path) -> None:
    long = {**SHARDED, "train__steps": 200, "checkpoint__every_steps": 0}
    modes = {mode: {**long, "parallel__overlap": mode} for mode in ("on", "eager-sync", "off")}
    found = run_all(models["deepseek_v2"], tmp_path, 2, modes)
    on, *others = ([m["loss"] for m in found[mode][0]] for mode in modes)
    assert len(on) == 200 and on[-1] < on[0] and all(other == on for other in others)


def test_what_cannot_be_expert_parallel_is_refused_before_anything_is_written(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for arch in ("gpt_oss", "llama"):
        tiny.model(arch).save_pretrained(tmp_path / arch)
    for message, processes, changes in [
        ("does not divide the 3 processes", 3, {"parallel__ep_size": 2}),
        ("does not divide the 8 experts of", 3, {"parallel__ep_size": 3}),
        ("gpt_oss cannot be expert-parallel: .*expert biases", 2, {**SHARDED, "teacher": str(tmp_path / "gpt_oss")}),
        ("llama cannot be expert-parallel: it has no experts", 2, {**SHARDED, "model": str(tmp_path / "llama")}),
    ]:
        changes = {"output_dir": str(tmp_path / "run"), "train__batch_tokens": 384, **changes}
        recipe = runs.resolved(models["deepseek_v2"], **changes)
        with pytest.raises(ConfigError, match=message):
            check(recipe.recipe, processes)
        with pytest.raises(ConfigError, match=message):
            loop.distill_model(recipe, dry_run=True, processes=processes)
    replicated = {**SHARDED, "teacher": str(tmp_path / "llama"), "parallel__teacher_placement": "replicated"}
    check(runs.resolved(models["deepseek_v2"], **replicated).recipe, 2)
    assert not (tmp_path / "run").exists()


def test_deduplication_of_tokens_that_choose_one_expert_is_said_to_have_no_effect(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for arch, said in (("llama4_text", 1), ("deepseek_v2", 0)):
        caplog.clear()
        check(runs.resolved(models[arch], **SHARDED, parallel__dedup="rank").recipe, 2)
        lines = [record.getMessage() for record in caplog.records if "parallel.dedup rank" in record.getMessage()]
        assert len(lines) == said and all("no effect, because each token chooses one expert" in line for line in lines)


def test_the_command_distils_on_two_processes_and_exports_what_loads_anywhere(
    models: dict[str, Path], repo: Path, tmp_path: Path
) -> None:
    def fcsd(*arguments: str, size: int | None = None) -> None:
        done = ranks.fcsd(*arguments, cwd=repo, size=size)
        assert done.returncode == 0, done.stderr

    folder = models["deepseek_v2"]
    runs.resolved(folder)  # writes the corpus
    source = json.dumps([{"path": str(folder / "corpus.jsonl")}])
    settings = {
        "model": str(tmp_path / "student"),
        "data.sources": source,
        "data.held_out": "null",
        "data.seq_len": "64",
        "train.batch_tokens": "512",
        "train.steps": "3",
        "optim.warmup_steps": "1",
        "train.sample_tokens": "4",
        "parallel.ep_size": "2",
    }
    fcsd("convert", str(folder / "teacher"), str(tmp_path / "student"), "--wiring", "farskip", "--no-check")
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    fcsd("distill", "--recipe", "tiny", *sets, "--output-dir", str(tmp_path / "run"), size=2)
    fcsd("export", str(tmp_path / "run"), str(tmp_path / "out"))  # reloads it in a fresh process to equal logits
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("student", "out"))
    assert after.keys() == before.keys()
    expert = "model.layers.3.mlp.experts.7.down_proj.weight"
    assert after[expert].shape == before[expert].shape and not torch.equal(after[expert], before[expert].float())
