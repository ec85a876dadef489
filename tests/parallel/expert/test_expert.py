"""Blocking expert parallelism equals plain transformers: outputs and every gradient, for every architecture."""

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import in_group
from representatives import by_day_and_night

from fcsd.errors import ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import arch_of, wire
from fcsd.models.wiring import Wiring
from fcsd.parallel.expert.autoep import expert_parallel_config, shard_experts
from fcsd.parallel.expert.blocking import wire_parallel

MOE = [a for a in tiny.CONFIGS if ARCHS[a].autoep is not None] + [*tiny.INSIDE]
WIRINGS = [Wiring("farskip", (0, 1, 2, 3)), Wiring("standard", ()), Wiring("ladder", (2, 3))]
KINDS = ("qwen3_moe", "deepseek_v2", "llama4_text")  # without shared experts, with them, and with weighted inputs


def _wirings(arch: str) -> list[Wiring]:
    return WIRINGS if arch in KINDS else WIRINGS[:2]


def _batch(rank: int) -> torch.Tensor:
    return tiny.tokens(seed=10 + rank, length=8 + 4 * rank)  # ranks hold different numbers of tokens


def _full_gradients(model) -> dict[str, torch.Tensor]:
    """Gradients by transformers' names; experts as ``[experts, ...]`` gathered from all ranks."""
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:  # what chooses the keys that DeepSeek-V3.2 reads
            continue
        if ".experts.w" in name:
            parts = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, parameter.grad)
            grads[name] = torch.cat(parts)
        else:
            if parameter.grad is None:  # of a vision tower
                continue
            grads[name] = parameter.grad.clone()
            dist.all_reduce(grads[name])
    return grads


def _reference(arch: str, wiring: Wiring, world: int):
    model = wire(tiny.model(arch), wiring)
    logits = []
    for rank in range(world):
        ids = _batch(rank)
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        logits.append(out.logits.detach())
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _sharded(rank: int, arches: list[str]):
    """The logits of this rank by architecture and wiring, and on rank 0 the gradients of all ranks."""
    results = {}
    for arch in arches:
        model = tiny.model(arch)
        shard_experts(model, arch_of(model.config), dist.get_world_size())
        for i, wiring in enumerate(_wirings(arch)):
            wire_parallel(model, wiring)
            model.zero_grad()
            ids = _batch(rank)
            out = model(ids, labels=ids, use_cache=False)
            out.loss.backward()
            gradients = _full_gradients(model)
            results[arch, i] = out.logits.detach(), {} if rank else gradients
    return results


def _fused(grads: dict[str, torch.Tensor], name: str, prescaled: bool) -> torch.Tensor:
    """AutoEP keeps gate, down and up apart as w1, w2, w3; transformers fuses gate and up (llama4: transposed)."""
    if not name.endswith("gate_up_proj"):
        down = grads[name.replace("down_proj", "w2")]
        return down.transpose(1, 2) if prescaled else down
    gate, up = grads[name.replace("gate_up_proj", "w1")], grads[name.replace("gate_up_proj", "w3")]
    return torch.cat([gate, up], dim=1).transpose(1, 2) if prescaled else torch.cat([gate, up], dim=1)


FAMILIES = by_day_and_night("moe", "layer", of=MOE)


@pytest.mark.parametrize(
    ("world", "arches"),
    [
        pytest.param(4, list(KINDS), id="four ranks"),
        *(pytest.param(2, *case.values, id=case.id, marks=case.marks) for case in FAMILIES),
    ],
)
def test_blocking_expert_parallelism_is_plain_transformers(world, arches):
    ranks = in_group(world, _sharded, arches)
    for arch in arches:
        for i, wiring in enumerate(_wirings(arch)):
            logits, grads = _reference(arch, wiring, world)
            for rank in range(world):
                torch.testing.assert_close(ranks[rank][arch, i][0], logits[rank], rtol=1e-5, atol=1e-6)
            sharded = ranks[0][arch, i][1]
            for name, grad in grads.items():
                if ".experts." in name:
                    mine = _fused(sharded, name, ARCHS[arch.partition("+")[0]].blocks.prescaled)
                else:
                    router = name.replace(".gate.weight", ".router.gate.weight")
                    router = router.replace(".router.weight", ".router.gate.weight")
                    mine = sharded[router if router in sharded else _shared_name(name)]
                torch.testing.assert_close(mine, grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{arch} {name}: {m}")  # noqa: B023


def _shared_name(name: str) -> str:
    return name.replace("shared_expert.", "shared_experts.").replace("shared_expert_gate", "shared_experts_gate")


def _fp32_router(rank: int) -> list[torch.Tensor]:
    """What transformers computes for a router in fp32, and AutoEP, before and after its weight is rounded to bf16."""
    model = tiny.model("deepseek_v2").bfloat16()
    gate = model.model.layers[1].mlp.gate
    gate.weight.data = gate.weight.data.float()
    rows = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected = torch.nn.functional.linear(rows.float(), gate.weight)
    shard_experts(model, arch_of(model.config), 1)
    router = model.model.layers[1].mlp.router
    found = router.gate(rows)
    return [expected, found, router.bfloat16().gate(rows)]


def test_a_router_in_fp32_beside_bf16_stays_exact():
    for expected, *found in in_group(1, _fp32_router):
        assert all(torch.equal(one, expected) for one in found)


def test_what_cannot_be_expert_parallel_says_why():
    with pytest.raises(ConfigError, match="expert biases"):
        expert_parallel_config(ARCHS["gpt_oss"], 2)
    with pytest.raises(ConfigError, match="no experts"):
        expert_parallel_config(ARCHS["llama"], 2)
