"""Teacher and student in turns compute what they compute one after the other, and do take turns."""

from typing import Any

import torch
from ranks import in_group

from fcsd.config import Objective
from fcsd.config.objective import Hidden
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.step.engine import Student
from fcsd.distill.teacher.targets import live_teacher
from fcsd.models.build import unwired
from fcsd.models.wiring import Wiring

LAYERS = (0, 1, 2, 3)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Rows of two documents each."""
    ids = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
    labels = torch.roll(ids, -1, dims=1)
    labels[:, [9, 23]] = IGNORE
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


def compare(rank: int, hidden: bool, recompute: bool) -> list[str]:
    from late import late_collectives
    from test_overlap import _sharded

    from fcsd.parallel import turns
    from fcsd.parallel.overlap import overlap

    student, teacher = _sharded("deepseek_v2"), _sharded("deepseek_v2", initializer_range=0.1)
    teacher.requires_grad_(False)
    if recompute:
        student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    objective = Objective(hidden=Hidden(weight=1.0, layers="1,3") if hidden else Hidden())
    overlap(student, Wiring("farskip", LAYERS))
    overlap(teacher, unwired())
    module, follow = Student(student, objective), live_teacher(teacher, objective)
    terms = ("kl", "hidden") if hidden else ("kl",)
    switches = 0
    switch = turns._Turns.switch

    def counted(self: Any) -> None:
        nonlocal switches
        switches += 1
        switch(self)

    turns._Turns.switch = counted
    results = []
    for in_turns in (False, True):
        student.zero_grad()
        data = batch(rank)
        run = lambda data=data: follow(data, [0, 1])  # noqa: E731
        with late_collectives():
            losses = module(data, run if in_turns else run(), torch.ones(()), terms)
            torch.stack(list(losses.values())).sum().backward()
        gradients = [p.grad.clone() for p in student.parameters() if p.grad is not None]
        results.append([*(loss.detach() for loss in losses.values()), *gradients])
        if not in_turns and switches:
            return ["turns were taken where none were asked for"]
    problems = [] if switches > len(LAYERS) else [f"turns were taken {switches} times"]
    one, other = results
    return problems + [f"result {n}" for n, pair in enumerate(zip(one, other, strict=True)) if not torch.equal(*pair)]


def test_in_turns_is_one_after_the_other_bit_for_bit() -> None:
    for hidden, recompute in ((False, False), (True, True)):
        assert in_group(2, compare, hidden, recompute) == [[], []]
