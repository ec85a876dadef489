"""One process updates its weights without ZeRO: as ZeRO does up to rounding, and it resumes to the last bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from safetensors.torch import load_file
from torch import Tensor

from fcsd.config import Recipe
from fcsd.distill import loop, prepare
from fcsd.distill.optim.adamw_choice import updates_alone
from fcsd.distill.optim.adamw_norms import l2_norm
from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step import engine
from fcsd.plan.setup import setup_of


def repeat_last_steps(resolved: Any) -> None:
    """Takes the last of two checkpoints and the result of a run away, and continues it."""
    out = Path(resolved.recipe.output_dir)
    shutil.copytree(out, out.with_suffix(".whole"))
    for removed in ("final", "checkpoints/step-2"):
        shutil.rmtree(out / removed)
    loop.distill_model(resolved)


def with_and_without_zero(zero: Any, alone: Any) -> list[str]:
    """Trains both recipes, the first with ZeRO. Then repeats the last steps of the second.

    Returns: the names of the optimizers of the two first runs.
    """
    made: list[str] = []
    by_zero = True

    def built(model: Any, source: Any, recipe: Any, world: Any, *_: Any) -> Any:
        result = engine.build_training(model, source, recipe, world, by_zero=by_zero)
        made.append(type(result.engine.optimizer).__name__)
        return result

    prepare.build_training = built
    loop.distill_model(zero)
    by_zero = False
    loop.distill_model(alone)
    repeat_last_steps(alone)
    return made


def weights(run: Path) -> Tensor:
    return torch.cat([tensor.flatten().float() for tensor in load_file(run / "final" / "model.safetensors").values()])


def test_one_process_trains_as_zero_does_and_resumes(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "llama")
    common = {"train__dtype": "bf16", "optim__grad_clip": 0.3, "optim__weight_decay": 0.1}
    # The learning rate stays as it is: a cosine would end at 0, where no state of the optimizer can be seen.
    common |= {"train__steps": 2, "checkpoint__every_steps": 1, "optim__schedule": "constant"}
    recipes = [runs.resolved(tmp_path, output_dir=str(tmp_path / name), **common) for name in ("zero", "alone")]
    ((first, second, *_),) = ranks.on_ranks(1, with_and_without_zero, *recipes)
    assert (first, second) == ("DeepSpeedZeroOptimizer", "OneProcessAdamW")
    assert runs.outcome(tmp_path / "alone") == runs.outcome(tmp_path / "alone.whole"), "resumed to the last bit"
    start = weights_of_student(tmp_path)
    expected = weights(tmp_path / "zero") - start
    for ours, theirs in zip(read_metrics(tmp_path / "alone"), read_metrics(tmp_path / "zero"), strict=True):
        assert ours["grad_norm"] > 0.3, "every step is clipped"
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-2)
    change = weights(tmp_path / "alone") - start
    # Weights are rounded to bf16, so that the smallest difference of a master weight can be seen in some of them.
    assert (change - expected).norm() < 0.05 * expected.norm()


def weights_of_student(folder: Path) -> Tensor:
    values = load_file(folder / "student" / "model.safetensors")
    return torch.cat([tensor.bfloat16().flatten().float() for tensor in values.values()])


def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    parameters = [torch.randn(3, 4).bfloat16().requires_grad_(), torch.randn(5).bfloat16().requires_grad_()]
    settings: dict[str, Any] = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_clip": 1.0}
    optimizer = OneProcessAdamW(parameters, lr=1e-2, **settings)
    for gradient in (1.0, float("nan"), 1.0):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        same = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        assert same == bool(torch.isnan(optimizer.norm)) == (gradient != 1.0)
    assert optimizer.taken == 2


def test_the_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    gradients = [torch.randn(1000, generator=torch.Generator().manual_seed(n)).bfloat16() for n in range(3)]
    exact = torch.cat([gradient.double() for gradient in gradients]).norm().item()
    assert l2_norm(gradients, torch.device("cpu")).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__dtype": "fp32"},
        {"optim__offload": "host"},
        {"parallel__zero_stage": 0},
        {"parallel__quantised": {"dispatch": "int8"}},
    ],
)
def test_other_runs_keep_their_optimizer_and_the_plan_knows_it(changes: dict[str, Any], tmp_path: Path) -> None:
    def recipe(**changes: Any) -> Recipe:
        return runs.resolved(tmp_path, **{"train__dtype": "bf16", **changes}).recipe

    assert updates_alone(recipe(), 1) and not updates_alone(recipe(), 2) and not updates_alone(recipe(**changes), 1)
    assert [setup_of(recipe(), world, 4).zero for world in (1, 2)] == [0, 1]
    assert setup_of(recipe(**changes), 1, 4).zero == recipe(**changes).parallel.zero_stage
