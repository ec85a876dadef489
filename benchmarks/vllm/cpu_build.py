"""What vLLM's build for CPUs lacks, by gloo and torch; engine, models, routers and the exchange at once are vLLM's."""

from typing import Any, get_type_hints


def fill_in() -> None:
    """Give it gathers and scatters of different numbers of rows, and experts of which a rank has a part."""
    import torch
    import torch.distributed as dist
    from vllm.distributed.device_communicators.cpu_communicator import (  # pyright: ignore[reportMissingImports]
        CpuCommunicator,
    )
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import (  # pyright: ignore[reportMissingImports]
        CPUUnquantizedExperts,
    )

    def all_gatherv(self: Any, x: Any, dim: int = 0, sizes: Any = None) -> Any:
        if isinstance(x, list):
            return [all_gatherv(self, part, dim, sizes) for part in x]
        mine = x.new_zeros(max(sizes), *x.shape[1:])
        mine[: len(x)] = x
        found = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(found, mine, group=self.device_group)
        return torch.cat([part[:rows] for part, rows in zip(found, sizes, strict=True)])

    def reduce_scatterv(self: Any, x: Any, dim: int = -1, sizes: Any = None) -> Any:
        whole = x.clone()
        dist.all_reduce(whole, group=self.device_group)
        return whole.split(sizes)[self.rank_in_group].clone()

    def keep(self: Any, layer: Any) -> None:  # instead of packing the weights for the kernel
        for name in ("use_grouped_topk", "renormalize", "scoring_func", "custom_routing_function"):
            setattr(self, name, getattr(layer, name))

    def apply(self: Any, hidden_states: Any, w1: Any, w2: Any, router_logits: Any, **given: Any) -> Any:
        assert given["activation"].value == "silu"
        names = ("num_expert_group", "topk_group", "e_score_correction_bias", "routed_scaling_factor")
        weights, ids = self._select_experts(hidden_states, router_logits, **{name: given[name] for name in names})
        out, places = torch.zeros_like(hidden_states), given["expert_map"]
        for expert, place in enumerate(range(len(w1)) if places is None else places.tolist()):
            if place < 0:  # another rank has it
                continue
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            x, scale = hidden_states[rows], weights[rows, slots, None].to(out.dtype)
            if given["apply_router_weight_on_input"]:
                x, scale = x * scale, torch.ones_like(scale)
            gate, up = (x @ w1[place].T).chunk(2, -1)
            out.index_add_(0, rows, (torch.nn.functional.silu(gate) * up) @ w2[place].T * scale)
        return out

    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = all_gatherv, reduce_scatterv
    CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply = keep, apply


def score_by_sigmoid() -> None:
    """Give vLLM's build for CPUs routers that score by a sigmoid without groups, as those that have a single group.

    The build has them with groups alone.
    """
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as experts  # pyright: ignore[reportMissingImports]

    stock = getattr(experts, "select_experts", None)  # 0.32 has no such function
    if stock is None:
        return

    def select_experts(**given: Any) -> Any:
        if given["scoring_func"] == "sigmoid" and not given["use_grouped_topk"]:
            given |= dict(use_grouped_topk=True, num_expert_group=1, topk_group=1)
        return stock(**given)

    experts.select_experts = select_experts


def attend_linearly_in_float32() -> None:
    """Give vLLM's build for CPUs the gated delta rule in float32, token by token. It has it in bfloat16 alone."""
    import torch
    import vllm.model_executor.layers.mamba.ops.cpu.gdn_attention as build  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import silu, softplus

    stock = build.cpu_gdn_attention_core

    def core(mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any, layer_name: Any) -> None:
        context = build.get_forward_context()
        if mixed_qkv.dtype != torch.float32 or context.attn_metadata is None:
            stock(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        layer = context.no_compile_layers[build._resolve_layer_name(layer_name)]
        steps = context.attn_metadata[layer.prefix]
        starts, slots = steps.non_spec_query_start_loc.tolist(), steps.non_spec_state_indices_tensor.tolist()
        goes_on = [True] * steps.num_decodes
        if steps.num_prefills:
            goes_on += steps.has_initial_state.tolist()[steps.num_decodes :]
        for first, end, slot, before in zip(starts, starts[1:], slots, goes_on, strict=False):
            out = one(layer, mixed_qkv[first:end], b[first:end], a[first:end], slot, before)
            core_attn_out[first:end] = out

    def one(layer: Any, x: Any, b: Any, a: Any, slot: int, before: bool) -> Any:
        """One sequence, ``[tokens, channels]``; the convolution and the delta rule go on where its states end."""
        past, kept = build._conv_buffer_view(layer)[slot], layer.kv_cache[1][slot]  # [channels, width - 1], [h, v, k]
        if not before:
            past.zero_()
            kept.zero_()
        state = kept.double()
        weight = build._unpacked_conv_weight(layer)
        whole = torch.cat((past.T, x))
        past.copy_(whole[-past.shape[1] :].T)
        windows = whole.unfold(0, weight.shape[1], 1)  # [tokens, channels, width]
        query, key, value = (part.squeeze(0) for part in layer.rearrange_mixed_qkv(silu((windows * weight).sum(-1))))
        groups = value.shape[1] // key.shape[1]
        query, key, value = query.double(), key.double(), value.double()
        norms = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
        query, key = (part.repeat_interleave(groups, 1) for part in norms)
        decay, beta = torch.exp(-layer.A_log.exp() * softplus(a + layer.dt_bias)), b.sigmoid()
        found = []
        for t in range(len(x)):
            state *= decay[t, :, None, None]
            missing = value[t] - (state @ key[t, :, :, None]).squeeze(-1)
            state += (beta[t, :, None] * missing)[..., None] * key[t, :, None]
            found.append((state @ query[t, :, :, None]).squeeze(-1) / query.shape[-1] ** 0.5)
        kept.copy_(state)
        return torch.stack(found)

    core.__annotations__ = get_type_hints(stock) | {"return": None}  # vLLM makes an operator of it
    build.cpu_gdn_attention_core = core
