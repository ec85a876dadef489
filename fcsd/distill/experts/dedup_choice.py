"""Chooses the deduplication of each layer of the student once in a run (``parallel.dedup: auto``).

In the first step every layer uses the most levels that are possible. At its end the ranks count the rows that this
step's routing sends over each kind of link. ``fcsd.parallel.cost`` and the machine file turn them into the time that
each value of ``parallel.dedup`` would expose, and rank 0 decides. Checkpoints hold the choice, so that a resumed run
has the same one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fcsd.config import Recipe
from fcsd.disk import write_json
from fcsd.distill.experts.routing_record import RoutingRecord
from fcsd.launch.world import World
from fcsd.models.build import arch_of, decoder_layers, wiring_of
from fcsd.parallel.cost import Dedup, Sent
from fcsd.parallel.expert.autoep import expert_block
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.choice import Option, options, rows_by_link, told
from fcsd.parallel.expert.hierarchical import ByLayer
from fcsd.parallel.machine import read_machine
from fcsd.plan import plan_run
from fcsd.plan.cluster import covers_in_step
from fcsd.plan.deduplication import reason, rows_of, to_json
from fcsd.plan.setup import present

FILE = "dedup.json"


class DedupChoice:
    """The choice of a run. Every rank has one, and all have the same state.

    Args:
        run: the run directory, in which rank 0 writes ``dedup.json``.
        world: the processes, on their devices.
        hosts: the same processes, in a group whose collectives do not involve a device.
        model: the student.
        dispatcher: what the student's layers use; anything but a ``ByLayer`` leaves nothing to choose.
        progress: the progress of the run.
        say: prints a line on rank 0.
    """

    def __init__(
        self,
        run: Path,
        recipe: Recipe,
        world: World,
        hosts: World,
        model: Any,
        dispatcher: Any,
        progress: dict[str, Any],
        say: Callable[[str], None],
    ) -> None:
        self._file, self._recipe, self._world, self._hosts, self._say = run / FILE, recipe, world, hosts, say
        self._model, self._dispatcher = model, dispatcher if isinstance(dispatcher, ByLayer) else None
        self._blocks: dict[int, ExpertBlock] = {}
        if self._dispatcher is None:
            return
        assert recipe.parallel.machine is not None, "the recipe's checks require a machine file"
        self._links = read_machine(Path(recipe.parallel.machine)).links
        self._dispatcher.chosen = {int(layer): dedup for layer, dedup in progress.get("dedup", {}).items()}
        if not self._dispatcher.chosen:
            mlp = arch_of(model.config).blocks.mlp
            found = {k: expert_block(layer.get_submodule(mlp)) for k, layer in enumerate(decoder_layers(model))}
            self._blocks = {k: block for k, block in found.items() if block is not None and block.top_k > 1}
        self._record = RoutingRecord({k: block.router for k, block in self._blocks.items()})

    @contextmanager
    def step(self) -> Iterator[None]:
        """A block that takes a step. At the end of the first one the choice is made."""
        if not self._blocks:
            yield
            return
        with self._record.on(self._blocks) as chosen:
            yield
        self._choose(chosen)
        self._blocks = {}

    def progress(self) -> dict[str, Any]:
        """What a checkpoint stores for the next object of this class."""
        chosen = {} if self._dispatcher is None else self._dispatcher.chosen
        return {"dedup": {str(layer): dedup for layer, dedup in chosen.items()}} if chosen else {}

    def _choose(self, chosen: dict[int, list[Tensor]]) -> None:
        assert self._dispatcher is not None
        offered = self._dispatcher.offered

        def own() -> dict[int, list[int]]:
            counts = {}
            for layer, parts in chosen.items():
                placement = self._blocks[layer].placement
                positions = placement.positions(torch.cat(parts).long())
                counts[layer] = told(positions, placement.experts, offered).tolist()
            return counts

        everyone = self._hosts.everywhere(own)
        micro_batches = len(next(iter(chosen.values())))
        decided = self._hosts.on_first(lambda: self._decide(everyone, micro_batches))
        self._dispatcher.chosen = {layer: found[0].dedup for layer, found in decided.items()}

        def report() -> None:
            write_json(self._file, {f"layer {layer}": to_json(found) for layer, found in decided.items()})
            for line in summary(decided):
                self._say(line)

        self._hosts.on_first(report)

    def _decide(self, everyone: list[dict[int, list[int]]], micro_batches: int) -> dict[int, list[Option]]:
        """The options of each layer, the best one first; ``everyone`` holds the counts of each rank, by layer."""
        parallel, links = self._recipe.parallel, self._links
        assert self._dispatcher is not None
        offered = self._dispatcher.offered
        planned = plan_run(self._recipe, present(self._world.size))
        rows, wiring = rows_of(planned.numbers, planned.setup, parallel.quantised), wiring_of(self._model.config)
        decided = {}
        for layer in self._blocks:
            most: dict[Dedup, tuple[int, int]] = dict.fromkeys(offered, (0, 0))
            for first in range(0, len(everyone), parallel.ep_size):  # each group that divides the experts
                group = torch.tensor([of[layer] for of in everyone[first : first + parallel.ep_size]])
                for dedup, counted in rows_by_link(group, offered, links.per_node).items():
                    most[dedup] = max(most[dedup][0], counted[0]), max(most[dedup][1], counted[1])
            sent: dict[Dedup, Sent] = {}
            for dedup, (near, far) in most.items():
                inside = rows.exact if dedup == "node" else rows.wire  # only rows between nodes are rounded under node
                sent[dedup] = Sent(near * inside / micro_batches, far * rows.wire / micro_batches)
            covered = parallel.overlap == "on" and wiring.name != "standard" and layer in wiring.layers
            numbers = planned.numbers.layers[layer]
            covers = covers_in_step(planned.numbers, numbers, planned.setup, links, covered)
            decided[layer] = options(sent, rows, links, covers)
        return decided


def summary(decided: dict[int, list[Option]]) -> list[str]:
    """A line for each value that was chosen: how many layers have it, and the reason in the first of them."""
    lines = []
    for dedup in dict.fromkeys(found[0].dedup for found in decided.values()):
        layers = [layer for layer, found in decided.items() if found[0].dedup == dedup]
        why = reason(decided[layers[0]])
        lines.append(f"parallel.dedup auto: {len(layers)} of {len(decided)} layers use {why} in layer {layers[0]}")
    return lines
