"""Converts the layers of a model group by group while it is trained (progressive conversion).

A layer whose turn has not come yet runs in its standard wiring. Only layers in training mode are staged, so evaluations
compute what the exported model computes: the full conversion. This file is not part of exported checkpoints.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from transformers import PreTrainedModel

from ..errors import ConfigError
from .build import arch_of, decoder_layers, wiring_of
from .selection import layers_text, select_layers
from .wiring import LayerWiring, WiredLayer, hf_parts, plan_layers, wired_class
from .wiring_block import DESYNC, Wiring


@dataclass
class Turn:
    """What one layer reads while it is trained.

    Attributes:
        plan: its plan in the current stage. Compiled code depends on the numbers in the plan, not on the stage, so a
            layer is compiled again only when its own reads change.
    """

    plan: LayerWiring


@dataclass(frozen=True)
class Stages:
    """The stages of a progressive conversion.

    Attributes:
        groups: the layers of each group, in the order of conversion.
        turns: for each rewired layer its turn, and its plans after 0, 1, ... groups have been converted.
    """

    groups: tuple[tuple[int, ...], ...]
    turns: tuple[tuple[Turn, tuple[LayerWiring, ...]], ...]

    def convert(self, number: int) -> None:
        """Let the first ``number`` groups be converted in training, and the others not."""
        for turn, plans in self.turns:
            turn.plan = plans[number]


@dataclass(frozen=True)
class StagedWiring(LayerWiring):
    """What a layer reads in the full conversion, and what it reads while it is trained."""

    turn: Turn


class StagedLayer(WiredLayer):
    """A rewired decoder layer that reads as the stage of the model says while it is trained."""

    fcsd: StagedWiring

    def _plan(self) -> LayerWiring:
        return self.fcsd.turn.plan if self.training else self.fcsd


def conversion_groups(wiring: Wiring, count: int, order: Sequence[str | int] | None) -> tuple[tuple[int, ...], ...]:
    """The groups of layers in the order of their conversion.

    Args:
        wiring: the full conversion.
        count: the number of decoder layers.
        order: a choice of layers for each group, see ``select_layers``; None converts one layer at a time, from the
            last to the first.

    Raises:
        ConfigError: the wiring is Desync or rewires no layer; a group cannot be read or is empty; or the groups are not
            a partition of the rewired layers.
    """
    if wiring.name in DESYNC:
        raise ConfigError(
            f"the wiring {wiring.name} cannot be converted progressively", hint="set train.progressive_share: 0"
        )
    if not wiring.layers or not any(wiring.reads):
        raise ConfigError(
            "the student has no rewired layer, so nothing can be converted progressively",
            hint="set train.progressive_share: 0",
        )
    if order is None:
        return tuple((layer,) for layer in reversed(wiring.layers))
    try:
        groups = tuple(select_layers(str(group), count) for group in order)
    except ConfigError as error:
        raise ConfigError(f"train.progressive_order: {error}", error.hint) from error
    if not all(groups):
        raise ConfigError(f"train.progressive_order: the group {order[groups.index(())]} has no layer")
    named = [layer for group in groups for layer in group]
    if sorted(named) != list(wiring.layers):
        raise ConfigError(
            f"train.progressive_order names the layers {layers_text(sorted(set(named)))}"
            f"{', some of them twice' * (len(set(named)) < len(named))}, but the student's rewired layers are "
            f"{layers_text(wiring.layers)}",
            hint="name every rewired layer in one group",
        )
    return groups


def stage_layers(model: PreTrainedModel, order: Sequence[str | int] | None = None) -> Stages:
    """Let the rewired layers of a model be converted group by group. ``wire`` undoes it.

    Args:
        order: see ``conversion_groups``.

    Returns: the object whose ``convert`` the caller calls before each step; at first all groups are converted.

    Raises:
        ConfigError: see ``conversion_groups``.
    """
    layers: Any = decoder_layers(model)
    wiring = wiring_of(model.config)
    groups = conversion_groups(wiring, len(layers), order)
    parts = partial(hf_parts, arch_of(model.config).blocks)
    done = [tuple(sorted(layer for group in groups[:number] for layer in group)) for number in range(len(groups) + 1)]
    plans = [plan_layers(replace(wiring, layers=converted), len(layers), parts, every=True) for converted in done]
    turns = []
    for i, layer in enumerate(layers):
        if isinstance(layer, WiredLayer):
            full = {field.name: getattr(layer.fcsd, field.name) for field in fields(LayerWiring)}
            turn = Turn(plans[-1][i])
            layer.fcsd = StagedWiring(**full, turn=turn)
            layer.__class__ = wired_class(StagedLayer, layer.unwired)
            turns.append((turn, tuple(_exact(plan[i]) for plan in plans)))
    return Stages(groups, tuple(turns))


def _exact(plan: LayerWiring) -> LayerWiring:
    """The plan, in which a layer that is not rewired and passes on one stream adds its outputs as transformers does.

    A settled part is added to the stream before the routed experts' output, which rounds differently.
    """
    standard = not (plan.attn or plan.mlp) and plan.hands_on == 1
    return replace(plan, settles_shared=False) if standard else plan
