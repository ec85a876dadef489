"""Lets kernels make the queries and keys of multi-head latent attention (MLA), which DeepSeek-V2 and -V3 have.

transformers rotates a part of each query and of the shared key by several kernels, and copies the parts of queries and
keys into new tensors. Here one kernel writes all queries, and one all keys. Both compute the same function. The
products, norms and the attention function are those of transformers' module, in its order.

A compiler gets the rotation in real numbers instead of the kernels. It cannot fuse the complex ones of DeepSeek-V2.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_OWN = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_OF_QUERIES = {"q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"}


class FusedLatentAttention(nn.Module):
    """Latent attention whose queries and keys kernels make; a mixin that precedes transformers' own class."""

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
    if past_key_values is not None:  # it keeps latents
        latent, shared = past_key_values.update(latent, shared, module.layer_idx)
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
