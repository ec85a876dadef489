"""Modules that compute the same as transformers' own by single kernels, in a model whose experts are not divided.

The parts are norms, gated MLPs (dense ones and shared experts), rotary embeddings, latent attention and routed experts.
A mixin that is put before the class of a module computes it, and gives its own class back. Every part computes the same
function as transformers' code, up to rounding. A compiler gets transformers' own code, which it fuses itself.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .arch import Arch
from .config_keys import cache_keyword


def fuse_parts(model: nn.Module, arch: Arch, fused: bool) -> None:
    """Let kernels compute these parts, or restore transformers' code; the call can be repeated."""
    fuse_norms(model, arch, fused)
    fuse_rotary(model, arch, fused)
    fuse_mlps(model, fused)
    fuse_experts(model, fused)


def swap_classes(
    model: nn.Module, mixin: type[Any], concerns: Callable[[nn.Module], bool], swapped: bool, **attributes: str | int
) -> None:
    """Let a mixin compute the modules that it concerns, or restore their own classes. The call can be repeated.

    Args:
        mixin: the class that comes first. Its attribute ``unfused`` becomes the class that is restored.
        concerns: whether a module, in its own class, is to be swapped.
    """
    for module in model.modules():
        if isinstance(module, mixin):
            module.__class__ = module.unfused  # pyright: ignore[reportAttributeAccessIssue]
        if swapped and concerns(module):
            module.__class__ = with_mixin(mixin, type(module), unfused=type(module), **attributes)


