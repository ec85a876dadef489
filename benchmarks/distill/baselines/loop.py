"""The side of a plain loop: transformers, torch, and the fused divergence of Liger or of TRL.

Both divergences compute the logits chunk by chunk from the hidden states and the output heads.
"""

from collections.abc import Callable
from typing import Any

import torch
from benchmarks.distill.baselines.layers import Layers, plain
from benchmarks.distill.baselines.master_weights import MasterWeightsAdamW
from benchmarks.distill.baselines.setting import Setting, Side, Watch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from fcsd.distill.data.rows import Mixture
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.optim.adamw_choice import adamw_settings
from fcsd.distill.teacher.targets import output_head

# (student's hidden states [tokens, hidden], its head [vocab, hidden], the same of the teacher, labels [tokens])
# -> the mean KL(teacher ‖ student) over the tokens whose label is not IGNORE
Divergence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def liger() -> Divergence:
    """Liger's chunked loss at beta 0, which is KL(teacher ‖ student). It is compiled where there is a GPU."""
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss  # pyright: ignore[reportMissingImports]

    return LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, ignore_index=IGNORE, compiled=torch.cuda.is_available()
    )


def liger_kl() -> Divergence:
    """Liger's KL fused with the student's head. It takes the teacher's probabilities, which are computed whole."""
    from liger_kernel.transformers.fused_linear_kl_div import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearKLDivLoss,
    )

    loss = LigerFusedLinearKLDivLoss(ignore_index=IGNORE, reduction="sum")

    def divergence(
        student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, labels: Tensor
    ) -> Tensor:
        with torch.no_grad():
            probabilities = (teacher @ teacher_head.T).softmax(-1, dtype=torch.float32)
        return loss(student, student_head, probabilities, labels) / (labels != IGNORE).sum()

    return divergence


def trl_chunked() -> Divergence:
    """The chunked divergence of TRL's ``DistillationTrainer`` at beta 0, which is KL(teacher ‖ student)."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction  # pyright: ignore[reportMissingImports]

    def divergence(
        student: Tensor, student_head: Tensor, teacher: Tensor, teacher_head: Tensor, labels: Tensor
    ) -> Tensor:
        by_token, _ = ChunkedDivergenceFunction.apply(student, student_head, None, teacher, teacher_head, None, 0.0)
        counts = labels != IGNORE
        return (by_token * counts).sum() / counts.sum()

    return divergence


def looping(make: Callable[[], Divergence], layers: Layers = plain) -> Side:
    """The ``Side`` that trains in a plain loop with the divergence that ``make`` returns, and with such layers."""

    def side(setting: Setting, watch: Watch) -> float:
        with layers(setting) as (student, teacher):
            return train(setting, watch, student, teacher)

    def train(setting: Setting, watch: Watch, student: Any, teacher: Any) -> float:
        recipe, device, accumulation = setting.recipe, setting.world.device, setting.accumulation
        divergence = make()
        if recipe.train.activation_checkpointing:
            student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        heads = output_head(student), output_head(teacher).detach()
        trained = [parameter for parameter in student.parameters() if parameter.requires_grad]
        optimizer = MasterWeightsAdamW(trained, **adamw_settings(recipe))
        on_cuda = device.type == "cuda"
        loader = iter(
            DataLoader(
                TokenIds(setting.rows, recipe.rows_per_step * watch.steps),
                batch_size=recipe.train.micro_batch_size,
                num_workers=workers(device),
                pin_memory=on_cuda,
            )
        )
        first = torch.zeros((), device=device)
        for step in range(1, watch.steps + 1):
            for _ in range(accumulation):
                with watch.waiting_for_data():
                    ids = next(loader).to(device, non_blocking=True)
                with torch.no_grad():
                    wanted = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
                hidden = student.base_model(input_ids=ids, use_cache=False).last_hidden_state
                sides = hidden.flatten(0, 1), heads[0], wanted.flatten(0, 1), heads[1]
                loss = divergence(*sides, next_tokens(ids).flatten()) / accumulation
                loss.backward()
                if step == 1:
                    first += loss.detach()
            if recipe.optim.grad_clip:
                torch.nn.utils.clip_grad_norm_(trained, recipe.optim.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            watch.ended(step)
        return first.item()

    return side


def next_tokens(ids: Tensor) -> Tensor:
    """The labels ``[batch, seq]`` of token ids ``[batch, seq]``: the next token, and ``IGNORE`` at the end of a row."""
    return F.pad(ids[:, 1:], (0, 1), value=IGNORE)


class TokenIds(Dataset[Tensor]):
    """The token ids ``[seq]`` of the first ``count`` rows of a run."""

    def __init__(self, rows: Mixture, count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Tensor:
        return torch.from_numpy(self._rows[number][0])


def workers(device: torch.device) -> int:
    """The number of processes of a ``DataLoader``, so that it prepares rows while the device computes."""
    return 2 if device.type == "cuda" else 0
