"""Moves experts between the ranks of a run while it trains, so that the busiest ranks get fewer rows (HierMoE §IV).

Every ``parallel.placement.every`` steps the ranks count which experts the tokens of the last step chose. Experts change
places if that saves more time until the next update than the move takes. Weights and the optimizer's states move in
place. Everything that names an expert keeps its number: the router, its scores and biases, and the model files of
checkpoints. Only the optimizer's files are in the order of places, so the manifest of a checkpoint holds the placement.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fcsd.config import Parallel, Recipe
from fcsd.disk import write_json
from fcsd.distill.train_engine import Trained, TrainEngine
from fcsd.experimental.placement.moving import Share, move, plan
from fcsd.experimental.placement.search import Level, Objective, Ranks, greedy
from fcsd.kernels.bit_split import Format
from fcsd.launch.world import World
from fcsd.parallel import order
from fcsd.parallel.expert.autoep import expert_blocks
from fcsd.parallel.expert.block import ExpertBlock
from fcsd.parallel.expert.placement import Placement

FILE = "placement.json"
Orders = dict[str, list[int]]  # the numbers of a layer's experts by position, by the path of its MoE block


class RoutingRecord:
    """The choices of some routers while ``on`` is active.

    Args:
        routers: the routers, by any name; they return scores, experts and counts.
    """

    def __init__(self, routers: Mapping[str, nn.Module]) -> None:
        self._chosen: dict[str, list[Tensor]] | None = None
        for key, router in routers.items():
            router.register_forward_hook(self._recorder(key))

    @contextmanager
    def on(self, keys: Mapping[str, Any]) -> Iterator[dict[str, list[Tensor]]]:
        """Within the block, record the choices of each micro-batch, int16 ``[tokens, top_k]``, for each key."""
        found: dict[str, list[Tensor]] = {key: [] for key in keys}
        self._chosen = found
        try:
            yield found
        finally:
            self._chosen = None

    def _recorder(self, key: str) -> Any:
        def record(router: nn.Module, _: Any, output: Any) -> None:
            # Neither evaluations nor the recompute of activation checkpointing are part of the step.
            if self._chosen is not None and router.training and not order.in_backward():
                self._chosen[key].append(output[1].to(torch.int16))

        return record


class ExpertSwaps:
    """The placement of the student's experts during a run. Every rank has one, and all have the same state.

    Args:
        run: the run directory, in which rank 0 writes ``placement.json``.
        world: the processes, on their devices.
        hosts: the same processes, in a group whose collectives do not involve a device.
        trained: the student and its engine. The student has the placement that ``progress`` names.
    """

    def __init__(
        self, run: Path, recipe: Recipe, world: World, hosts: World, trained: Trained, progress: dict[str, Any]
    ) -> None:
        self._file, self._recipe, self._world, self._hosts, self._trained = run / FILE, recipe, world, hosts, trained
        self._every, self._blocks = recipe.parallel.placement.every, expert_blocks(trained.model)
        self._record = RoutingRecord({path: block.router for path, block in self._blocks.items()})
        self._swaps, self._seconds = progress.get("placement", {}).get("swaps", 0), 0.0
        self._write()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """A block that takes the step with this number, counted from 1. At its end experts may change their places."""
        if number % self._every:
            yield
            return
        with self._record.on(self._blocks) as chosen:
            yield
        self._wait()  # the computation of the step is no part of the search
        begun = time.perf_counter()
        self._update([torch.cat(parts) for parts in chosen.values()])
        self._wait()
        self._seconds += time.perf_counter() - begun

    def metrics(self) -> dict[str, float]:
        """What the metrics of a step contain.

        Returns: ``swaps``, how many pairs of experts have changed places since the start of the run, over all layers;
            and ``swap_seconds``, the time that searches and moves have taken since this process started.
        """
        return {"swaps": self._swaps, "swap_seconds": self._seconds}

    def progress(self) -> dict[str, Any]:
        """What a checkpoint stores for the next object of this class, and for the run that loads its experts so."""
        return {"placement": {"swaps": self._swaps, "layers": self._orders()}}

    def _wait(self) -> None:
        """Waits until the device has computed all that was launched."""
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()

    def _update(self, chosen: list[Tensor]) -> None:
        """Searches better placements for all layers, and moves the experts."""
        settings = self._recipe.parallel.placement
        blocks = list(self._blocks.values())
        before = [block.placement for block in blocks]
        width = self._trained.model.config.get_text_config().hidden_size
        together = Ranks(self._world.rank, self._world.size, self._sum, self._hosts.everywhere)
        objective = objective_of(self._recipe, self._world.size, blocks[0], width)
        after, swaps = greedy(chosen, before, objective, settings.swaps, together)
        for block, old, new in zip(blocks, before, after, strict=True):
            if new != old:
                self._move(block, old, new)
        self._swaps += swaps
        self._write()

    def _move(self, block: ExpertBlock, before: Placement, after: Placement) -> None:
        shares = expert_shares(self._trained.engine, block)
        held = self._hosts.everywhere(lambda: {name: share.interval for name, share in shares.items()})
        sizes = {name: block.experts.get_parameter(name.split()[0])[0].numel() for of in held for name in sorted(of)}
        move(shares, plan(before, after, held, sizes), self._world.rank, self._world.size)
        block.place(after)

    def _sum(self, counts: Tensor) -> Tensor:
        dist.all_reduce(counts)
        return counts

    def _orders(self) -> Orders:
        return {path: list(block.placement.numbers) for path, block in self._blocks.items()}

    def _write(self) -> None:
        """Writes the experts of each rank, layer by layer."""
        slots = {path: block.placement.slots for path, block in self._blocks.items()}
        layers = {
            path: [numbers[first : first + slots[path]] for first in range(0, len(numbers), slots[path])]
            for path, numbers in self._orders().items()
        }
        self._hosts.on_first(lambda: write_json(self._file, {"swaps": self._swaps, "experts of each rank": layers}))


def objective_of(recipe: Recipe, processes: int, block: ExpertBlock, width: int) -> Objective:
    """What the placement of a block's experts costs, in rows of one step."""
    parallel, placement = recipe.parallel, recipe.parallel.placement
    deduplicated = parallel.dedup != "off" and block.top_k > 1
    weights = list(block.experts.parameters())
    slots = block.placement.slots
    stored = sum(weight.numel() * weight.itemsize for weight in weights) / slots
    master = 0 if recipe.train.dtype == "fp32" and parallel.zero_stage == 0 else 4
    states = sum(weight.numel() for weight in weights) / slots * (master + 8)
    # Each group of processes that divides the experts counts its own tokens; the ranks sum the counts of all groups.
    groups = processes / parallel.ep_size
    step = _bytes_of_row(recipe, width, weights[0].itemsize) / groups
    return Objective(
        levels=levels_of(parallel, deduplicated),
        move=(stored + states) / (step * placement.every),
        far=placement.far_cost,
    )


