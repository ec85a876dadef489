"""All that is done to student and teacher between their loading and the first step; ``prepare_run`` says when.

``build_training`` builds the DeepSpeed engine around the student, whose forward pass returns the terms of the loss. A
teacher is a second model (``load_teacher``) or the student's own weights (``share_weights``).
"""

import logging
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.profiler import record_function
from transformers import PreTrainedModel

from fcsd.checkpoint import open_checkpoint
from fcsd.config import Objective, Recipe, accumulation
from fcsd.distill.draft import Drafting
from fcsd.distill.experts.expert_parallel import load, quantiser_of, wire_sharded
from fcsd.distill.inputs import teacher_name
from fcsd.distill.loss.losses import loss_terms
from fcsd.distill.optim.adamw_choice import adamw_settings, own_adamw, parameter_groups, updates_alone
from fcsd.distill.optim.update import judges_on_device
from fcsd.distill.student import DTYPES
from fcsd.distill.teacher.shared import SharedTeacher
from fcsd.distill.teacher.targets import (
    Targets,
    TeacherSource,
    captured,
    compared_layers,
    compile_layers,
    expect_comparable,
    final_hidden,
    left_out,
    output_head,
    pack_attention,
)
from fcsd.distill.train_engine import Teams, Trained, TrainEngine, make_trainable
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import logits_cap, unwired
from fcsd.parallel.expert.autoep import frozen_experts
from fcsd.parallel.expert.dispatcher import Dispatcher
from fcsd.parallel.quantised import Quantiser
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.transports.transport import Traffic

PREFIX = "fcsd.phase::"  # of the phases in traces, from which ``benchmarks.train.account`` says where time goes


def phase(name: str) -> AbstractContextManager[Any]:
    """Records the block as a phase of the step. Phases may be nested; an event belongs to the innermost one."""
    return record_function(PREFIX + name)


class Student(nn.Module):
    """A causal LM together with the objective that it is trained on."""

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
        """The loss terms named in ``terms``, unweighted, as fp32 scalars.

        Args:
            batch: ``input_ids``, ``position_ids`` and ``labels``, each ``[batch, seq]``. It may also have ``kept``, the
                positions in the flattened batch that have a label, if the host knows them.
            targets: the teacher's output, if a term needs it.
            denominator: the number by which the sums over tokens are divided.
        """
        compared = compared_layers(self.model, self.objective) if targets is not None and "hidden" in terms else ()
        prefix = None if targets is None else targets.prefix
        with captured(self.model, compared) as streams, left_out(self.model, prefix):
            hidden = final_hidden(self.model, batch)
        with phase("loss"):
            student, cap = (hidden, output_head(self.model)), logits_cap(self.model.config)
            return loss_terms(self.objective, batch, student, targets, denominator, terms, streams, cap)


def recompute_layers(model: PreTrainedModel) -> None:
    """Makes the backward pass compute each decoder layer again, so that its activations need not be kept."""
    # transformers 5.23 renamed the method, and warns of the old name.
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def switch_off_noise(model: nn.Module) -> None:
    """Switches off what a model's config makes random in training: dropout, and the jitter of a router's input.

    The teacher runs without it. The student is to compute the teacher's function, and noise that the student alone has
    would count as a difference. The config stays as it is, and so does that of ``final/``.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if ("dropout" in name or "jitter" in name) and type(value) in (int, float):
                setattr(module, name, 0.0)


@dataclass(frozen=True)
class Training(Trained):
    """The student in training, and what a step needs besides.

    Attributes:
        source: gives the targets.
        quantiser: rounds the rows of dispatch and combine; None if they are sent as they are.
    """

    source: TeacherSource
    quantiser: Quantiser | None

    def without_rounding(self) -> AbstractContextManager[None]:
        """A block in which all rows of the student are sent as they are, so that it computes as the exported model."""
        return nullcontext() if self.quantiser is None else self.quantiser.paused()


def freeze(model: PreTrainedModel, objective: Objective) -> None:
    """Freezes the embeddings and the output head if the recipe says so.

    Raises:
        ConfigError: the embeddings and the output head share one weight, and only one of them is to be frozen.
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


