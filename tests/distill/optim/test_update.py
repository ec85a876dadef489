"""Clipping and skipping on the device: what DeepSpeed decides on the host, to the last bit, without a wait."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import runs
import torch
from safetensors.torch import load_file

from fcsd.distill import loop
from fcsd.distill.optim import adamw_choice, adamw_norms, update
from fcsd.distill.step import engine


def by_deepspeed(resolved: Any) -> None:
    """A run in which DeepSpeed itself clips and skips. Its optimizer is on the host, where its norm is exact."""
    ours = engine.deepspeed_config
    engine.deepspeed_config = lambda *arguments: {
        **ours(*arguments),
        "gradient_clipping": resolved.recipe.optim.grad_clip,
    }
    update.install = lambda *_: None
    loop.distill_model(resolved)


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_clipping_on_the_device_is_deepspeeds(folder: Path, tmp_path: Path, stage: int) -> None:
    changes = {"train__dtype": "bf16", "optim__grad_clip": 0.3, "parallel__zero_stage": stage}
    theirs = runs.resolved(folder, output_dir=str(tmp_path / "deepspeed"), **changes, optim__offload="host")
    assert ranks.on_ranks(2, by_deepspeed, theirs) == [None] * 2
    runs.train(runs.resolved(folder, output_dir=str(tmp_path / "device"), **changes), 2)
    assert runs.outcome(tmp_path / "device") == runs.outcome(tmp_path / "deepspeed")
    losses, _ = runs.outcome(tmp_path / "device")
    assert all(float.fromhex(norm) > 0.3 for *_, norm in losses), "every step was clipped"


def test_the_norm_of_partitions_counts_every_gradient_once_and_reads_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs above and those of ``test_optimizer_memory`` compare its bits in fp64 with DeepSpeed's."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *_, **__: None)
    generator = torch.Generator().manual_seed(0)
    groups = [[torch.randn(n, generator=generator).bfloat16() for n in (5000, 7)], [], [torch.ones(3).bfloat16()]]
    padding: Any = torch.full((9,), 100.0).bfloat16()
    padding._zero_padding = True
    groups[2].append(padding)

    def norm(groups: list[list[torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
        named = {"bit16_groups": groups, "averaged_gradients": dict(enumerate(groups)), "dp_process_group": None}
        named |= {"model_parallel_rank": 0, "model_parallel_world_size": 1}
        return adamw_norms.partitions_norm(SimpleNamespace(**named, device=groups[0][0].device), dtype)

    expected = torch.cat([groups[0][0], groups[0][1], groups[2][0]]).double().norm()
    for dtype in (torch.float32, torch.float64):
        assert norm(groups, dtype).item() == pytest.approx(expected.item(), rel=1e-6)
        for wrong in (torch.inf, torch.nan):
            broken = [groups[0], [torch.tensor([1.0, wrong]).bfloat16()], groups[2]]
            assert norm(broken, dtype).item() == torch.inf
        # Tensors of the meta device have no values that a host could wait for.
        assert norm([[gradient.to("meta") for gradient in groups[0]]], dtype).shape == ()


def norm_of_divided_experts(rank: int) -> float:
    """The norm that a rank computes where two of four ranks divide the experts: the other two have the same again."""
    module = torch.nn.ParameterDict({"shared": torch.ones(3), "expert": torch.ones(2)})
    expert: Any = module["expert"]
    expert.allreduce = False  # DeepSpeed's mark of a parameter of experts
    module["shared"].grad = torch.tensor([1.0, 2.0, 2.0])
    expert.grad = torch.tensor([[4.0, 0.0], [0.0, 12.0]][rank % 2])
    recipe: Any = SimpleNamespace(parallel=SimpleNamespace(ep_size=2))
    engine, world = SimpleNamespace(module=module), SimpleNamespace(size=4)
    return float(update.global_norm(engine, recipe, world))  # type: ignore[arg-type]


def test_the_norm_without_zero_counts_every_expert_once() -> None:
    assert ranks.in_group(4, norm_of_divided_experts) == pytest.approx([13.0] * 4)  # the root of 9 + 16 + 144


def configured(resolved: Any) -> Any:
    """What DeepSpeed would wait for, as the engine of a run has it."""
    from fcsd.distill import prepare
    from fcsd.launch.world import join_world

    Path(resolved.recipe.output_dir).mkdir(exist_ok=True)
    made: Any = prepare.prepare_run(resolved, "auto", join_world()).training.engine
    return made.tput_timer.config.enabled, made.optimizer.check_grad_overflow, made.optimizer.clip_grad


def test_deepspeed_is_not_left_to_wait_for_the_device(folder: Path, tmp_path: Path) -> None:
    resolved = runs.resolved(folder, output_dir=str(tmp_path / "run"), train__dtype="bf16")
    assert ranks.on_ranks(2, configured, resolved) == [(False, False, 0.0)] * 2


def in_bf16_without_zero(resolved: Any) -> Any:
    """The gradients of the first step of a run, before they are clipped, and its weights after the last."""
    from fcsd.distill import prepare
    from fcsd.distill.step.one_step import train_step
    from fcsd.launch.world import join_world

    found: dict[str, Any] = {}
    real = update.global_norm

    def watched(engine: Any, recipe: Any, world: Any) -> Any:
        for name, parameter in engine.module.model.named_parameters():
            found.setdefault(name, parameter.grad.clone())
        return real(engine, recipe, world)

    update.global_norm = watched
    Path(resolved.recipe.output_dir).mkdir()
    run = prepare.prepare_run(resolved, "auto", join_world())
    for step in (1, 2):
        train_step(run.training, run.rows, run.recipe, run.world, step)
    return found, {name: tensor.clone() for name, tensor in run.student.state_dict().items()}


def test_without_zero_bf16_is_clipped_and_sums_in_fp32(folder: Path, tmp_path: Path) -> None:
    common = {"train__dtype": "bf16", "parallel__zero_stage": 0, "train__micro_batch_size": 1}
    cases: dict[str, dict[str, Any]] = {
        "unclipped": {"optim__grad_clip": 0.0},
        "clipped": {"optim__grad_clip": 1e-9},
        "summed in bf16": {"optim__grad_clip": 0.0, "optim__accumulate_dtype": "bf16"},
    }
    found = {}
    for name, changes in cases.items():
        resolved = runs.resolved(folder, output_dir=str(tmp_path / name), **common, **changes)
        ((gradients, weights),) = ranks.on_ranks(1, in_bf16_without_zero, resolved)
        found[name] = gradients, weights
    gradients, weights = found["unclipped"]
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}
    assert {gradient.dtype for gradient in found["summed in bf16"][0].values()} == {torch.bfloat16}
    assert not all(torch.equal(gradient, gradient.bfloat16()) for gradient in gradients.values()), "8 were summed"
    assert not all(torch.equal(weights[name], found["clipped"][1][name]) for name in weights)


def groups(resolved: Any) -> list[tuple[float, set[int]]]:
    """Weight decay and numbers of dimensions of the parameters in each of the optimizer's groups."""
    from fcsd.distill.student import load_student

    model = load_student(resolved.recipe, dtype=torch.float32, device=torch.device("cpu"))
    student = engine.Student(model, resolved.recipe.objective)
    made = adamw_choice.parameter_groups(student, resolved.recipe)
    assert sum(len(group["params"]) for group in made) == len(list(student.parameters()))
    return [(group["weight_decay"], {parameter.ndim for parameter in group["params"]}) for group in made]


