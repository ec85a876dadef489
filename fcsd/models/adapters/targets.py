"""Chooses by name the linear layers that have adapters, and the parts whose own weights train, with adapters or alone.

The names are those of transformers' module tree. A model whose experts are divided has other modules in their place;
its caller knows what they stand for. The model may be on the meta device.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ...errors import ConfigError
from ..build import arch_of, decoder_layers, decoder_of, wiring_of
from ..selection import select_layers
from ..wiring import DESYNC, Wiring, mixer, mlp_of, plan_layers, shared_of
from . import GROUPS

CONVERTED = "converted"
PARTS = ("norms", "routers", "embeddings", "head")
_LAYERS = re.compile(r"all|none|(first|last):\d+%?|\d.*")
_LAST_SHARE = re.compile(r"last:(\d+%)")


@dataclass(frozen=True)
class Chosen:
    """What trains in a model beside frozen weights, by the names that its tensors have in transformers.

    Attributes:
        adapted: the paths of the linear layers that have an adapter, in the order of the model.
        trained: the names of the parameters that train themselves.
    """

    adapted: tuple[str, ...]
    trained: tuple[str, ...]


def choose(
    model: PreTrainedModel,
    targets: Sequence[str],
    parts: Sequence[str],
    layers: str = "all",
    wiring: Wiring | None = None,
) -> Chosen:
    """What trains in a model. A layer whose own weight trains has no adapter.

    Args:
        model: a model whose experts are not divided.
        targets: the words of ``train.adapter.targets``.
        parts: the words of ``optim.train``.
        layers: ``train.adapter.layers``.
        wiring: the wiring of the student, if it is not that of the model's config.

    Raises:
        ConfigError: a word names nothing in this model, the embeddings and the output head are one weight and only one
            of them is named, nothing is left to adapt, or the wiring is Desync.
    """
    wiring = wiring or wiring_of(model.config)
    if wiring.name in DESYNC:
        raise ConfigError(
            f"train.adapter cannot be combined with the wiring {wiring.name}, whose ranks share the weights of a layer",
            hint="remove train.adapter; optim.train: [converted] trains the layers themselves",
        )
    trained = tuple(_trained(model, parts, wiring, routed=False))
    own = {name.rpartition(".")[0] for name in trained if name.endswith(".weight")}
    inside = _chosen_layers(layers, model, wiring)
    adapted = tuple(path for path in _adapted(model, targets) if path not in own and path.startswith(inside))
    if not adapted:
        if layers != "all":
            hint = "Change train.adapter.layers or train.adapter.targets."
            raise ConfigError(f"train.adapter.layers {layers}: nothing there is left to adapt", hint)
        raise ConfigError("optim.train trains every layer that train.adapter.targets names", "Remove train.adapter.")
    return Chosen(adapted, trained)


def choose_parts(model: PreTrainedModel, parts: Sequence[str], wiring: Wiring | None = None) -> Chosen:
    """What trains in a model without adapters: the parts that ``optim.train`` names, with their routed experts.

    Raises:
        ConfigError: a word names nothing in this model, or the embeddings and the output head are one weight and only
            one of them is named.
    """
    wiring = wiring or wiring_of(model.config)
    return Chosen((), tuple(_trained(model, parts, wiring, routed=True)))


def shared_prefix(model: PreTrainedModel, chosen: Chosen, wiring: Wiring | None = None) -> tuple[int, int]:
    """How many of the first decoder layers are frozen, and how many of these student and teacher have in common.

    Nothing trains in frozen layers or before them. In common are those that the wiring leaves as transformers built
    them; none where later layers may read keys and values of earlier ones (``Blocks.cuts``), or where the student draws
    experts at random.

    Args:
        wiring: the wiring of the student, if it is not that of the model's config.
    """
    arch, layers = arch_of(model.config), decoder_layers(model)
    paths = {module: f"{path}." for path, module in model.named_modules()}
    after = paths[getattr(decoder_of(model), arch.final_norm)], paths[model.get_output_embeddings()]
    inside = [(number, paths[layer]) for number, layer in enumerate(layers)]
    first = [
        next((number for number, path in inside if name.startswith(path)), 0)
        for name in (*chosen.adapted, *chosen.trained)
        if not name.startswith(after)
    ]
    frozen = min([len(layers), *first])
    wiring = wiring or wiring_of(model.config)
    # Desync changes no layer but those that it names.
    changed = wiring.layers if wiring.name in DESYNC else plan_layers(wiring, len(layers), arch.blocks)
    return frozen, 0 if arch.blocks.cuts or arch.draws else min([frozen, *changed])


def _chosen_layers(spec: str, model: PreTrainedModel, wiring: Wiring) -> tuple[str, ...]:
    """The paths of the layers that ``train.adapter.layers`` names, each with a dot at its end."""
    layers = decoder_layers(model)
    numbers = _converted("train.adapter.layers", wiring) if spec == CONVERTED else select_layers(spec, len(layers))
    paths = {module: path for path, module in model.named_modules()}
    return tuple(f"{paths[layers[number]]}." for number in numbers)


def _converted(setting: str, wiring: Wiring) -> tuple[int, ...]:
    if not wiring.layers:
        raise ConfigError(
            f"{setting}: no layer of this model is converted", hint="Convert it, set init.wiring, or name layers."
        )
    return wiring.layers


def _adapted(model: PreTrainedModel, targets: Sequence[str]) -> Iterator[str]:
    found = list(_linear_layers(model))
    groups = {group for _, _, group, _ in found}
    names = {word for _, inside, _, _ in found for word in _ends(inside)}
    for word in targets:
        if word in GROUPS:
            # The default names all groups, and not every model has all of them.
            if word not in groups and set(targets) != set(GROUPS):
                have = ", ".join(sorted(groups))
                raise ConfigError(f"train.adapter.targets: this model has no {word}; it has {have}")
        elif word not in names:
            raise ConfigError(f"train.adapter.targets: this model has no linear layer {word!r}", _meant(word, names))
    for path, inside, group, direct in found:
        if (group in targets and direct) or not set(targets).isdisjoint(_ends(inside)):
            yield path


def _linear_layers(model: PreTrainedModel) -> Iterator[tuple[str, str, str, bool]]:
    """The linear layers that can be adapted: the path, the path inside of the layer, the group, and whether it stands
    directly in its block. Layers deeper inside, such as those that choose keys, are adapted only if they are named."""
    blocks = arch_of(model.config).blocks
    paths = {module: path for path, module in model.named_modules()}
    for layer in decoder_layers(model):
        mlp = mlp_of(blocks, layer)
        inside: list[tuple[str, Any]] = [("attention", mixer(blocks, layer))]
        if not any(name == "experts" for name, _ in mlp.named_children()):
            inside.append(("mlp", mlp))
        elif (shared := shared_of(blocks, layer)) is not None:
            inside.append(("shared_experts", shared))
        for group, block in inside:
            for name, module in block.named_modules():
                if isinstance(module, nn.Linear):
                    path = paths[module]
                    yield path, path.removeprefix(f"{paths[layer]}."), group, "." not in name


def _trained(model: PreTrainedModel, parts: Sequence[str], wiring: Wiring, *, routed: bool) -> Iterator[str]:
    """The names of the parameters in ``parts``; ``routed`` says whether routed experts among them train."""
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    if inputs.weight is outputs.weight and ("embeddings" in parts) != ("head" in parts):
        raise ConfigError(
            "this model's embeddings and output head are one weight", hint="name both in optim.train, or neither"
        )
    blocks, layers = arch_of(model.config).blocks, decoder_layers(model)
    inside = [list(layer.named_modules())[1:] for layer in layers]
    experts = _of(module for of in inside for path, module in of if path.rpartition(".")[2] == "experts")
    left_out: set[nn.Parameter] = set() if routed else experts
    chosen: set[nn.Parameter] = set()
    for word in parts:
        if word in ("embeddings", "head"):
            found = {(inputs if word == "embeddings" else outputs).weight}
        elif word == "norms":
            found = _of(module for module in decoder_of(model).modules() if "norm" in type(module).__name__.lower())
        elif word == "routers":
            found = _of(module for of in inside for path, module in of if path == f"{blocks.mlp}.{blocks.router}")
        elif word == CONVERTED:
            found = _of(layers[number] for number in _converted("optim.train", wiring))
        elif _LAYERS.fullmatch(word):
            share = _LAST_SHARE.fullmatch(word)
            found = _of(layers[number] for number in select_layers(share[1] if share else word, len(layers)))
        else:
            names = {end for of in inside for path, _ in of for end in _ends(path)}
            if word not in names:
                hint = _meant(word, {*names, *PARTS, CONVERTED})
                raise ConfigError(f"optim.train: this model has no part {word!r}", hint)
            found = _of(module for of in inside for path, module in of if word in _ends(path))
        if not found - left_out:
            raise ConfigError(f"optim.train: {word!r} names no weight of this model that can train", "Remove it.")
        chosen |= found - left_out
    for name, parameter in model.named_parameters():
        if parameter in chosen:
            yield name


def _of(modules: Iterable[nn.Module]) -> set[nn.Parameter]:
    return {parameter for module in modules for parameter in module.parameters()}


def _ends(path: str) -> list[str]:
    """``b.c``, and then ``c``, of a path ``b.c``."""
    words = path.split(".")
    return [".".join(words[number:]) for number in range(len(words))]


def _meant(word: str, names: set[str]) -> str:
    close = get_close_matches(word, sorted(names), 1, 0.5)
    shown = sorted(name for name in names if "." not in name)
    return f"Did you mean {close[0]!r}?" if close else f"It has {', '.join(shown)}."
