"""Measures what converting each layer of a model alone costs, beside what the layer does to the residual stream.

    python -m studies.real layers MODEL OUT.json [--text FILE] [--wirings ladder,farskip]

Every part of the stream that a read misses turns the direction of what is read, and the norm behind a read lets only
the direction pass. ``turned`` is 1 - cos of the angle between the full stream and the stream without the output before
it: the attention's for the read of the MLP, the previous MLP's for the read of the attention. ``standard`` holds the
dearest layers, dearest first, and the divergence of all layers but the first 0, 1, 2, ... of these, untrained.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from studies.real.runner import machine
from torch import Tensor
from torch.nn import functional

from fcsd.bench import runner
from fcsd.checkpoint import read_config
from fcsd.convert import choose_wiring
from fcsd.distill.layer_costs import calibration_rows, divergences, measure_layers
from fcsd.models.archs import ARCHS
from fcsd.models.build import load_model

FIRST = 8  # queries before this position have few others to look at


ARGUMENTS = {
    "model": Path,
    "out": Path,
    "--text": dict(type=Path, help="a text file to measure on, in place of the model's own text"),
    "--wirings": dict(default="ladder,farskip", help='each may have a variant: "ladder attn-only"'),
}


def main(given: argparse.Namespace) -> None:
    """Measure, and write one JSON file."""
    config = read_config(given.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_model(given.model, dtype="float32", device=device)
    rows = calibration_rows(network, given.model, given.text)
    found: dict[str, Any] = {
        "command": given.command,
        **machine(),
        "dtype": "float32",
        "tokens": sum(row.numel() for row in rows),
        "layers": stream(network, rows, ARCHS[config.model_type].blocks),
    }
    for name in given.wirings.split(","):
        wiring, _, variant = name.partition(" ")
        whole = choose_wiring(config, ARCHS[config.model_type], wiring, "all", variant=variant or None)
        costs = measure_layers(network, whole, rows)
        found |= costs.to_json()
        order = sorted(costs.alone, key=lambda layer: -costs.alone[layer])[: len(costs.alone) // 2]
        sets = [tuple(sorted(costs.alone.keys() - order[:count])) for count in range(len(order) + 1)]
        found[name]["standard"] = {"order": order, "together": divergences(network, whole, rows, sets)}
        for measured in ("attn_turned", "mlp_turned", "first_token", "largest"):
            values = [found["layers"][layer][measured] for layer in costs.alone]
            found[name][f"rank correlation with {measured}"] = float(spearmanr(values, [*costs.alone.values()])[0])
    runner.write(found, given.out)


def stream(network: Any, rows: list[Tensor], blocks: Any) -> list[dict[str, float]]:
    """For each layer, means over all tokens but the first of each row.

    ``attn_turned`` and ``mlp_turned`` as above, ``first_token``: the share of the attention that goes to the first
    token, and ``largest``: the largest value of the layer's input over the median of the absolute values.
    """
    layers = list(network.get_decoder().layers)
    inputs: dict[int, Tensor] = {}
    middles: dict[int, Tensor] = {}
    shares: dict[int, Tensor] = {}
    hooks = []
    for number, layer in enumerate(layers):

        def keep_input(_: Any, arguments: tuple, named: dict, number: int = number) -> None:
            inputs[number] = arguments[0] if arguments else named["hidden_states"]

        def keep_middle(_: Any, arguments: tuple, number: int = number) -> None:
            middles[number] = arguments[0]

        def keep_share(_: Any, __: tuple, output: tuple, number: int = number) -> None:
            shares[number] = output[1][..., FIRST:, 0].mean()

        hooks.append(layer.register_forward_pre_hook(keep_input, with_kwargs=True))
        hooks.append(layer.get_submodule(blocks.mlp_norms[0]).register_forward_pre_hook(keep_middle))
        hooks.append(layer.self_attn.register_forward_hook(keep_share))
    implementation = network.config._attn_implementation
    network.set_attn_implementation("eager")  # which returns the probabilities
    sums = [dict.fromkeys(("attn_turned", "mlp_turned", "first_token", "largest"), 0.0) for _ in layers]
    with torch.inference_mode():
        for row in rows:
            network(row, use_cache=False)
            for number, told in enumerate(sums):
                before = middles[number - 1] if number else inputs[number]
                told["attn_turned"] += _turned(inputs[number], before) / len(rows)
                told["mlp_turned"] += _turned(middles[number], inputs[number]) / len(rows)
                told["first_token"] += float(shares[number]) / len(rows)
                sizes = inputs[number].abs()
                told["largest"] += float(sizes.max() / sizes.median()) / len(rows)
    for hook in hooks:
        hook.remove()
    network.set_attn_implementation(implementation)
    return sums


def _turned(full: Tensor, without: Tensor) -> float:
    """The mean of 1 - cos between two streams ``[1, seq, hidden]``, without the first token."""
    return float((1 - functional.cosine_similarity(full[:, 1:], without[:, 1:], dim=-1)).mean())
