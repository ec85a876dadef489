"""Runs with frozen weights: what trains, what checkpoints hold, resume, the merged model, and what is refused."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from reloads import fork_reloads
from runs import outcome, train
from safetensors.torch import load_file

from fcsd.checkpoint import read_layout
from fcsd.checkpoint.location import RUN_RECIPE
from fcsd.convert import convert_checkpoint
from fcsd.distill import loop, parts, prepare
from fcsd.distill.inputs import student_source
from fcsd.distill.run.report import read_metrics
from fcsd.distill.student import chosen_parts, load_student, train_parts
from fcsd.distill.teacher.targets import LiveTeacher
from fcsd.errors import BadInputError, CheckpointError, ConfigError
from fcsd.export.final import export_model
from fcsd.models.build import load_model

LORA: dict[str, Any] = {"train__adapter": {"rank": 4, "alpha": 8.0}, "optim__train": ["norms"]}
# The last two of four layers are converted, and nothing else trains, their routed experts included.
HALF: dict[str, Any] = {"init": {"wiring": "farskip", "layers": "50%"}, "optim__train": ["converted"]}
PARTS = Path("parts") / "parts.safetensors"


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """The directory of a run of four steps with adapters in one process, with checkpoints after two and four."""
    train(runs.resolved(folder, output_dir=str(folder / "lora"), **LORA))
    return folder / "lora"


def test_checkpoints_hold_what_trains_and_final_is_the_merged_model(folder: Path, finished: Path) -> None:
    checkpoint = finished / "checkpoints" / "step-4"
    trained = load_file(checkpoint / PARTS)
    assert not (checkpoint / "model").exists()
    adapters = {name for name in trained if "lora_" in name}
    assert all("norm" in name for name in trained.keys() - adapters) and trained.keys() - adapters
    states = torch.load(checkpoint / "optimizer" / "rank-0.pt", weights_only=False)
    moments = next(iter(states["base_optimizer_state"]["state"].values()))["exp_avg"].numel()
    assert moments == sum(tensor.numel() for tensor in trained.values())
    base, final = (load_file(path / "model.safetensors") for path in (folder / "student", finished / "final"))
    assert base.keys() == final.keys()
    for name, weight in base.items():
        path = name.removesuffix(".weight")
        if f"{path}.lora_A.weight" in trained:
            product = trained[f"{path}.lora_B.weight"] @ trained[f"{path}.lora_A.weight"]
            torch.testing.assert_close(final[name], weight + 2.0 * product)
            assert not torch.equal(final[name], weight)
        elif name in trained:
            assert torch.equal(final[name], trained[name])
        else:
            assert torch.equal(final[name], weight), name
    losses = [line["held_out_kl"] for line in read_metrics(finished) if "held_out_kl" in line]
    assert losses and losses[-1] > 0


def half_run(folder: Path, out: Path, **changes: Any) -> Any:
    return runs.resolved(folder, model=str(folder / "teacher"), output_dir=str(out), **{**HALF, **changes})


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, LORA),
        (2, {"train__dtype": "bf16", "parallel__zero_stage": 2, **LORA}),
        (1, {"train__dtype": "bf16", **HALF}),
        pytest.param(2, {"parallel__zero_stage": 2, "checkpoint__overlap": True, **HALF}, marks=pytest.mark.nightly),
        pytest.param(2, {"train__dtype": "bf16", "parallel__zero_stage": 0, **HALF}, marks=pytest.mark.nightly),
        pytest.param(1, {"train__dtype": "bf16", **LORA}, marks=pytest.mark.nightly),
        pytest.param(2, {"parallel__ep_size": 2, "checkpoint__overlap": True, **LORA}, marks=pytest.mark.nightly),
        pytest.param(2, {"parallel__zero_stage": 0, **LORA}, marks=pytest.mark.nightly),
    ],
)
def test_two_steps_and_a_resume_are_four_steps(
    folder: Path, tmp_path: Path, size: int, changes: dict[str, Any]
) -> None:
    changes = {"model": str(folder / "teacher"), **changes} if "init" in changes else changes
    train(runs.resolved(folder, output_dir=str(tmp_path / "run"), **changes), size)
    shutil.copytree(tmp_path / "run", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "final")
    shutil.rmtree(tmp_path / "part" / "checkpoints" / "step-4")
    train(runs.resolved(folder, output_dir=str(tmp_path / "part"), **changes), size)
    assert outcome(tmp_path / "part") == outcome(tmp_path / "run")
    last = Path("checkpoints") / "step-4" / PARTS
    assert (tmp_path / "part" / last).read_bytes() == (tmp_path / "run" / last).read_bytes()


def killed_export(run: Path, out: Path) -> None:
    def deadly(recipe: Any, folder: Path, directory: Path) -> None:
        directory.write_text("half of a model")
        os.kill(os.getpid(), signal.SIGKILL)

    parts.merge_checkpoint = deadly
    export_model(run, out, checkpoint="latest")


def test_any_checkpoint_is_exported_as_an_ordinary_model(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own check reloads it in a process without fcsd. It needs no process group."""
    fork_reloads(monkeypatch)
    assert ranks.exit_code(killed_export, finished, tmp_path / "other") == -signal.SIGKILL
    (left,) = tmp_path.glob(".merged-*")
    assert (left / "model").is_file(), "what a killed export leaves, the next one deletes"
    export_model(finished, tmp_path / "out", checkpoint="latest")
    exported, final = (load_file(path / "model.safetensors") for path in (tmp_path / "out", finished / "final"))
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], final[name]) for name in final)
    assert (tmp_path / "out" / "reload_proof.json").is_file()
    assert not list(tmp_path.glob(".merged-*"))
    ids = torch.arange(9)[None]
    two = (load_model(path, dtype=torch.float32) for path in (tmp_path / "out", finished / "final"))
    assert torch.equal(*(model(ids).logits for model in two))


