"""The training of a draft head: the model is frozen, and is the teacher of its own head.

The teacher's pass gives the hidden states. From that of a position, and from the token behind it, the head guesses the
next one, and the loss compares the distributions that the output head makes of both.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from fcsd.config import Objective
from fcsd.distill.loss.losses import loss_terms
from fcsd.distill.teacher.targets import Targets
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import decoder_layers
from fcsd.models.draft_head import DraftHead, draft_config
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.weights.trained import whole_tensors


class Drafting(nn.Module):
    """A draft head together with the objective that it is trained on. The frozen model is no part of it."""

    def __init__(self, head: DraftHead, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        inputs: Any = model.get_input_embeddings()
        # vLLM's head looks up the weight itself, also where a model scales what it looks up.
        self.head, self.objective, self._embeddings = head, objective, inputs.weight.detach()

    def forward(
        self, batch: dict[str, Tensor], targets: Targets, denominator: Tensor, terms: tuple[str, ...]
    ) -> dict[str, Tensor]:
        """The loss terms named in ``terms``, unweighted, as fp32 scalars; see ``Student.forward``.

        Args:
            batch: the columns of ``rows.batch``, where the first position of each document has no label.
            targets: the hidden states of the model and its output head.
        """
        hidden, output = targets.output
        # At the last position of a document the head reads a token of another one. No position attends to that, and
        # the guess would be for the first position of the next document, which does not count.
        embedded = F.embedding(batch["input_ids"].roll(-1, 1), self._embeddings)
        guessed = self.head(embedded, hidden, batch["position_ids"], batch["borders"]).roll(1, 1)
        return loss_terms(self.objective, batch, (guessed, output), targets, denominator, terms)


def start_head(model: PreTrainedModel, seed: int, ranks: TensorGroup | None = None) -> DraftHead:
    """A new head, in the dtype and on the device of the model, with the same values on every rank.

    Its attention and its MLP begin as those of the model's last layer where these are a llama's, else at random.

    Args:
        ranks: the ranks that shard the model, which call this together; None if every rank has it.

    Raises:
        ConfigError: see ``draft_config``.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = DraftHead(draft_config(model.config), model.dtype)
    last, own = decoder_layers(model)[-1], dict(head.layers[0].named_parameters())
    path = next(path for path, module in model.named_modules() if module is last)
    found = dict(last.named_parameters())
    others = {name.partition(".")[0] for name in found.keys() - own.keys()}  # what has more than a llama's weights
    same = {f"{path}.{name}": p for name, p in found.items() if name in own and name.partition(".")[0] not in others}
    for tensor in whole_tensors(TrainedParts(model, {}, same, {}), ranks):
        mine, value = own[tensor.name.removeprefix(f"{path}.")], tensor.read()
        if mine.shape == value.shape:
            mine.data.copy_(value)
    if ranks is not None:
        for parameter in head.parameters():
            parameter.register_hook(partial(_mean, ranks))
    return head.to(model.device)


def _mean(ranks: TensorGroup, gradient: Tensor) -> Tensor:
    """The same bits on all ranks, which compute alike, but whose kernels may sum in another order."""
    total = gradient.clone()
    dist.all_reduce(total, group=ranks.group)
    return total / ranks.degree
