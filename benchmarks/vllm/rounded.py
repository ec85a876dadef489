"""A model in transformers that rounds as vLLM does: the slow reference for quantised all-reduces, fp8 and int8.

The last product of a sub-block is linear in its weight. What a rank adds to a sum is therefore the output of the whole
sub-block with zeros in place of the other ranks' part of that weight. Each rank's addend is encoded and decoded by
torch, and the results are added in float32 in the order of the ranks (``fcsd.parallel.all_reduce.quantised``).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn, zeros_like

from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.models.build import arch_of, decoder_layers, wiring_of
from fcsd.models.quantised.decode import quantised_weights
from fcsd.models.quantised.method import read_method
from fcsd.models.quantised.values import dequantise
from fcsd.models.schedule import Step, kind_of, layer_plans
from fcsd.models.wiring import Parts, mixer, mlp_of, shared_of
from fcsd.models.wiring_block import Blocks


def round_sums(model: Any, format: Format, ranks: int, experts: bool) -> None:
    """Let a converted model on the CPU round the sums that the plugin lets travel, in place.

    Args:
        model: in float32, in evaluation.
        format: of the values that are sent.
        ranks: the tensor-parallel degree.
        experts: whether a rank has whole experts.

    Raises:
        ValueError: the plugin would let a sum travel that this reference does not make.
    """
    blocks, layers = arch_of(model.config).blocks, decoder_layers(model)
    taken = [layer.fcsd.parts(layer) if hasattr(layer, "fcsd") else None for layer in layers]
    kinds = ["dense" if parts is None else kind_of(parts) for parts in taken]  # of layers that are not converted: any
    plans = layer_plans(wiring_of(model.config), kinds, range(len(layers)), blocks=blocks)
    model.config.use_cache = False  # an attention is called once for each rank
    for i, plan in plans.items():
        last = plan.steps[-1]
        alone = kinds[i] == "dense" if last.call == "mlp" else not last.joins
        if taken[i] is None or (last.then == "start" and not alone):
            raise ValueError(f"no reference rounds the sums of layer {i}: {plan.steps}")
        steps = {"shared" if step.call == "mlp" else step.call: step for step in plan.steps}
        weights = _weights(blocks, layers[i], experts)
        made = partial(_parts, layers[i].fcsd.parts, steps, weights, format, ranks)
        layers[i].fcsd = replace(layers[i].fcsd, parts=made)


def round_to_fp8(model: Any) -> None:
    """Let a model round the matrices of its layers, and what reaches them, to fp8 (e4m3) with one scale each, in place.

    An expert's matrices have scales of their own. Routers, the embedding and the output head stay as they are. The
    inner values of experts are not rounded, and vLLM has more scales, so this tells the size of the error alone.
    """
    for name, module in model.named_modules():
        own = [weight for weight in module.parameters(recurse=False) if weight.ndim > 1]
        if not own or isinstance(module, nn.Embedding) or name.endswith(("lm_head", "mlp.gate", "router")):
            continue
        for weight in own:
            weight.data = torch.stack([_in_fp8(x) for x in weight.data]) if weight.ndim > 2 else _in_fp8(weight.data)
        module.register_forward_pre_hook(lambda module, given: (_in_fp8(given[0]), *given[1:]))


def round_inputs(model: Any, dtype: torch.dtype) -> None:
    """Let the linear layers inside of a model's layers, and its experts, round what they read, in place.

    Every row has a scale of its own (*dynamic*, by *token*).

    Args:
        dtype: what they round to, ``torch.float8_e4m3fn`` or ``torch.int8``.
    """
    rounded = partial(_in_rows, dtype=dtype)
    for name, module in model.named_modules():
        if ".layers." in name and isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda module, given: (rounded(given[0]), *given[1:]))
        elif name.endswith(".experts"):
            module.forward = partial(_experts, module, rounded)


def round_zero_points(model: Any, path: Path, dtype: torch.dtype) -> None:
    """Let the linear layers of a decoded model with zero points round as vLLM's Machete kernels do, in place.

    These add the product of scale and zero point, which is rounded, to that of scale and code. Experts, which Marlin
    kernels compute, stay.

    Args:
        path: the checkpoint, in AWQ and one file.
        dtype: of the products, and of the scales.
    """
    files = load_file(path / "model.safetensors")
    method = read_method(json.loads((path / "config.json").read_text())["quantization_config"], path)
    modules = dict(model.named_modules())
    for weight in quantised_weights(method, files):
        if not isinstance(layer := modules.get(weight.name.removesuffix(".weight")), nn.Linear):
            continue
        stored = {suffix: files[name] for suffix, name in weight.tensors.items()}
        stored["scales"] = stored["scales"].to(dtype).float()
        products = dequantise(weight.scheme, stored | {"qzeros": zeros_like(stored["qzeros"])}, torch.float32)
        offsets = dequantise(weight.scheme, stored | {"qweight": zeros_like(stored["qweight"])}, torch.float32)
        layer.weight.data = products + offsets.to(dtype).float()


def _experts(module: Any, rounded: Callable[[Tensor], Tensor], x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """What stacked experts add up to, one after the other.

    Args:
        module: has the matrices of all experts, ``gate_up_proj`` and ``down_proj``.
        x: ``[tokens, hidden]``.
        chosen: the experts of each token, ``[tokens, top-k]``.
        shares: of their outputs, ``[tokens, top-k]``.
    """
    total = zeros_like(x)
    for expert, (inner, outer) in enumerate(zip(module.gate_up_proj, module.down_proj, strict=True)):
        gate, up = nn.functional.linear(rounded(x), inner).chunk(2, -1)
        found = nn.functional.linear(rounded(module.act_fn(gate) * up), outer)
        total += found * (shares * (chosen == expert)).sum(-1, keepdim=True).to(x.dtype)
    return total


def _in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype).max
    scales = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    codes = x.float() / scales
    codes = codes.to(dtype) if dtype.is_floating_point else codes.round()
    return (codes.float() * scales).to(x.dtype)


def _in_fp8(x: Tensor) -> Tensor:
    scale = x.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _weights(blocks: Blocks, layer: Any, experts: bool) -> dict[str, tuple[nn.Parameter, int]]:
    """The weight of the last product of each part of a layer, and the dimension that ranks divide."""
    mlp = mlp_of(blocks, layer)
    found = {"attn": (mixer(blocks, layer).o_proj.weight, 1)}
    if not hasattr(mlp, "experts"):
        return found | {"shared": (mlp.down_proj.weight, 1)}
    if (shared := shared_of(blocks, layer)) is not None:
        found["shared"] = (shared.down_proj.weight, 1)
    return found | {"routed": (mlp.experts.down_proj, 0 if experts else 2)}


def _parts(
    parts_of: Callable[[Any], Parts],
    steps: dict[str, Step],
    weights: dict[str, tuple[nn.Parameter, int]],
    format: Format,
    ranks: int,
    layer: Any,
) -> Parts:
    collected: list[Tensor] = []

    def run(name: str, x: Tensor, **kwargs: Any) -> Tensor:
        if name not in steps or steps[name].then not in ("collect", "start"):  # a sum of vLLM's own
            return getattr(parts_of(layer), name)(x, **kwargs)
        addends = []
        for rank in range(ranks):
            with _share(*weights[name], rank, ranks):
                addends.append(getattr(parts_of(layer), name)(x, **kwargs))
        if steps[name].then == "collect":
            collected.extend(addends)
            return sum(addends[1:], addends[0])
        before = collected if steps[name].joins else [zeros_like(x) for x in addends]
        total = sum(_rounded(own + x, format) for own, x in zip(before, addends, strict=True))
        return total - sum(before[1:], before[0])  # every read that includes one of the two includes both

    whole = parts_of(layer)
    return Parts(*(None if getattr(whole, name) is None else partial(run, name) for name in Parts._fields))


def _rounded(x: Tensor, format: Format) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return decode(encode(rows, format), format, rows.shape[1], rows.dtype).view(x.shape)


@contextmanager
def _share(weight: nn.Parameter, dim: int, rank: int, ranks: int) -> Iterator[None]:
    """Zeros in place of what the other ranks have of a weight."""
    whole, size = weight.data, weight.shape[dim] // ranks
    weight.data = zeros_like(whole)
    weight.data.narrow(dim, rank * size, size).copy_(whole.narrow(dim, rank * size, size))
    try:
        yield
    finally:
        weight.data = whole