def test_parts_that_train_alone_are_all_that_changes_and_are_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork_reloads(monkeypatch)
    train(half_run(folder, tmp_path / "run", train__steps=2, train__dtype="bf16"))
    checkpoint = tmp_path / "run" / "checkpoints" / "step-2"
    trained, states = (
        load_file(checkpoint / PARTS),
        torch.load(checkpoint / "optimizer" / "rank-0.pt", weights_only=False),
    )
    assert not (checkpoint / "model").exists() and any(".experts." in name for name in trained)
    assert {name.split(".")[2] for name in trained} == {"2", "3"}
    assert len(states["state"]) == len(trained)
    base, final = (load_file(path / "model.safetensors") for path in (folder / "teacher", tmp_path / "run" / "final"))
    assert base.keys() == final.keys()
    for name, weight in base.items():
        changes = "layers.2." in name or "layers.3." in name
        assert torch.equal(final[name], weight.bfloat16().to(final[name].dtype)) != changes or weight.ndim == 1, name
    told = tmp_path / "run" / RUN_RECIPE  # a stage that runs have no more is no reason to keep what one has trained
    assert "zero_stage: 1" in told.read_text()
    told.write_text(told.read_text().replace("zero_stage: 1", "zero_stage: 3"))
    export_model(tmp_path / "run", tmp_path / "out", checkpoint="latest")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == final.keys() and all(torch.equal(exported[name], final[name]) for name in final)


def distill_and_get_worse(recipe: Any) -> None:
    """A run whose score is the number of its step, of which less is better."""
    take = loop.ScoreHistory.take
    loop.ScoreHistory.take = lambda self, model, tokenizer, step, metrics: take(
        self, model, tokenizer, step, {**metrics, "held_out_kl": float(step)}
    )
    loop.distill_model(recipe)