def test_norms_and_biases_do_not_decay(folder: Path, tmp_path: Path) -> None:
    (decayed, spared) = groups(runs.resolved(folder, optim__weight_decay=0.1))
    assert decayed[0] == 0.1 and min(decayed[1]) == 2
    assert spared == (0.0, {1})
    run = tmp_path / "run"
    # A learning rate of nearly nothing at a decay that takes every weight to zero in a step.
    changes = {"optim__weight_decay": 1e9, "optim__lr": 1e-9, "optim__warmup_steps": 0, "optim__schedule": "constant"}
    runs.train(runs.resolved(folder, output_dir=str(run), train__steps=1, **changes))
    before, after = (load_file(place / "model.safetensors") for place in (folder / "student", run / "final"))
    for name, tensor in after.items():
        expected = torch.zeros_like(tensor) if tensor.ndim > 1 else before[name]
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6, msg=lambda m: f"{name}: {m}")  # noqa: B023


def in_small_groups(one: Any, several: Any) -> int:
    """Trains ``one``, and then ``several`` with many groups, from which the last step is taken away and repeated.

    Returns: the number of groups.
    """
    loop.distill_model(one)
    adamw_choice.GROUP = 20_000
    out = Path(several.recipe.output_dir)
    loop.distill_model(several)
    shutil.copytree(out, out.with_suffix(".whole"))
    for removed in ("final", "checkpoints/step-2"):
        shutil.rmtree(out / removed)
    loop.distill_model(several)
    return len(groups(several))


def test_groups_of_a_bounded_size_change_no_weight(folder: Path, tmp_path: Path) -> None:
    """ZeRO copies the gradients of a group at a time."""
    common = {"parallel__zero_stage": 1, "train__dtype": "bf16", "optim__grad_clip": 0.0, "train__steps": 2}
    common |= {"optim__offload": "host"}  # otherwise one process would update its weights without ZeRO
    common |= {"optim__weight_decay": 0.1, "checkpoint__every_steps": 1}
    common |= {"optim__schedule": "constant"}  # a cosine ends at 0, where no state of the optimizer can be seen
    one, several = (runs.resolved(folder, output_dir=str(tmp_path / name), **common) for name in ("one", "several"))
    (found,) = ranks.on_ranks(1, in_small_groups, one, several)
    assert found > 6, found
    assert runs.outcome(tmp_path / "several.whole") == runs.outcome(tmp_path / "several"), "resumed to the last bit"
    assert runs.outcome(tmp_path / "several")[1] == runs.outcome(tmp_path / "one")[1]
