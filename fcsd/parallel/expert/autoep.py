"""Makes DeepSpeed AutoEP an ``ExpertBlock``, finds such blocks, writes its configuration, and divides experts.

This is the only file of ``fcsd/parallel`` that imports DeepSpeed or knows AutoEP's names. It imports DeepSpeed
inside functions, because ``expert_parallel_config`` must not load it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from fcsd.errors import ConfigError
from fcsd.models.arch import Arch
from fcsd.models.wiring import Blocks
from fcsd.parallel.expert.block import ExpertBlock, ExpertOrder, Origin, Routing
from fcsd.parallel.expert.placement import Placement

# AutoEP keeps the gate, down and up projections of a rank's experts as w1, w2 and w3; transformers fuses gate and up.
_EXPERTS = {
    "experts.w1": Origin("experts.gate_up_proj", ("experts.w1", "experts.w3"), of_experts=True),
    "experts.w2": Origin("experts.down_proj", ("experts.w2",), of_experts=True),
    "experts.w3": None,
}
_PLACEMENT = "fcsd_placement"  # the attribute of AutoEP's layer that has a placement other than AutoEP's own


def expert_block(module: nn.Module) -> ExpertBlock | None:
    """The ``ExpertBlock`` of a module; None if the module is not a MoE block whose experts are divided."""
    # This attribute marks AutoEP's class. Reading it does not load DeepSpeed.
    return AutoEPBlock(module) if getattr(module, "_is_autoep_layer", False) else None


def expert_blocks(model: nn.Module) -> dict[str, ExpertBlock]:
    """Every MoE block of a model whose experts are divided, by the path of its module."""
    found = {path: expert_block(module) for path, module in model.named_modules()}
    return {path: block for path, block in found.items() if block is not None}


@dataclass(frozen=True)
class AutoEPBlock:
    """The ``ExpertBlock`` of an AutoEP layer.

    ``deepspeed.initialize`` may replace the layer's process group, so each property reads the layer when it is used.
    """

    layer: Any

    @property
    def router(self) -> nn.Module:
        return self.layer.router

    @property
    def experts(self) -> nn.Module:
        return self.layer.experts

    @property
    def shared(self) -> Callable[[Tensor], Tensor] | None:
        return None if self.layer.shared_experts is None else self._run_shared

    @property
    def placement(self) -> Placement:
        placed = getattr(self.layer, _PLACEMENT, None)
        return Placement(self.layer.num_experts, self.layer.ep_size) if placed is None else placed

    @property
    def group(self) -> Any:
        return self.layer.ep_group

    @property
    def rank(self) -> int:
        return self.layer.ep_rank

    @property
    def top_k(self) -> int:
        return self.layer.top_k

    @property
    def prescaled(self) -> bool:
        return self.layer.score_apply == "pre"

    def route(self, tokens: Tensor) -> Routing:
        routing = Routing(*self.layer.router(tokens, self.layer.expert_bias))
        with torch.no_grad():
            self.layer.tokens_per_expert.add_(routing.counts)
        return routing

    def run(self, rows: Tensor, counts: Tensor) -> Tensor:
        from deepspeed.module_inject.auto_ep_layer import permute_by_local_expert, unpermute_by_local_expert
        from deepspeed.moe.ep_kernels import inverse_permutation, permute_rows_supported

        if permute_rows_supported(rows):
            # The same gathers as AutoEP's, but AutoEP computes the inverse of the order twice.
            order = self.order(counts, len(rows))
            places = inverse_permutation(order.source, order.received)
            by_expert = Gather.apply(rows, order.source, places)
            del rows  # freed while the experts run
            return Gather.apply(self.run_ordered(by_expert, order), places, order.source)
        by_expert, indices, aligned, total = permute_by_local_expert(rows, counts)
        del rows  # freed while the experts run
        return unpermute_by_local_expert(self.layer.experts(by_expert, aligned), indices, total)

    def place(self, placement: Placement) -> None:
        setattr(self.layer, _PLACEMENT, placement)

    def order(self, counts: Tensor, received: int) -> ExpertOrder:
        from deepspeed.moe.ep_kernels import TOKEN_GROUP_ALIGN_SIZE_M, generate_permute_indices

        ranks, slots = counts.shape
        # As in AutoEP's own ``permute_by_local_expert``: every expert may need that many rows of zeros.
        most = received + slots * TOKEN_GROUP_ALIGN_SIZE_M
        most += -most % TOKEN_GROUP_ALIGN_SIZE_M
        with torch.no_grad():
            source, aligned, _ = generate_permute_indices(
                counts.reshape(-1), slots, ranks, most, TOKEN_GROUP_ALIGN_SIZE_M, use_cpu=not counts.is_cuda
            )
        return ExpertOrder(source.long(), aligned, received)

    def run_ordered(self, rows: Tensor, order: ExpertOrder) -> Tensor:
        return self.layer.experts(rows, order.counts)

    def origin(self, name: str, blocks: Blocks) -> Origin | None:
        if name in _EXPERTS:
            return _EXPERTS[name]
        if blocks.router_bias is not None and name == "router.e_score_correction_bias":
            return Origin(blocks.router_bias, (name,))
        renamed = {
            "router.gate.": blocks.router,
            "router.": blocks.router,
            "shared_experts.": blocks.shared,
            "shared_experts_gate.": blocks.shared_gate,
        }
        prefix = next(prefix for prefix in renamed if name.startswith(prefix))
        return Origin(f"{renamed[prefix]}.{name.removeprefix(prefix)}", (name,))

    def _run_shared(self, x: Tensor) -> Tensor:
        out = self.layer.shared_experts(x)
        if self.layer.shared_experts_gate is not None:
            out = torch.sigmoid(self.layer.shared_experts_gate(x)) * out
        return out


class _Fp32Linear(nn.Linear):
    """A router's product in fp32, for families that keep it in fp32 beside bf16, as transformers computes it.

    DeepSpeed may round the weight of a student to bf16. The product stays in fp32, as that of the teacher.
    """

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.linear(x.to(wide), self.weight.to(wide), None if self.bias is None else self.bias.to(wide))


class Gather(torch.autograd.Function):
    """``out[n] = rows[source[n]]``, or zeros where ``source[n]`` is -1; ``places`` is the inverse of ``source``.

    Every row occurs at most once in ``source``, so its gradient is that of its place, and zeros if it has none.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, places: Tensor) -> Tensor:
        from deepspeed.moe.ep_kernels import gather_rows

        ctx.save_for_backward(places)
        return gather_rows(rows, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        from deepspeed.moe.ep_kernels import gather_rows

        return gather_rows(grad, *ctx.saved_tensors), None, None


def trains_divided(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one of divided experts, and trains."""
    return parameter.requires_grad and not getattr(parameter, "allreduce", True)


@contextmanager
def frozen_experts(model: nn.Module) -> Iterator[None]:
    """A block in which DeepSpeed builds an engine for a model some or all of whose divided experts are frozen.

    The engine looks for AutoEP's class, and then demands a group of parameters of experts from the optimizer. Without
    the class it treats all trained parameters alike, which is right where no expert trains. It still
    broadcasts the weights of experts among the ranks that hold the same ones, which the parameters themselves say.
    """
    layers = [
        model.get_submodule(path)
        for path, block in expert_blocks(model).items()
        if not any(map(trains_divided, block.experts.parameters()))
    ]
    classes = [type(layer) for layer in layers]
    for layer in layers:
        layer.__class__ = nn.Module
    try:
        yield
    finally:
        for layer, cls in zip(layers, classes, strict=True):
            layer.__class__ = cls


def expert_parallel_config(arch: Arch, ep_size: int) -> dict[str, Any]:
    """The ``expert_parallel`` section of a DeepSpeed config.

    AutoEP finds MoE blocks by ``model_type``, and a converted model has a different type on purpose. The section
    therefore contains the keys of the architecture's row.

    Args:
        ep_size: the number of ranks that share the experts of a layer.

    Raises:
        ConfigError: the architecture has no experts, or has experts that AutoEP does not support.
    """
    if arch.autoep is None:
        raise ConfigError(
            f"{arch.model_type} cannot be expert-parallel: {arch.no_ep or 'it has no experts'}",
            hint=arch.no_ep
            and "Set parallel.ep_size: 1 on GPUs that hold all experts; train.adapter needs the least memory.",
        )
    return {"enabled": True, "autoep_size": ep_size, "use_grouped_mm": False, **arch.autoep_keys}


def allow_string_keys() -> None:
    """Let AutoEP of DeepSpeed 0.19.8 look up transformers' output recorders by class name.

    Since transformers 5.23 the registry replaces each key by the name of the key's class, so it does not find a name
    that is given directly. Earlier versions use a plain dict and need no change.
    """
    from transformers.utils import output_capturing

    registry_type = type(output_capturing._CAN_RECORD_REGISTRY)
    if registry_type is dict:
        return

    def get(self: dict, key: Any, default: Any = None) -> Any:
        found = dict.get(self, key if isinstance(key, str) else str(key.__class__), default)
        return {} if found is None else found  # the registry may hold None for a class

    def put(self: dict, key: Any, value: Any) -> None:
        dict.__setitem__(self, key if isinstance(key, str) else str(key.__class__), value)

    registry_type.get, registry_type.__setitem__ = get, put  # pyright: ignore[reportAttributeAccessIssue]


def _choose_among_all(router: Any) -> None:
    """Do not let a router choose groups of experts if it takes all groups: the choice would change nothing."""
    if router.num_expert_groups is not None and router.num_limited_groups == router.num_expert_groups:
        router.num_expert_groups = None


def _stay_in_fp32(router: Any) -> None:
    """Let a router whose weight is in fp32 compute in fp32, also if it gets rows in bf16."""
    if router.gate.weight.dtype == torch.float32:
        router.gate.__class__ = _Fp32Linear


def shard_experts(model: PreTrainedModel, arch: Arch, ep_size: int) -> None:
    """Replace every MoE block by an AutoEP layer that holds this rank's experts. No DeepSpeed engine is needed.

    A model on the meta device stays there. ``deepspeed.initialize`` takes the model as it is if its config has no
    ``expert_parallel`` section. The default process group must exist.

    Args:
        ep_size: the number of neighbouring ranks that share the experts of a layer.

    Raises:
        ConfigError: see ``expert_parallel_config``; or AutoEP found no MoE block.
    """
    import deepspeed.comm as dist
    from deepspeed.accelerator import get_accelerator
    from deepspeed.module_inject.auto_ep import AutoEP
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config
    from deepspeed.utils import groups

    allow_string_keys()
    config = expert_parallel_config(arch, ep_size)
    accelerator: Any = get_accelerator()
    config["use_grouped_mm"] = accelerator.device_name() == "cuda"
    text: Any = model.config.get_text_config()
    config["top_k"] = text.num_experts_per_tok
    if arch.ep_scale is not None:
        config["routed_scaling_factor"] = getattr(text, arch.ep_scale)
    sharder = AutoEP(model, parse_autoep_config(config))
    sharder.model_config = text  # AutoEP does not read nested configs
    specs = sharder.ep_parser()
    if not specs:
        raise ConfigError(f"DeepSpeed AutoEP found no MoE block in {type(model).__name__}")
    if f"ep_size_{ep_size}" not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(ep_size)
    with next(model.parameters()).device:  # AutoEP creates its layers on the default device
        sharder.replace_moe_layers(specs, ep_size=ep_size, ep_rank=dist.get_rank() % ep_size)
    for module in model.modules():
        if expert_block(module) is not None:
            module.set_deepspeed_parallelism(False)  # pyright: ignore[reportCallIssue]
            _choose_among_all(module.router)
            _stay_in_fp32(module.router)
