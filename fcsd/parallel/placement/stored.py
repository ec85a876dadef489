"""Reads from the ``placement.json`` of a training run which rank holds which experts of each layer (HierMoE §IV).

The file lists the experts of each process of the run. What counts here is their order: as many ranks as the run had
hold the same experts as its processes, and with half as many ranks two neighbouring processes share one.
"""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

from fcsd.disk import read_input
from fcsd.errors import BadInputError, ConfigError
from fcsd.parallel.placement.placement import Placement

FILE = "placement.json"
LAYERS = "experts of each rank"  # the key of the file that holds them, by the path of the layer's MoE block
Orders = Mapping[str, tuple[int, ...]]  # the numbers of a layer's experts in the order of their places, by that path


def read_orders(path: Path) -> Orders:
    """Reads the order of the experts of every MoE block.

    Raises:
        BadInputError: the file cannot be read, or is not a placement of a run.
    """
    try:
        layers = json.loads(read_input(path))[LAYERS]
        found = {block: tuple(chain.from_iterable(by_rank)) for block, by_rank in layers.items()}
        numbers = all(type(number) is int for order in found.values() for number in order)
        if not numbers or not all(order and sorted(order) == list(range(len(order))) for order in found.values()):
            raise ValueError("a layer does not list each of its experts once")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(
            f"{path} is not the placement of a run: {error}",
            hint=f"a run with parallel.placement.every writes {FILE} into its directory",
        ) from error
    return found


def placements_of(orders: Orders, blocks: Mapping[str, int], ranks: int) -> dict[str, Placement]:
    """The placement of every MoE block of a model among ``ranks`` ranks.

    Args:
        orders: of ``read_orders``; empty for the order of numbers.
        blocks: how many experts each MoE block has, by its path.

    Raises:
        ConfigError: the orders are those of another model.
    """
    if not orders:
        return {path: Placement(experts, ranks) for path, experts in blocks.items()}
    placed = {path: len(order) for path, order in orders.items()}
    if placed != blocks:
        different = sorted(path for path in placed.keys() | blocks.keys() if placed.get(path) != blocks.get(path))
        raise ConfigError(
            f"the placement does not fit the model: {different[0]} has {blocks.get(different[0], 0)} experts in the "
            f"model and {placed.get(different[0], 0)} in the placement",
            hint="take the placement of the run that trained this model",
        )
    return {path: Placement(experts, ranks, orders[path]) for path, experts in blocks.items()}