def deepspeed_config(recipe: Recipe, world_size: int, alone: bool = False) -> dict[str, Any]:
    """The configuration of the DeepSpeed engine. Each step overwrites the learning rate in it.

    Args:
        alone: whether ``OneProcessAdamW`` updates the weights. DeepSpeed is then told that the model is in fp32 and
            that nothing is divided, so that it leaves weights and gradients as they are and calls the optimizer.
    """
    train, optim, zero_stage = recipe.train, recipe.optim, recipe.parallel.zero_stage
    if alone:
        zero_stage = 0
    judged_on_device = zero_stage > 0 and judges_on_device(recipe)
    zero: dict[str, Any] = {"stage": zero_stage}
    if optim.offload == "host":
        # Gradients travel to the host and weights back. Only memory that is pinned is copied at the speed of the bus.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": train.micro_batch_size,
        "gradient_accumulation_steps": accumulation(recipe, world_size),
        "gradient_clipping": 0.0,  # `update` clips
        "bf16": {"enabled": train.dtype == "bf16" and not alone, "check_grad_overflow": not judged_on_device},
        "zero_optimization": zero,
        # DeepSpeed refuses optimizers that it does not know, and on the host all but its own, unless it is told not to.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": recipe.reduce_dtype,
        # Without ZeRO DeepSpeed offers no other dtype than that of the weights; see sum_gradients.
        "data_types": {"grad_accum_dtype": "fp32" if alone else recipe.accumulate_dtype if zero_stage else train.dtype},
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},  # this timer waits for the device around every step
    }
    if own_adamw(recipe, alone) is None:
        # torch's fused AdamW is used, on GPUs and on the host, because DeepSpeed's own optimizers are compiled on first
        # use, which takes a minute and a compiler.
        params = {**adamw_settings(recipe), "torch_adam": True, "fused": True}
        config["optimizer"] = {"type": "AdamW", "params": params}
    return config


def build_training(
    model: PreTrainedModel,
    source: TeacherSource,
    recipe: Recipe,
    world: World,
    traffic: Traffic | None = None,
    dispatcher: Dispatcher | None = None,
    teams: Teams | None = None,
    parts: TrainedParts | None = None,
    by_zero: bool = False,
) -> Training:
    """Builds a DeepSpeed engine around ``Student(model)`` in training mode. Experts that are already sharded stay so.

    This is all that is done to a loaded student before its first step, in this order. What the recipe leaves off does
    nothing.

    Args:
        traffic: counts the bytes that dispatch and combine send; None does not count.
        dispatcher: see ``wire_sharded``.
        teams: how the processes of the run work together; None stands for data parallelism alone.
        parts: what trains, if the other weights are frozen.
        by_zero: whether DeepSpeed's ZeRO updates the weights also on one process, to compare with it.
    """
    teams, quantiser = teams or Teams(world), quantiser_of(recipe)
    alone = updates_alone(recipe, world.size) and not by_zero
    if parts is None:  # otherwise ``train_parts`` has frozen the rest
        make_trainable(model, teams)
        freeze(model, recipe.objective)
    pack_attention(model, recipe)
    if recipe.train.activation_checkpointing:
        recompute_layers(model)
    switch_off_noise(model)
    head = None if parts is None else parts.head
    student = Student(model, recipe.objective) if head is None else Drafting(head, model, recipe.objective)
    engine = start_engine(student.train(), recipe, world, teams, parts, alone)
    sum_gradients(engine, recipe, alone)
    how: Any = {"traffic": traffic, "dispatcher": dispatcher, "ranks": teams.ranks}
    wire_sharded(model, recipe.parallel.ep_size, recipe.parallel, quantiser, **how)
    compile_layers(model, recipe)
    return Training(engine, model, source, quantiser, parts=parts)


