"""Makes a mixture of experts of a dense model by dividing the neurons of its MLPs. No weight is trained here.

    python -m studies.real experts DENSE OUT --experts E --active K --shared S --text NAME=DIR [--text NAME=DIR]
        [--split clustered|random] [--router fitted|gate-rows] [--spread 0.02] [--seed 0]
    python -m studies.real experts DENSE OUT.json --compare --text NAME=DIR [--text NAME=DIR]

OUT becomes an ordinary directory of the family qwen2_moe, whose biases are zero. DENSE is a llama without biases. Of
the neurons of each MLP, ``S`` become the shared expert and the others ``E`` routed experts of one size, ``K`` of which
a token uses. Every neuron is in exactly one of them, so with ``K = E`` the model computes what DENSE computes, up to
rounding.

**The scale of the sum.** The router's weights of a token sum to 1 (``norm_topk_prob``) and the shared expert's gate is
zero, which makes its weight 1/2. The routed ``down_proj`` are therefore multiplied by ``K`` and the shared one by 2:
where the router has no preference, each active neuron has the weight that it has in DENSE, and the others are left
out. Nothing stands in for them. Powers of two are exact in every float format.

**The split** reads the activations on the text. The importance of neuron i for a token is ``|a_i| * norm(down_i)``,
where ``a`` is what ``down_proj`` multiplies, over its mean for the token. The neurons that most often are among those
of the highest importance, as many as a token will use, are shared. The others are grouped by their importance over the
tokens: balanced k-means on the sphere.

**The router** is linear. ``fitted`` is the least squares fit of the norms of the experts' outputs, over their mean for
the token. ``gate-rows`` is the mean of the rows of an expert's ``gate_proj``. Both are scaled so that the logits have
the standard deviation ``--spread`` over the tokens and experts: small, because every chosen expert should have the
same weight.

``--compare`` writes the divergence of untrained models from DENSE on held-out text, for several choices.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.programs import TEXTS
from safetensors.torch import load_file, save_file
from studies.real.runner import machine, measure, token_rows
from torch import Tensor
from torch.nn import functional

from fcsd.bench import runner
from fcsd.checkpoint import read_config, read_layout
from fcsd.checkpoint.staging import copy_small, side_files, staged
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.build import load_model

DENSE_ONLY = {"mlp_bias", "attention_bias", "pretraining_tp", "_name_or_path", "transformers_version"}
CALIBRATION = 4096  # tokens, divided among the texts
RIDGE = 1e-3  # of the mean of the squared inputs
ROUNDS = 12  # of k-means
COMPARED: list[dict[str, Any]] = [
    {"experts": 8, "active": 8, "shared": 512},
    {"experts": 8, "active": 4, "shared": 512},
    {"experts": 8, "active": 4, "shared": 512, "split": "random"},
    {"experts": 8, "active": 2, "shared": 512},
    {"experts": 8, "active": 4, "shared": 512, "router": "gate-rows"},
    {"experts": 8, "active": 4, "shared": 512, "spread": 0.25},
    {"experts": 16, "active": 8, "shared": 512},
    {"experts": 10, "active": 6, "shared": 256},  # as many neurons in use, of which more or fewer are shared
    {"experts": 6, "active": 2, "shared": 768},
]


CHOICE = {"experts": 8, "active": 4, "shared": 512, "split": "clustered", "router": "fitted", "spread": 0.02, "seed": 0}
ARGUMENTS = {
    "dense": Path,
    "out": Path,
    "--text": TEXTS | {"required": True},
    **{f"--{name}": default for name, default in CHOICE.items()},
    "--split": dict(choices=("clustered", "random"), default=CHOICE["split"]),
    "--router": dict(choices=("fitted", "gate-rows"), default=CHOICE["router"]),
    "--compare": dict(action="store_true"),
    "--rows": dict(type=int, default=4, help="held-out rows of each text that --compare measures on"),
}


def main(given: argparse.Namespace) -> None:
    """Write a directory, or the comparison of several."""
    texts = dict(given.text)
    inputs = list(mlp_inputs(given.dense, texts))
    choice = {name: getattr(given, name) for name in CHOICE}
    if not given.compare:
        write(given.dense, given.out, inputs, **choice)
        return
    found: dict[str, Any] = {
        "command": given.command,
        **machine(),
        "neurons": read_config(given.dense).raw["intermediate_size"],
        "calibration_tokens": len(inputs[0]),
        "models": [],
    }
    for case in COMPARED:
        with tempfile.TemporaryDirectory() as folder:
            write(given.dense, Path(folder) / "model", inputs, **{**choice, **case})
            kl = measure(Path(folder) / "model", given.dense, texts, given.rows)
        found["models"].append({**choice, **case, "kl": kl})
        print(json.dumps(found["models"][-1]), flush=True)
        runner.write(found, given.out)


def mlp_inputs(dense: Path, texts: dict[str, Path]) -> Iterator[Tensor]:
    """What the MLP of each layer reads on ``CALIBRATION`` tokens of the texts' training parts, ``[tokens, hidden]``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(dense, dtype=torch.float32, device=device)
    found: list[list[Tensor]] = []
    for layer in model.get_decoder().layers:
        kept: list[Tensor] = []
        found.append(kept)
        layer.mlp.register_forward_pre_hook(lambda _, arguments, kept=kept: kept.append(arguments[0].flatten(0, 1)))
    for folder in texts.values():
        for row in token_rows(folder / "train", CALIBRATION // len(texts)):
            with torch.inference_mode():
                model(row[None].to(device), use_cache=False)
    return (torch.cat(kept).clone() for kept in found)


def write(
    dense: Path,
    out: Path,
    inputs: list[Tensor],
    *,
    experts: int,
    active: int,
    shared: int,
    split: str = "clustered",
    router: str = "fitted",
    spread: float = 0.02,
    seed: int = 0,
) -> None:
    """Write the mixture of experts that this module describes.

    Args:
        inputs: what the MLP of each layer reads, ``[tokens, hidden]``.

    Raises:
        BadInputError: DENSE is no llama without biases.
        ConfigError: the neurons cannot be divided so.
    """
    raw = read_config(dense).raw
    size, rest = raw.get("intermediate_size", 0), raw.get("intermediate_size", 0) - shared
    if raw["model_type"] != "llama" or raw.get("attention_bias") or raw.get("mlp_bias"):
        raise BadInputError(f"{dense}: is no llama without biases", "No other model was divided into experts.")
    if not 0 < active <= experts or not 0 < shared < size or rest % experts:
        raise ConfigError(
            f"{size} neurons do not make {shared} shared ones and {experts} experts with {active} active ones",
            "Choose --shared so that --experts divides the others.",
        )
    weights = {name: t for shard in read_layout(dense).shards for name, t in load_file(dense / shard).items()}
    random = torch.Generator().manual_seed(seed)
    for number, read in enumerate(inputs):
        place = f"model.layers.{number}.mlp"
        gate, up, down = (weights.pop(f"{place}.{part}_proj.weight") for part in ("gate", "up", "down"))
        acts = functional.silu(read @ gate.float().T.to(read)) * (read @ up.float().T.to(read))
        important = acts.abs() * down.float().norm(dim=0).to(read)
        important /= important.mean(1, keepdim=True)  # a few tokens have activations that are far larger
        if split == "random":
            order = torch.randperm(size, generator=random)
            common, groups = order[:shared], list(order[shared:].chunk(experts))
        else:
            common, groups = grouped(important, experts, shared, shared + rest * active // experts, random)
        parts = {f"experts.{e}": (group, active) for e, group in enumerate(groups)} | {"shared_expert": (common, 2)}
        for name, (neurons, times) in parts.items():
            neurons = neurons.sort().values.cpu()
            weights[f"{place}.{name}.gate_proj.weight"] = gate[neurons].contiguous()
            weights[f"{place}.{name}.up_proj.weight"] = up[neurons].contiguous()
            weights[f"{place}.{name}.down_proj.weight"] = (down[:, neurons] * times).contiguous()
        if active == experts:
            logits = torch.zeros(experts, read.shape[1])
        elif router == "fitted":
            outputs = [(acts[:, group] @ down[:, group.cpu()].float().T.to(read)).norm(dim=1) for group in groups]
            logits = fitted(read, torch.stack(outputs, 1), spread)
        else:
            logits = scaled(torch.stack([gate[group.cpu()].float().mean(0) for group in groups]).to(read), read, spread)
        weights[f"{place}.gate.weight"] = logits.to(gate)
        weights[f"{place}.shared_expert_gate.weight"] = torch.zeros_like(gate[:1])
        for part in "qkv":  # vLLM's class has the biases whatever the config says
            projection = f"model.layers.{number}.self_attn.{part}_proj"
            weights[f"{projection}.bias"] = torch.zeros_like(weights[f"{projection}.weight"][:, 0])
    config = {
        **{key: value for key, value in raw.items() if key not in DENSE_ONLY},
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "qkv_bias": True,
        "num_experts": experts,
        "num_experts_per_tok": active,
        "norm_topk_prob": True,
        "moe_intermediate_size": rest // experts,
        "shared_expert_intermediate_size": shared,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "router_aux_loss_coef": 0.0,
    }
    with staged(out) as folder:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "README.md").write_text(
            f"A dense model whose MLPs of {size} neurons were divided into a shared expert of {shared} and {experts} "
            f"routed experts of {rest // experts} neurons, of which {active} are active, by `studies/real/experts.py`. "
            "It was not trained as a mixture of experts.\n"
        )
        written = {"config.json", "README.md", "model.safetensors.index.json"}
        copy_small(side_files(dense, written), folder)


def grouped(
    important: Tensor, experts: int, shared: int, used: int, random: torch.Generator
) -> tuple[Tensor, list[Tensor]]:
    """The shared neurons, and those of each expert.

    Args:
        important: the importance of each neuron for each token, ``[tokens, neurons]``.
        used: how many neurons a token uses.
    """
    top = important.topk(used, dim=1).indices
    often = torch.bincount(top.flatten(), minlength=important.shape[1])
    order = often.argsort(descending=True, stable=True)
    common, others = order[:shared], order[shared:]
    points = functional.normalize(important.T[others], dim=1)
    centres = points[torch.randperm(len(points), generator=random)[:experts].to(points.device)]
    groups: list[Tensor] = []
    for _ in range(ROUNDS):
        chosen = balanced(points @ centres.T)
        groups = [(chosen == e).nonzero().flatten() for e in range(experts)]
        centres = functional.normalize(torch.stack([points[group].mean(0) for group in groups]), dim=1)
    return common, [others[group] for group in groups]


def balanced(near: Tensor) -> Tensor:
    """The group of each point: the nearest pairs first, as long as a group has room for its share.

    Args:
        near: the similarity of each point with each group, ``[points, groups]``.
    """
    points, groups = near.shape
    room, chosen = [points // groups] * groups, [-1] * points
    for pair in near.flatten().argsort(descending=True, stable=True).tolist():
        point, group = divmod(pair, groups)
        if chosen[point] < 0 and room[group]:
            chosen[point], room[group] = group, room[group] - 1
    return torch.tensor(chosen, device=near.device)


def fitted(read: Tensor, outputs: Tensor, spread: float) -> Tensor:
    """The router ``[experts, hidden]`` that predicts the norms ``[tokens, experts]`` of the experts' outputs best."""
    wanted = outputs / outputs.mean(1, keepdim=True) - 1
    square = (read.T @ read).double()
    square += RIDGE * square.diagonal().mean() * torch.eye(len(square), dtype=torch.double, device=square.device)
    found = torch.linalg.solve(square, (read.T @ wanted).double())
    return scaled(found.T.float().contiguous(), read, spread)


def scaled(router: Tensor, read: Tensor, spread: float) -> Tensor:
    """The router, scaled so that its logits have the standard deviation ``spread`` around the mean of each token."""
    logits = read @ router.T
    return router * (spread / (logits - logits.mean(1, keepdim=True)).std())