@cache
def with_mixin(mixin: type[Any], cls: type[nn.Module], **attributes: type | str | int) -> type[Any]:
    """A class with a mixin before it. It keeps its name, by which transformers finds modules and initialises norms."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, **attributes})


class FusedNorm(nn.Module):
    """An RMSNorm that torch computes by one forward and one backward kernel, where transformers starts six.

    torch rounds the result once, whereas transformers also rounds the normalised input before the weight multiplies it.
    """

    unfused: type[nn.Module]  # transformers' class, which ``fuse_norms(fused=False)`` restores
    epsilon: str  # the name of the attribute that holds epsilon
    offset: int  # what is added to the weight
    weight: Tensor

    def forward(self, hidden_states: Tensor) -> Tensor:
        """``[..., width]``, normalised over the width in fp32 and multiplied by ``offset + weight``, ``[width]``."""
        hidden, scale = hidden_states, self.weight
        if self.offset:
            hidden, scale = hidden.float(), self.offset + scale.float()  # bf16 would round it
        if hidden.is_meta:
            return _OnMeta.apply(hidden, scale).to(hidden_states.dtype)  # type: ignore[union-attr]
        return functional.rms_norm(hidden, scale.shape, scale, getattr(self, self.epsilon)).to(hidden_states.dtype)


class _OnMeta(torch.autograd.Function):
    """Allocates and keeps what torch's kernels do on a GPU: the input, the weight and an fp32 scale for each row.

    On the meta device torch would split its norm into small operations that keep more for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight, hidden.new_empty(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors[:2]
        return torch.empty_like(hidden), torch.empty_like(weight)


def fuse_norms(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let torch's kernel compute every RMSNorm of a model, or restore transformers' code; the call can be repeated."""
    concerns = partial(is_norm, arch)
    swap_classes(model, FusedNorm, concerns, fused, epsilon=arch.norm_epsilon or "", offset=arch.norm_offset)


def is_norm(arch: Arch, module: nn.Module) -> bool:
    """Whether a module is an RMSNorm that transformers' code computes.

    It has the epsilon that the row names, one argument, and one parameter: its weight ``[width]``. The norms of linear
    attention take a gate, too.
    """
    return (
        arch.norm_epsilon is not None
        and hasattr(module, arch.norm_epsilon)
        and type(module).forward.__module__.startswith("transformers.")
        and type(module).forward.__code__.co_argcount == 2
        and [(name, parameter.ndim) for name, parameter in module.named_parameters()] == [("weight", 1)]
    )


_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedMLP(nn.Module):
    """A gated MLP whose product one kernel computes, and rounds once: transformers rounds ``silu(gate)``, too."""

    unfused: type[nn.Module]  # transformers' class, which ``fuse_mlps(fused=False)`` restores
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        if torch.compiler.is_compiling():  # a compiler fuses transformers' own code
            return self.unfused.forward(self, x)
        from fcsd.kernels.gated import gated_silu  # Triton is imported only where its kernels run

        return self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))


def fuse_mlps(model: nn.Module, fused: bool = True) -> None:
    """Let a kernel compute the product of every gated MLP with SiLU, or restore transformers' code.

    The call can be repeated. Routed experts, whose weights are stacked, are not changed.
    """
    swap_classes(model, FusedMLP, is_gated_mlp, fused)


def is_gated_mlp(module: Any) -> bool:
    """Whether a module computes ``down(silu(gate(x)) * up(x))`` and consists of these four parts.

    One that drops outputs while it trains, or limits what it multiplies, computes more than that.
    """
    more = {"dropout", "clamp"}.intersection(type(module).forward.__code__.co_names)
    if {name for name, _ in module.named_children()} != _PARTS or more:
        return False
    return isinstance(module.act_fn, SiLUActivation | nn.SiLU)


_NAME = "apply_rotary_pos_emb"


class FusedRotary(nn.Module):
    """An attention whose queries and keys one kernel rotates, where transformers starts ten.

    transformers' attention modules call the function ``apply_rotary_pos_emb`` of their own file. The forward pass here
    is their code with another function under this name. They round both products and their sum, the kernel rounds once.
    """

    unfused: type[nn.Module]  # transformers' class, which ``fuse_rotary(fused=False)`` restores

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers' own class."""
        forward = self.unfused.forward
        if not torch.compiler.is_compiling():  # a compiler fuses transformers' own code
            forward = _with_kernel(forward)
            if "past_key_values" in kwargs:  # what is around transformers' own code would rename it
                kwargs[cache_keyword()] = kwargs.pop("past_key_values")
        return forward(self, *args, **kwargs)


@cache
def _with_kernel(forward: Any) -> Callable[..., Any]:
    """A function with the code of ``forward`` that rotates by the kernel."""
    own = unwrap(forward)
    return FunctionType(
        own.__code__, {**own.__globals__, _NAME: _rotate_both}, own.__name__, own.__defaults__, own.__closure__
    )


def _rotate_both(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As ``apply_rotary_pos_emb``: ``[batch, heads, seq, dim]``, by angles ``[batch or 1, seq, dim or less]``."""
    from fcsd.kernels.rotary import rotate  # Triton is imported only where its kernels run

    cos, sin = (angles[..., : angles.shape[-1] // 2] for angles in (cos, sin))  # they are given twice
    return rotate(queries, keys, cos, sin)


def fuse_rotary(model: nn.Module, arch: Arch, fused: bool = True) -> None:
    """Let a kernel rotate the queries and keys of every attention, or restore transformers' code.

    In latent attention, kernels also put queries and keys together. The call can be repeated. It changes nothing if the
    architecture rotates in another way.
    """
    swap_classes(model, FusedRotary, _rotates, fused and arch.rotates_halves)
    swap_classes(model, FusedLatentAttention, is_latent, fused)


def _rotates(module: nn.Module) -> bool:
    """Whether a module calls ``apply_rotary_pos_emb`` in its forward pass, with angles of the usual shape.

    Vision towers may have angles without a batch, and then name the dimension that the function adds.
    """
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and _NAME in code.co_names and ("unsqueeze_dim",) not in code.co_consts


_OWN = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_OF_QUERIES = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"}


class FusedLatentAttention(nn.Module):
    """Multi-head latent attention (MLA), as DeepSeek-V2 and -V3 have, whose queries and keys kernels make.

    transformers rotates a part of each query and of the shared key by several kernels, and copies the parts of queries
    and keys into new tensors. Here one kernel writes all queries, and one all keys. The products, norms and the
    attention function are those of transformers' module, in its order. A compiler gets the rotation in real numbers,
    because it cannot fuse the complex ones of DeepSeek-V2.
    """

    unfused: type[nn.Module]  # transformers' class, which ``fuse_rotary(fused=False)`` restores

    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As transformers' own class: ``[batch, seq, hidden]`` to the same shape, and the weights or None."""
        return _attend(self, hidden_states, **kwargs)

    def expand_kv(self: Any, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """As transformers' own class: latents and the shared parts of keys to the keys and values of every head.

        Arguments are ``[batch, 1, seq, dimensions]``, results ``[batch, heads, seq, dimensions]``.
        """
        if torch.compiler.is_compiling():  # a compiler fuses transformers' own code
            return super().expand_kv(latent, shared)  # pyright: ignore[reportAttributeAccessIssue]
        from fcsd.kernels.latent import expand  # Triton is imported only where its kernels run

        own = self.qk_nope_head_dim
        projected = self.kv_b_proj(latent).view(latent.shape[0], latent.shape[2], -1, own + self.v_head_dim)
        return expand(projected, shared, own)


def _attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor | tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    from fcsd.kernels.rotary import Pairs, rotate, rotate_reference  # Triton is imported only where its kernels run

    batch, seq, _ = hidden_states.shape
    own, rotated = module.qk_nope_head_dim, module.qk_rope_head_dim
    if isinstance(position_embeddings, Tensor):  # DeepSeek-V2: complex numbers, one for each pair
        cos, sin = torch.view_as_real(position_embeddings).unbind(-1)
        pairs = Pairs(neighbours=True, to_neighbours=True)
    else:
        cos, sin = (angles[..., : rotated // 2] for angles in position_embeddings)
        pairs = Pairs(neighbours=getattr(module.config, "rope_interleave", False))  # MiniCPM3 has no such field

    if module.q_lora_rank is None:
        queries = module.q_proj(hidden_states)
    else:
        queries = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden_states)))
    queries = queries.view(batch, seq, -1, own + rotated).transpose(1, 2)
    latent, shared = module.kv_a_proj_with_mqa(hidden_states).split([module.kv_lora_rank, rotated], dim=-1)
    latent = module.kv_a_layernorm(latent).unsqueeze(1)
    shared, of_queries = shared.unsqueeze(1), pairs._replace(start=own)
    if torch.compiler.is_compiling():
        queries, shared = rotate_reference(queries, cos, sin, of_queries), rotate_reference(shared, cos, sin, pairs)
    else:
        queries, shared = rotate(queries, shared, cos, sin, of_queries, pairs)
    cache = past_key_values if cache is None else cache  # the name since transformers 5.24, and before
    if cache is not None:  # it keeps latents
        latent, shared = cache.update(latent, shared, module.layer_idx)
    keys, values = module.expand_kv(latent, shared)

    eager = sys.modules[type(module).__module__].eager_attention_forward
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    dropout = module.attention_dropout if module.training else 0.0
    out, weights = attend(
        module, queries, keys, values, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs
    )
    return module.o_proj(out.reshape(batch, seq, -1).contiguous()), weights


def is_latent(module: nn.Module) -> bool:
    """Whether a module is a latent attention that reads all keys, has positions and computes nothing else.

    That of DeepSeek-V3.2 has an indexer, which chooses some keys, or None for those of the layer before it. Others gate
    their output, or scale queries by their position. That of Kimi-Linear has no positions.
    """
    children = {name for name, _ in module.named_children()}
    latent = _OWN <= children <= _OWN | _OF_QUERIES and not hasattr(module, "indexer")
    positions = getattr(module.config, "rope_parameters", None) if latent else None
    return positions is not None and "llama_4_scaling_beta" not in positions


# Pairs of a token and an expert up to which ``few_experts`` computes.
_FEW = 1024


class FusedExperts(nn.Module):
    """Routed experts, all on one GPU, whose rows Triton kernels move, with the product inside them.

    The grouped matrix products are those of transformers. Around them, transformers copies every row to its expert and
    back by indexing, multiplies the outputs by the scores in a tensor of their own, and fills rows of absent experts.
    Its backward pass sorts indices to add rows up. Here one kernel copies tokens to rows, one computes
    ``silu(gate) * up``, and one sums each token's weighted rows. Products and sums are in fp32 and rounded once.
    """

    unfused: type[nn.Module]  # transformers' class, which ``fuse_experts(fused=False)`` restores
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of each token's experts, ``[tokens, hidden]`` to the same shape.

        ``top_k_index``, int64, and ``top_k_weights`` are ``[tokens, top_k]``.
        """
        # A plan counts what is allocated on the meta device, and would not see what this one operator allocates inside.
        if not torch.is_grad_enabled() and top_k_index.numel() <= _FEW and not hidden_states.is_meta:
            from fcsd.kernels.few_experts import few_experts  # Triton is imported only where its kernels run

            return few_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)
        # A compiler fuses transformers' own code, and only that knows of experts on other ranks.
        if torch.compiler.is_compiling() or getattr(self, "_is_expert_parallel", False):
            return super().forward(hidden_states, top_k_index, top_k_weights)
        return fused_experts(hidden_states, top_k_index, top_k_weights, self.gate_up_proj, self.down_proj)


def fused_experts(hidden: Tensor, chosen: Tensor, scores: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of each token's experts, ``[tokens, hidden]`` to the same shape, on a GPU.

    Args:
        chosen: int64 ``[tokens, top_k]``, the experts of each token.
        scores: ``[tokens, top_k]``, their weights.
        gate_up: ``[experts, 2 * inner, hidden]``, gates first.
        down: ``[experts, hidden, inner]``.
    """
    from fcsd.kernels.gated import gated_silu_halves  # Triton is imported only where its kernels run
    from fcsd.kernels.rows import permute, row_numbers, unpermute

    expert_of_row, order = torch.sort(chosen.flatten())
    row_of = row_numbers(order, chosen.shape[1])
    # The first row behind those of each expert. The host does not wait for it.
    experts = torch.arange(len(gate_up), device=chosen.device)
    ends = torch.searchsorted(expert_of_row, experts, right=True, out_int32=True)
    rows = permute(hidden, None, row_of)
    inner = gated_silu_halves(_grouped_product(rows, gate_up, ends))
    return unpermute(_grouped_product(inner, down, ends), scores, row_of)


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """The product of each row with the transposed matrix of its expert, by the kernel that transformers uses.

    Args:
        rows: ``[rows, in]``, ordered by expert.
        weights: ``[experts, out, in]``.
        ends: int32 ``[experts]``, the first row behind those of each expert.
    """
    return moe._grouped_linear(rows, weights, ends)  # pyright: ignore[reportPrivateUsage]


def fuse_experts(model: nn.Module, fused: bool = True) -> None:
    """Let kernels move the rows of all routed experts that ``is_grouped`` describes, or restore transformers' code.

    The call can be repeated.
    """
    swap_classes(model, FusedExperts, is_grouped, fused)


def is_grouped(module: Any) -> bool:
    """Whether a module holds routed experts that transformers computes as ``FusedExperts`` does.

    These are gated MLPs with SiLU and without biases, computed by grouped products. Their weights are
    ``[experts, 2 * inner, hidden]``, gates first, and ``[experts, hidden, inner]``.
    """
    if getattr(type(module), "_apply_gate", None) is not moe._default_apply_gate:  # pyright: ignore[reportPrivateUsage]
        return False
    form = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    return (
        all(getattr(module, name) == value for name, value in form.items())
        and module.config._experts_implementation == "grouped_mm"
        and isinstance(module.act_fn, SiLUActivation | nn.SiLU)
    )
