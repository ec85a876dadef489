"""The student inside a DeepSpeed engine, whose forward gives the terms of the loss."""

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.config import Objective, Recipe, accumulation
from fcsd.distill.expert_parallel import wire_sharded
from fcsd.distill.losses import IGNORE, cross_entropy, kl_divergence, squared_distance
from fcsd.distill.teacher.original import final_hidden, output_head, pack_attention
from fcsd.distill.teacher.targets import Targets, captured
from fcsd.distill.top_k import TopK, kl_from_top_k
from fcsd.distill.update import judges_on_device
from fcsd.errors import ConfigError
from fcsd.launch.world import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Student(nn.Module):
    """A causal LM together with what it is asked to match."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective

    def forward(
        self,
        batch: dict[str, Tensor],
        targets: Targets | None,
        denominator: Tensor,
        terms: tuple[str, ...],
    ) -> dict[str, Tensor]:
        """The loss terms ``kl``, ``sft`` and ``hidden`` named in ``terms``, unweighted, as fp32 scalars.

        Args:
            batch: ``input_ids``, ``position_ids`` and ``labels``, each ``[batch, seq]``.
            targets: the teacher's part; ``kl`` and ``hidden`` need it.
            denominator: what the sums over tokens are divided by.
        """
        wanted = targets.streams if targets is not None and "hidden" in terms else {}
        with captured(self.model, tuple(wanted)) as streams:
            hidden = final_hidden(self.model, batch)
        head, labels = output_head(self.model), batch["labels"]
        chunk = self.objective.chunk(len(head))
        counts = labels != IGNORE
        losses = {}
        if "hidden" in terms:
            # Taken out one by one: what backward keeps of a layer replaces both its streams.
            distances = [
                squared_distance(streams.pop(k), wanted.pop(k), counts, denominator=denominator) for k in tuple(wanted)
            ]
            losses["hidden"] = torch.stack(distances).sum()
        if "kl" in terms:
            assert targets is not None
            options: Any = {
                "temperature": self.objective.temperature,
                "denominator": denominator,
                "chunk_tokens": chunk,
            }
            if isinstance(targets.output, TopK):
                losses["kl"] = kl_from_top_k(hidden, head, targets.output, counts, **options)
            else:
                losses["kl"] = kl_divergence(hidden, head, *targets.output, counts, **options)
        if "sft" in terms:
            losses["sft"] = cross_entropy(hidden, head, labels, denominator=denominator, chunk_tokens=chunk)
        return losses


def freeze(model: PreTrainedModel, objective: Objective) -> None:
    """Takes the parts named in the recipe out of training.

    Raises:
        ConfigError: one of two parts that share their weight would be frozen and the other not.
    """
    inputs: Any = model.get_input_embeddings()
    tied = inputs.weight is output_head(model)
    if tied and objective.freeze_embeddings != objective.freeze_lm_head:
        raise ConfigError(
            "this model's embeddings and output head are one weight",
            hint="set objective.freeze_embeddings and objective.freeze_lm_head alike",
        )
    inputs.weight.requires_grad_(not objective.freeze_embeddings)
    output_head(model).requires_grad_(not objective.freeze_lm_head)


def deepspeed_config(recipe: Recipe, world_size: int) -> dict[str, Any]:
    """The engine's configuration; the learning rate in it is a placeholder that each step overwrites."""
    train, optim, zero_stage = recipe.train, recipe.optim, recipe.parallel.zero_stage
    on_device = judges_on_device(recipe)
    adamw = {"lr": optim.lr, "betas": list(optim.betas), "eps": 1e-8, "weight_decay": optim.weight_decay}
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": accumulation(recipe, world_size),
        "gradient_clipping": optim.grad_clip if zero_stage and not on_device else 0.0,
        "bf16": {"enabled": train.dtype == "bf16", "check_grad_overflow": not on_device},
        "zero_optimization": {"stage": zero_stage},
        # torch's AdamW in its one kernel: DeepSpeed's own is compiled on first use, for a minute, and needs a compiler.
        "optimizer": {"type": "AdamW", "params": {**adamw, "torch_adam": True, "fused": True}},
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # it waits for the device before and after every step
    }


def build_engine(model: PreTrainedModel, recipe: Recipe, world: World) -> Any:
    """A DeepSpeed engine around ``Student(model)`` in training mode; what is sharded already, it takes as it is."""
    deepspeed = import_deepspeed()
    freeze(model, recipe.objective)
    pack_attention(model, recipe)
    if recipe.train.activation_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    student = Student(model, recipe.objective).train()
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=student, model_parameters=trainable, config=deepspeed_config(recipe, world.size)
    )
    wire_sharded(model, recipe.parallel.ep_size, recipe.parallel)
    return engine


def import_deepspeed() -> Any:
    """DeepSpeed, quiet, without compiling anything, and in the process group of the run."""
    # Its collectives go by names that torch has since deprecated, and torch says so at every rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch\.distributed)\b")
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)  # it writes to stdout, which is for data
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed
