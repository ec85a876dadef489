"""Builds the student: with the weights of a checkpoint or random ones, in its own wiring or that of the recipe.

A run may freeze it but for what trains: adapters, named parts, or both.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from fcsd.checkpoint import INDEX, Checkpoint, compare_tensors, open_checkpoint
from fcsd.checkpoint.staging import copy_small, side_files
from fcsd.config import Recipe
from fcsd.convert import choose_wiring
from fcsd.distill.draft import start_head
from fcsd.distill.experts import expert_parallel
from fcsd.distill.inputs import student_source, teacher_name
from fcsd.errors import BadInputError, FcsdError
from fcsd.extras import require_extra
from fcsd.launch.world import World, first_rank
from fcsd.models.adapters.lora import add_adapters
from fcsd.models.adapters.nf4 import load_nf4, require_nf4
from fcsd.models.adapters.targets import Chosen, choose, choose_parts
from fcsd.models.adapters.trained import TrainedParts
from fcsd.models.build import arch_of, causal_lm_class, converted_config, decoder_of, register, wiring_of
from fcsd.models.draft_head import meta_head
from fcsd.models.export_template import CODE_FILES
from fcsd.models.quantised.method import Method
from fcsd.models.rope import require_short_rows
from fcsd.models.wiring import Wiring
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.weights.saving import OwnPart, write_part
from fcsd.plan import check_models
from fcsd.plan.memory import checkpoint_bytes

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of a recipe -> torch's

log = logging.getLogger(__name__)


def check(recipe: Recipe, processes: int) -> None:
    """Checks the models' configs and the number of processes against ``parallel``. No weight is read.

    Rank 0 logs a warning if ``parallel.dedup`` has no effect, because each token chooses one expert.

    Raises:
        ConfigError, BadInputError: see ``check_models``.
    """
    parallel = recipe.parallel
    if max(parallel.ep_size, parallel.tp_size) == 1 and not parallel.quantised.any:
        return
    register()

    def read(name: str) -> tuple[str, PretrainedConfig, Wiring, Method | None]:
        source = open_checkpoint(name, weights=False)
        config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
        return name, config, wiring_of(config), source.config.method

    student = read(recipe.model)
    check_models(recipe, processes, [student])
    if recipe.needs_original and max(parallel.tp_size, parallel.teacher_ep_size) > 1:
        check_models(recipe, processes, [student, read(teacher_name(recipe))])
    if parallel.dedup != "off" and student[1].get_text_config().num_experts_per_tok == 1 and first_rank():
        what = f"parallel.dedup {parallel.dedup} has no effect, because each token chooses one expert"
        log.warning("%s: %s", recipe.model, what)


def student_config(recipe: Recipe, source: Checkpoint) -> PretrainedConfig:
    """The student's config, with the wiring of the recipe if the recipe names one.

    Raises:
        BadInputError: the architecture is not supported; the recipe names a wiring, but the checkpoint is rewired
            already; the tokenizer has more tokens than the model has rows; or the weights are random, but the config
            is quantised.
        ConfigError: the wiring does not fit the architecture, rows are longer than the model's positions, or short
            documents would get the rotary factors of long ones.
    """
    source.require_usable(headers=False)
    config = _rewired_config(recipe, source)
    require_short_rows(config, recipe.data.seq_len, recipe.model)
    return config


def _rewired_config(recipe: Recipe, source: Checkpoint) -> PretrainedConfig:
    """The config of the student, whatever its rows are."""
    init = recipe.init
    register()
    checked = source.config
    config = AutoConfig.from_pretrained(source.path, trust_remote_code=False)
    arch_of(config)
    if init.weights == "random" and checked.quantization is not None:
        raise BadInputError(f"{source.path}: random weights are not quantised", "Remove quantization_config.")
    if init.wiring is None:
        return config
    source.require_original()
    wiring = choose_wiring(
        checked,
        checked.arch,
        init.wiring,
        init.layers,
        variant=init.variant,
        border=init.border,
        distance=init.distance,
        tp_degree=init.gpus,
        reduce=init.reduce,
    )
    made_from = source.origin() if init.weights == "loaded" else {}
    return converted_config(config, wiring.to_block(**made_from))


def load_student(
    recipe: Recipe,
    *,
    dtype: torch.dtype,
    device: torch.device,
    config: PretrainedConfig | None = None,
    trained: Path | None = None,
    orders: Mapping[str, Sequence[int]] | None = None,
    ranks: TensorGroup | None = None,
) -> PreTrainedModel:
    """The student in eval mode. Every rank has the same weights, except for what is sharded over ranks.

    Random weights follow the architecture's own rules (``initializer_range`` of the config) and the recipe's seed.
    Each module and each expert has a random generator of its own, so the weights are the same at any
    ``parallel.ep_size``.

    Args:
        config: the result of ``student_config``, if the caller has it already.
        trained: the model directory of the checkpoint from which the run continues; its weights and its config are
            used in place of those of the recipe.
        orders: where the experts were when that checkpoint was saved; see ``load_expert_parallel``.
        ranks: the ranks that shard the decoder layers; None if every rank has them.

    Raises:
        BadInputError, ConfigError: see ``student_config``; also if the weights do not match the config.
    """
    parallel = recipe.parallel
    how: Any = {"dtype": dtype, "device": device, "dispatched": parallel.quantised.any, "ranks": ranks}
    if trained is not None:
        return expert_parallel.load(trained, parallel.ep_size, orders=orders, **how)
    source = student_source(recipe)
    config = config or student_config(recipe, source)
    if recipe.train.adapter is not None and recipe.train.adapter.base == "nf4":
        return load_nf4(source.path, dtype=dtype, device=device, config=config)
    if recipe.init.weights == "loaded":
        return expert_parallel.load(source.path, parallel.ep_size, config=config, **how)
    return expert_parallel.randomise(config, parallel.ep_size, seed=recipe.seed, **how)


def meta_student(recipe: Recipe, source: Checkpoint) -> PreTrainedModel:
    """The student on the meta device, where tensors have shapes but no memory."""
    return _on_meta(student_config(recipe, source))


def _on_meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return causal_lm_class(config)._from_config(config)


def least_disk(recipe: Recipe, config: PretrainedConfig, chosen: Chosen | None) -> int:
    """The bytes of disk without which nothing of a run can be kept: one checkpoint, and the merged model beside parts.

    Args:
        config: the student's.
        chosen: what trains beside frozen weights; None if all weights train.
    """
    width, objective = DTYPES[recipe.train.dtype].itemsize, recipe.objective
    if recipe.train.draft_head:
        trained = sum(value.numel() for value in meta_head(config).parameters())
        return checkpoint_bytes(trained, trained, width) + width * trained
    model: Any = _on_meta(config)
    inputs, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    whole = sum(weight.numel() for weight in {*decoder_of(model).parameters(), head})
    if chosen is None:
        frozen = {inputs} if objective.freeze_embeddings else set()
        frozen |= {head} if objective.freeze_lm_head else set()
        return checkpoint_bytes(whole, whole - sum(weight.numel() for weight in frozen), width)
    trained = sum(model.get_parameter(name).numel() for name in chosen.trained)
    if recipe.train.adapter is not None:
        adapted = map(model.get_submodule, chosen.adapted)
        trained += recipe.train.adapter.rank * sum(layer.in_features + layer.out_features for layer in adapted)
    return checkpoint_bytes(trained, trained, width) + width * whole


def write_student(
    part: OwnPart, source: Path, directory: Path, world: World, *, random: bool = False, first: bool = False
) -> None:
    """Writes the model directory of a checkpoint, an ordinary Hugging Face directory with the original tensor names.

    Every rank calls this and writes its part of the trained weights. All other files are copied from ``source``.

    Args:
        part: this rank's part of the student; see ``own_part``.
        source: the directory that the student was made from.
        random: whether the student began with random weights; ``source`` may then have no weights.
        first: whether the names and shapes that were written are compared with the config, as in a run's first
            checkpoint: what no command could open is said before hours of training and not after them.

    Raises:
        FcsdError: they do not match the config.
    """
    world.on_first(directory.mkdir)
    world.everywhere(lambda: write_part(part, directory, None if random else source))
    world.on_first(lambda: _copy_others(source, directory))
    if first:
        world.on_first(lambda: _require_own_names(directory))


def _require_own_names(directory: Path) -> None:
    written = Checkpoint(directory)
    if problems := compare_tensors(written.layout, written.config).problems():
        text = "; ".join(problems.values())
        raise FcsdError(f"{directory}: what the run has written does not match its config: {text}", "Report this.")


def _copy_others(source: Path, directory: Path) -> None:
    written = {path.name for path in directory.iterdir()}
    copy_small(side_files(source, written | {INDEX}, code=CODE_FILES), directory)


def chosen_parts(recipe: Recipe, source: Checkpoint) -> Chosen | None:
    """What trains beside frozen weights, by the names in the recipe; None if all weights train. No weight is read.

    Args:
        source: the checkpoint that the student is made from.

    Raises:
        ConfigError: ``peft`` or bitsandbytes is not installed, the recipe names a part that the model does not have, or
            the model cannot be trained beside NF4 weights or have a draft head (``draft_config``).
    """
    if recipe.frozen_beside is None:
        return None
    if recipe.train.draft_head:
        return Chosen((), tuple(name for name, _ in meta_head(student_config(recipe, source)).named_parameters()))
    model, parts = meta_student(recipe, source), recipe.optim.train
    if (adapter := recipe.train.adapter) is None:
        return choose_parts(model, parts)
    require_extra("train", "train.adapter", "peft")
    chosen = choose(model, adapter.targets, parts, adapter.layers)
    if adapter.base == "nf4":
        require_extra("nf4", "train.adapter.base nf4", "bitsandbytes")
        require_nf4(model, chosen.trained, recipe.model, quantised=source.config.quantization is not None)
    return chosen


def train_parts(
    model: PreTrainedModel, recipe: Recipe, chosen: Chosen, ranks: TensorGroup | None = None
) -> TrainedParts:
    """Freezes everything but ``chosen.trained`` in a student that has just been loaded, and puts adapters into it.

    A draft head is beside it, and all of the student is frozen. The values of what is new are the same on every rank
    and at any ``parallel.ep_size``.

    Args:
        ranks: the ranks that shard the student; None if every rank has it.
    """
    if recipe.train.draft_head:
        head = start_head(model.requires_grad_(False), recipe.seed, ranks)
        return TrainedParts(model, {}, dict(head.named_parameters()), {}, head)
    parameters, paths = _by_name(model)
    trained = {own: p for name in chosen.trained for own, p in parameters[name].items()}
    asked = {name: p.requires_grad for name, p in trained.items()}  # with sharded layers one rank trains some biases
    model.requires_grad_(False)
    for name, parameter in trained.items():
        parameter.requires_grad_(asked[name])
    originals = {name: p.detach().clone() for name, p in trained.items()} if recipe.objective.needs_teacher else {}
    places = {name: paths[f"{name}.weight"].removesuffix(".weight") for name in chosen.adapted}
    layers: dict[str, Any] = {}
    if (adapter := recipe.train.adapter) is not None:
        layers = add_adapters(model, places, adapter.rank, adapter.factor * adapter.rank, recipe.seed)
    return TrainedParts(model, layers, trained, originals)


def _by_name(model: PreTrainedModel) -> tuple[dict[str, dict[str, nn.Parameter]], dict[str, str]]:
    """The parameters that stand for each of transformers', by their names in ``TrainedParts``, and names in this model.

    Names differ inside of blocks whose experts are divided, where several parameters stand for one of all experts. The
    names in this model do not have those of divided experts.
    """
    blocks, names = expert_blocks(model), arch_of(model.config).blocks
    parameters: dict[str, dict[str, nn.Parameter]] = {}
    paths: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        path = next((path for path in blocks if name.startswith(f"{path}.")), None)
        if path is None:
            parameters[name], paths[name] = {name: parameter}, name
            continue
        origin = blocks[path].origin(name.removeprefix(f"{path}."), names)
        if origin is None:
            continue  # the first part of the original tensor stands for all parts
        own = f"{path}.{origin.name}"
        if origin.of_experts:
            parameters[own] = {f"{path}.{part}": model.get_parameter(f"{path}.{part}") for part in origin.parts}
        else:
            parameters[own], paths[own] = {own: parameter}, name
    return parameters, paths