@pytest.mark.parametrize("changes", [LORA, pytest.param({"optim__train": ["norms"]}, marks=pytest.mark.nightly)])
def test_a_run_stops_early_and_publishes_the_best_checkpoint_and_not_the_last(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    stop = {"metric": "held_out", "every": 2, "patience": 1}
    recipe = runs.resolved(folder, output_dir=str(tmp_path), early_stop=stop, train__steps=6, **changes)
    assert ranks.on_ranks(1, distill_and_get_worse, recipe) == [None]
    assert read_metrics(tmp_path)[-1]["step"] == 4
    best, last = (load_file(tmp_path / "checkpoints" / step / PARTS) for step in ("step-2", "step-4"))
    final = load_file(tmp_path / "final" / "model.safetensors")
    assert torch.equal(final["model.norm.weight"], best["model.norm.weight"])
    assert not torch.equal(final["model.norm.weight"], last["model.norm.weight"])


def test_the_teachers_pass_leaves_no_trace(folder: Path) -> None:
    recipe = runs.resolved(folder, **LORA).recipe
    source, device = student_source(recipe), torch.device("cpu")
    chosen = chosen_parts(recipe, source)
    assert chosen is not None
    student = load_student(recipe, dtype=torch.float32, device=device).train()
    teacher = load_model(folder / "teacher", dtype=torch.float32)
    parts = train_parts(student, recipe, chosen)
    for _, parameter in parts.tensors():
        parameter.data.add_(0.01)
    shared, live = prepare.share_weights(parts, recipe), LiveTeacher(teacher, recipe.objective)
    ids = torch.arange(24).reshape(2, 12)
    columns = {"input_ids": ids, "position_ids": torch.arange(12).repeat(2, 1)}

    def facts() -> Any:
        layers = [(type(layer), vars(layer).get("fcsd", "none")) for layer in student.model.layers]
        tensors = {name: value.clone() for name, value in student.state_dict().items()}
        wants = [
            (name, parameter.requires_grad, parameter.data_ptr()) for name, parameter in student.named_parameters()
        ]
        hooks = [len(module._forward_hooks) for module in student.modules()]
        return layers, wants, hooks, [module.training for module in student.modules()], tensors, torch.get_rng_state()

    before, logits = facts(), student(ids).logits
    found, expected = shared.get_targets(columns), live.get_targets(columns)
    assert torch.equal(found.output[0], expected.output[0]) and torch.equal(found.output[1], expected.output[1])
    assert not found.output[0].requires_grad and not found.output[1].requires_grad
    with shared.teacher() as model:
        assert not any(module.training for module in model.modules()), "a teacher drops nothing out"
    after = facts()
    assert before[:4] == after[:4]
    assert all(torch.equal(after[4][name], value) for name, value in before[4].items())
    assert torch.equal(before[5], after[5])
    assert torch.equal(student(ids).logits, logits)
    student(ids).logits.sum().backward()
    trained = {id(parameter) for _, parameter in parts.tensors()}
    assert all((parameter.grad is not None) == (id(parameter) in trained) for parameter in student.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__adapter": {"rank": 0}}, "train.adapter.rank"),
        ({"train__adapter": None, "init": {"weights": "random"}}, "cannot be combined with init.weights"),
        (
            {"optim__train": ["head"], "objective__freeze_lm_head": True},
            "combined with .*objective.freeze_lm_head",
        ),
        ({"parallel__teacher_placement": "replicated"}, "cannot be combined with parallel.teacher_placement"),
        ({"init": {"weights": "random"}}, "cannot be combined with init.weights random"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        runs.resolved(folder, **{**LORA, **changes})
    assert "\n" not in str(caught.value)


def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_args: object, **_options: object) -> None:
        raise AssertionError("a model was loaded")

    for name in ("load_student", "load_teacher"):
        monkeypatch.setattr(prepare, name, load)


def refused(recipe: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        loop.distill_model(recipe)
    assert "\n" not in str(caught.value)


def test_another_teacher_or_a_trained_student_is_refused_before_anything_loads(
    folder: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing_loads(monkeypatch)
    where = {"output_dir": str(tmp_path / "run"), **LORA}
    refused(runs.resolved(folder, teacher=str(finished / "final"), **where), ConfigError, "needs the weights of the te")
    trained = {"model": str(finished / "final"), "teacher": str(folder / "teacher")}
    refused(runs.resolved(folder, **trained, **where), ConfigError, "differ from those of")
    unknown = {**where, "train__adapter": {"targets": ["q_prj"]}}
    refused(runs.resolved(folder, **unknown), ConfigError, "no linear layer 'q_prj'")
    desync = {"model": str(folder / "llama"), "init": {"wiring": "desync-2x", "gpus": 2}}
    runs.write_models(folder / "dense", "llama")
    desync["model"] = str(folder / "dense" / "teacher")
    refused(runs.resolved(folder, **desync, **where), ConfigError, "cannot be combined with the wiring desync-2x")
    refused(half_run(folder, tmp_path / "run", parallel__ep_size=2), ConfigError, "divide the 1 processes")
    monkeypatch.setattr(prepare, "check", lambda *_: None)
    named = half_run(folder, tmp_path / "run", parallel__ep_size=2, optim__train=["nrms"])
    refused(named, ConfigError, "no part 'nrms'")
    healed = {"teacher": str(finished / "final"), "optim__train": ["norms"]}
    refused(half_run(folder, tmp_path / "run", **healed), ConfigError, "optim.train needs the weights of the teacher")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_the_other_kind_is_refused_before_anything_loads(
    folder: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(runs.resolved(folder, output_dir=str(tmp_path / "full"), train__steps=2, optim__horizon=4))
    nothing_loads(monkeypatch)
    for run, changes, message in (
        (finished, {}, "optim.train.0 was 'norms' and is now 'nothing'; train.adapter.alpha was 8.0"),
        (finished, {**LORA, "train__adapter": {"rank": 8, "alpha": 8.0}}, "train.adapter.rank was 4 and is now 8"),
        (tmp_path / "full", LORA, "train.adapter.rank was 'nothing' and is now 4"),
        (tmp_path / "full", {"optim__train": ["norms"]}, "optim.train.0 was 'nothing' and is now 'norms'"),
    ):
        recipe = runs.resolved(folder, output_dir=str(run), **changes)
        refused(recipe, CheckpointError, message)
    mistyped = runs.resolved(folder, output_dir=str(tmp_path / "full"), optim__train=["nrms"])
    refused(mistyped, ConfigError, "no part 'nrms'")


def test_an_export_needs_the_weights_beside_which_the_adapters_were_trained(
    folder: Path, finished: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    settings = tmp_path / "run" / "checkpoints" / "step-4" / "parts" / "parts.json"
    facts = json.loads(settings.read_text())
    assert facts["base"] == str((folder / "student").resolve())
    moved = folder / "moved"
    (folder / "student").rename(moved)
    try:
        with pytest.raises(BadInputError, match="no such directory") as caught:
            export_model(finished, tmp_path / "out")
        assert "merged into these weights" in str(caught.value.hint)
        shutil.copytree(finished / "final", folder / "student")
        with pytest.raises(BadInputError, match="are not those beside which"):
            export_model(finished, tmp_path / "out")
    finally:
        shutil.rmtree(folder / "student", ignore_errors=True)
        moved.rename(folder / "student")
    assert not (tmp_path / "out").exists()


def distill_and_convert_again(recipe: Any, base: Path, original: Path) -> None:
    """A run whose frozen model is converted to another wiring before the run ends."""
    publish = loop.publish_model

    def late(*arguments: Any) -> None:
        convert_checkpoint(original, base, wiring="farskip", check=False, force=True)
        publish(*arguments)

    loop.publish_model = late
    loop.distill_model(recipe)


def test_a_run_knows_the_model_beside_which_it_trained(folder: Path, tmp_path: Path) -> None:
    """Two wirings have the same weights, so no hash of weights tells a conversion from another."""
    base, run = tmp_path / "base", tmp_path / "run"

    def convert(wiring: str) -> None:
        convert_checkpoint(folder / "teacher", base, wiring=wiring, check=False, force=base.exists())

    def bytes_of(model: Path) -> dict[str, bytes]:
        return {str(path.relative_to(model)): path.read_bytes() for path in model.rglob("*") if path.is_file()}

    def refused_everywhere() -> None:
        with pytest.raises(BadInputError, match="are not those beside which"):
            export_model(run, tmp_path / "out", checkpoint="step-4")
        for of_this_base in (resumed, again):
            with pytest.raises(
                (CheckpointError, ConfigError), match=r"frozen\.base was |needs the weights of the teacher"
            ):
                train(of_this_base)
        assert not (tmp_path / "out").exists() and not (tmp_path / "part" / "final").exists()
        assert bytes_of(run / "final") == final

    convert("ladder")
    again = runs.resolved(folder, model=str(base), output_dir=str(run), **LORA)
    resumed = runs.resolved(folder, model=str(base), output_dir=str(tmp_path / "part"), **LORA)
    train(again)
    runs.cut_short(run, tmp_path / "part")
    final = bytes_of(run / "final")
    assert json.loads(final["config.json"])["fcsd"]["wiring"] == "ladder"
    convert("farskip")
    refused_everywhere()
    convert("ladder")
    weights = base / "model.safetensors"
    good = weights.read_bytes()
    layout = read_layout(base)
    place = next(tensor.end for tensor in layout.tensors.values() if tensor.end - tensor.start > 5000) - 1
    weights.unlink()  # it may share its content with the original's file
    weights.write_bytes(
        good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    )  # far behind a tensor's first bytes
    refused_everywhere()
    weights.write_bytes(good)
    tokenizer = (base / "tokenizer_config.json").read_text()
    (base / "tokenizer_config.json").write_text(json.dumps(json.loads(tokenizer) | {"chat_template": "{{ 1 }}"}))
    refused_everywhere()
    (base / "tokenizer_config.json").write_text(tokenizer)
    (base / "README.md").write_text("a card decides nothing")
    (run / "final" / "README.md").write_text("mine")
    train(again)
    assert (run / "final" / "README.md").read_text() == "mine", "a finished run leaves its final/ as it is"
    (error,) = ranks.on_ranks(1, distill_and_convert_again, resumed, base, folder / "teacher")
    assert isinstance(error, BadInputError) and "are not those beside which" in str(error)
    assert not (tmp_path / "part" / "final").exists()
    convert("ladder")
    train(resumed)
    assert outcome(tmp_path / "part") == outcome(run)