def levels_of(parallel: Parallel, deduplicated: bool) -> tuple[Level, ...]:
    """What a search counts: the levels of dispatch, and the work of ranks where it has a cost.

    The ranks of a node share the rows that arrive at the node.
    """
    placement, found = parallel.placement, [Level(parallel.ep_size, 1.0, deduplicated)]
    if parallel.dedup == "node" and deduplicated:
        assert parallel.node_size is not None, "the recipe's checks require a node size"
        nodes = parallel.ep_size // parallel.node_size
        found.insert(0, Level(nodes, placement.far_cost / parallel.node_size))
    if placement.work_cost:
        found.append(Level(parallel.ep_size, placement.work_cost, deduplicated=False))
    return tuple(found)


def _bytes_of_row(recipe: Recipe, width: int, itemsize: int) -> int:
    """The bytes that a row of dispatch causes in a step: in dispatch, in combine, and in the gradients of both."""
    formats = recipe.parallel.quantised
    forward, backward = (formats.dispatch, formats.combine), (formats.dispatch_grad, formats.combine_grad)
    passes = [*forward, *backward, *(forward if recipe.train.activation_checkpointing else ())]
    return sum(Format.parse(name).row_bytes(width) if name else width * itemsize for name in passes)


def expert_shares(engine: TrainEngine, block: ExpertBlock) -> dict[str, Share]:
    """What this rank holds of the tensors of a block's experts, by names that are the same on every rank. No copies.

    These are the weights, and the optimizer's fp32 weights and moments. Every DeepSpeed optimizer that a recipe can
    choose keeps them in another place. All of them are contiguous tensors with the elements of a parameter in its own
    order, or an interval of them.

    Call this after the first step of the optimizer, which creates the moments.
    """
    shares = {}
    for name, parameter in block.experts.named_parameters():
        shares[name] = Share(0, parameter.data.view(-1))
        for kind, start, values in _states(engine, parameter):
            shares[f"{name} {kind}"] = Share(start, values.detach())
    return shares


def _states(engine: TrainEngine, parameter: nn.Parameter) -> Iterator[tuple[str, int, Tensor]]:
    """The optimizer's tensors for a parameter: what they are, the first element that this rank holds, and the values.

    - ZeRO concatenates parameters and gives each rank an interval, which ``_hp_mapping`` describes. It is None if no
      element of the parameter is in this rank's interval.
    - In bf16 without ZeRO a wrapper pairs each parameter with an fp32 copy.
    - In fp32 without ZeRO the optimizer is torch's own.
    """
    if hasattr(parameter, "_hp_mapping"):
        mapping: Any = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
        if mapping is None:
            return
        inner = engine.optimizer.optimizer
        (flat,) = inner.param_groups[mapping.param_group_index]["params"]
        start, own = mapping.lp_fragment_address.start, mapping.hp_fragment_address
        for kind, values in _with_moments(inner, flat):
            yield kind, start, values.narrow(0, own.start, own.numel)
    elif hasattr(engine.optimizer, "fp16_groups"):
        wrapper = engine.optimizer
        pairs = zip(chain(*wrapper.fp16_groups), chain(*wrapper.fp32_groups), strict=True)
        master = next(master for weights, master in pairs if weights is parameter)
        for kind, values in _with_moments(wrapper.optimizer, master):
            yield kind, 0, values.view(-1)
    else:
        for kind, values in _with_moments(engine.optimizer, parameter):
            if values is not parameter:
                yield kind, 0, values.view(-1)


def _with_moments(optimizer: Any, weights: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensor that torch's optimizer updates, and the tensors of its state that have an entry for each element."""
    yield "master", weights
    for kind, values in sorted(optimizer.state[weights].items()):
        if isinstance(values, Tensor) and values.shape == weights.shape:
            yield kind, values