def start_engine(
    student: nn.Module, recipe: Recipe, world: World, teams: Teams, parts: TrainedParts | None, alone: bool
) -> TrainEngine:
    """The DeepSpeed engine around a student, with the optimizer of its trained parameters."""
    with nullcontext() if parts is None else frozen_experts(parts.model):
        return import_deepspeed().initialize(
            model=student,
            model_parameters=parameter_groups(student, recipe),
            config=deepspeed_config(recipe, world.size, alone),
            optimizer=own_adamw(recipe, alone),
            mpu=None if teams.ranks is None else teams,
        )[0]


def sum_gradients(engine: TrainEngine, recipe: Recipe, alone: bool) -> None:
    """Says in which dtype gradients are summed where ZeRO does not, and that one process sends none to itself."""
    if alone:
        engine.enable_backward_allreduce = False  # it would copy all gradients, also on one process
    if not engine.zero_optimization():
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.grad_dtype = DTYPES[recipe.accumulate_dtype]  # autograd and DeepSpeed sum in it


def load_teacher(
    recipe: Recipe,
    student: PreTrainedModel,
    world: World,
    traffic: Traffic | None,
    dispatcher: Dispatcher | None,
    ranks: TensorGroup | None,
) -> PreTrainedModel:
    """Loads the frozen teacher. Its experts are divided as ``parallel.teacher_placement`` says.

    Args:
        traffic: counts the bytes that its dispatch and combine send; None does not count.
        dispatcher: what the student's layers use; a teacher with divided experts uses it, too.
        ranks: the ranks that shard its decoder layers as the student's; None if every rank has them.

    Raises:
        BadInputError: the vocabulary, the hidden size or the number of layers differs from that of ``student``; see
            ``expect_comparable``.
        ConfigError: the recipe compares a layer that the models do not have.
    """
    name, ep_size = teacher_name(recipe), recipe.parallel.teacher_ep_size
    how: Any = {"dtype": DTYPES[recipe.train.dtype], "device": world.device, "ranks": ranks}
    teacher = load(open_checkpoint(name).path, ep_size, **how)
    expect_comparable(student, teacher, recipe, name)
    pack_attention(teacher, recipe)
    wires: Any = {"traffic": traffic, "dispatcher": dispatcher if ep_size > 1 else None, "ranks": ranks}
    wire_sharded(teacher, ep_size, recipe.parallel, **wires)
    compile_layers(teacher, recipe)
    return teacher.requires_grad_(False)


def shares_weights(recipe: Recipe) -> bool:
    """Whether the teacher in memory is the student itself, whose frozen weights are the teacher's."""
    return recipe.frozen_beside is not None and recipe.needs_original


def share_weights(
    parts: TrainedParts,
    recipe: Recipe,
    traffic: Traffic | None = None,
    dispatcher: Dispatcher | None = None,
    ranks: TensorGroup | None = None,
) -> SharedTeacher:
    """The teacher that is the student with its first weights; the other arguments are those of ``load_teacher``."""
    parallel = recipe.parallel
    how: Any = {"traffic": traffic, "dispatcher": dispatcher, "ranks": ranks}
    rewire = partial(wire_sharded, parts.model, parallel.ep_size, parallel, **how)
    divided = ranks is not None or parallel.ep_size > 1
    shared = SharedTeacher(parts, recipe.objective, partial(rewire, wiring=unwired()) if divided else None)
    if ranks is not None:
        rewire()  # what is not of a layer, such as marks of norms, is one again
    return shared


def import_deepspeed() -> Any:
    """Imports DeepSpeed, silences its log, keeps it from compiling, and joins it to the run's process group."""
    # DeepSpeed calls collectives by names that torch has deprecated, and torch warns of it on every rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch\.distributed)\b")
    import deepspeed
    from deepspeed.ops import __compatible_ops__
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)  # DeepSpeed logs to stdout, which is reserved for data
    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed
