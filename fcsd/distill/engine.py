"""The student inside a DeepSpeed engine, whose forward gives the terms of the loss."""

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.config import Objective, Recipe, accumulation
from fcsd.distill.expert_parallel import wire_sharded
from fcsd.distill.losses import IGNORE, cross_entropy, kl_divergence, squared_distance
from fcsd.distill.teacher.original import compile_layers, final_hidden, output_head, pack_attention
from fcsd.distill.teacher.targets import Targets, captured, compared_layers
from fcsd.distill.top_k import TopK, kl_from_top_k
from fcsd.distill.update import judges_on_device
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.parallel.turns import in_turns

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Student(nn.Module):
    """A causal LM together with what it is asked to match."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.model = model
        self.objective = objective
        self._beside = ThreadPoolExecutor(1, "teacher")  # starts its thread when a teacher takes turns

    def forward(
        self,
        batch: dict[str, Tensor],
        targets: Targets | Callable[[], Targets] | None,
        denominator: Tensor,
        terms: tuple[str, ...],
    ) -> dict[str, Tensor]:
        """The loss terms ``kl``, ``sft`` and ``hidden`` named in ``terms``, unweighted, as fp32 scalars.

        Args:
            batch: ``input_ids``, ``position_ids`` and ``labels``, each ``[batch, seq]``; and, where the host has looked
                for them, ``kept``, the flat positions with a label.
            targets: the teacher's part, which ``kl`` and ``hidden`` need; or what computes it, in turns with the
                student's own pass (``fcsd.parallel.turns``).
            denominator: what the sums over tokens are divided by.
        """
        compared = compared_layers(self.model, self.objective) if targets is not None and "hidden" in terms else ()
        with captured(self.model, compared) as streams:
            if callable(targets):
                with in_turns(targets, self._beside) as pending:
                    hidden = final_hidden(self.model, batch)
                targets = pending.value
            else:
                hidden = final_hidden(self.model, batch)
        head, labels = output_head(self.model), batch["labels"]
        chunk = self.objective.chunk(len(head))
        counts = labels != IGNORE
        losses = {}
        if "hidden" in terms:
            assert targets is not None
            wanted = targets.streams
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
                "kept": batch.get("kept"),
            }
            if isinstance(targets.output, TopK):
                losses["kl"] = kl_from_top_k(hidden, head, targets.output, counts, **options)
            else:
                losses["kl"] = kl_divergence(hidden, head, *targets.output, counts, **options)
        if "sft" in terms:
            losses["sft"] = cross_entropy(
                hidden, head, labels, denominator=denominator, chunk_tokens=chunk, kept=batch.get("kept")
            )
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
        "communication_data_type": recipe.reduce_dtype,
        # Without ZeRO DeepSpeed offers no other dtype than that of the weights; see build_engine.
        "data_types": {"grad_accum_dtype": recipe.accumulate_dtype if zero_stage else train.dtype},
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
    engine, *_ = deepspeed.initialize(
        model=student, model_parameters=parameter_groups(student, recipe), config=deepspeed_config(recipe, world.size)
    )
    if not recipe.parallel.zero_stage:
        for parameter in student.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = DTYPES[recipe.accumulate_dtype]  # autograd sums in it, DeepSpeed takes it over
    wire_sharded(model, recipe.parallel.ep_size, recipe.parallel)
    compile_layers(model, recipe)
    return engine


def parameter_groups(student: nn.Module, recipe: Recipe) -> list[Any]:
    """The trained parameters for the optimizer; those without weight decay are a group of their own, if there are any.

    A norm's gain and a bias are told by their names and shapes: of a parameter called ``bias``, and of one that is a
    vector, every entry acts on a single unit. Experts stack their biases, so these are matrices.
    """
    trained = [(name, parameter) for name, parameter in student.named_parameters() if parameter.requires_grad]
    if recipe.optim.decay_norms or not recipe.optim.weight_decay:
        return [parameter for _, parameter in trained]
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in trained:
        groups[parameter.ndim > 1 and "bias" not in name.rpartition(".")[2]].append(parameter)
    decayed = {"name": "decayed", "params": groups[True], "weight_decay": recipe.optim.weight_decay}
    spared = {"name": "not decayed", "params": groups[False], "weight_decay": 0.0}
    return [group for group in (decayed, spared) if group["params"]]


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
