"""Models that cap their logits: the losses of a run are those of the logits that the models give."""

from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch
from torch.nn import functional

from fcsd.config import Objective
from fcsd.distill.data.rows import document_borders
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.run.report import read_metrics
from fcsd.distill.step.engine import Student
from fcsd.distill.teacher.targets import LiveTeacher


@pytest.mark.parametrize("arch", ["gemma2", "gemma3_text", "gemma4_text"])
def test_the_losses_of_a_run_are_those_of_the_models_own_logits(arch: str) -> None:
    how: Any = {"final_logit_softcapping": 3.0, "initializer_range": 0.3}
    student, teacher = (tiny.model(arch, seed=seed, **how) for seed in (0, 1))
    ids = tiny.tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    batch = {"input_ids": ids, "position_ids": positions, "borders": document_borders(positions)}
    batch["labels"] = functional.pad(ids[:, 1:], (0, 1), value=IGNORE)
    objective = Objective(kl=1.0, sft=1.0)
    denominator = torch.tensor(1.0)
    targets = LiveTeacher(teacher, objective).get_targets(batch)
    found = Student(student, objective)(batch, targets, denominator, ("kl", "sft"))
    own, theirs = (model(ids, use_cache=False).logits[:, :-1].flatten(0, 1) for model in (student, teacher))
    assert own.abs().max() < 3 and own.abs().max() > 1
    kl = functional.kl_div(own.log_softmax(-1), theirs.detach().log_softmax(-1), log_target=True, reduction="sum")
    torch.testing.assert_close(found["kl"], kl, rtol=1e-4, atol=1e-4)
    sft = functional.cross_entropy(own, ids[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(found["sft"], sft, rtol=1e-4, atol=1e-4)
    for mine, plain in ((found["kl"], kl), (found["sft"], sft)):  # the losses differentiate the cap themselves
        slopes, expected = (
            torch.autograd.grad(loss, list(student.parameters()), retain_graph=True, allow_unused=True)
            for loss in (mine, plain)
        )
        for slope, own_slope in zip(slopes, expected, strict=True):
            assert (slope is None) == (own_slope is None)
            if slope is not None and own_slope is not None:
                assert (slope - own_slope).norm() <= 1e-4 * own_slope.norm() + 1e-6


@pytest.mark.parametrize("arch", ["gemma2", "gemma4_text"])
def test_a_run_heals_a_model_that_caps_its_logits(tmp_path: Path, arch: str) -> None:
    runs.write_models(tmp_path, arch)
    runs.train(runs.resolved(tmp_path, train__steps=8, objective__sft=0.0))
    kl = [line["kl"] for line in read_metrics(tmp_path / "run")]
    assert len(kl) == 8 and kl[-1] < kl[0]
