"""Finds the cheapest change of a recipe that makes it fit into the memory of the GPUs, and what makes it faster."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Literal

from fcsd.plan.setup import Hardware, Setup

MOST_GPUS = 64  # the search tries up to this many times as many nodes as were asked for
# Where AdamW's states are, and what its moments are kept in.
_STATES: tuple[tuple[Literal["none", "host"], Literal["fp32", "8bit"]], ...] = (
    ("none", "fp32"),
    ("host", "fp32"),
    ("none", "8bit"),
)


def candidates(setup: Setup, hardware: Hardware, experts: int) -> Iterator[tuple[Setup, Hardware]]:
    """Yields setups that a run accepts, the cheapest first.

    The innermost loop varies the cheapest setting. From the cheapest to the most expensive, the settings are:

    - recompute, which costs one more forward pass
    - smaller micro-batches, which give each kernel less work
    - ZeRO-2, which reduces gradients at every micro-batch
    - sharding the layers of dense models over more GPUs of a node (``parallel.tp_size``), which sums in every layer
    - sharding the teacher's experts, and experts over more ranks, which both need more all-to-all
    - the optimizer on the host, which makes each step wait for the bus and the CPU cores
    - moments in 8 bits, which round each step
    - more nodes

    Args:
        experts: routed experts of a MoE layer; 0 for a dense model.
    """
    for nodes in _doubled(hardware.nodes, hardware.nodes * MOST_GPUS):
        larger = replace(hardware, nodes=nodes)
        ep_sizes = list(_doubled(setup.ep_size, larger.world if experts else setup.ep_size))
        inner = list(
            product(
                [setup.tp_size] if experts else list(_doubled(setup.tp_size, larger.gpus)),
                sorted({setup.zero_stage, 2}),
                list(_halved(setup.micro_batch_size)),
                sorted({setup.recompute, True}),
            )
        )
        states = _STATES[_STATES.index((setup.offload, setup.moments)) :]
        for (offload, moments), ep_size in product(states, ep_sizes):
            for teacher in _teachers(setup, ep_size):
                for tp_size, stage, rows, recompute in inner:
                    changed = replace(
                        setup,
                        world=larger.world,
                        ep_size=ep_size,
                        tp_size=tp_size,
                        teacher=teacher,
                        offload=offload,
                        moments=moments,
                        zero_stage=stage,
                        micro_batch_size=rows,
                        recompute=recompute,
                    )
                    if changed.possible(experts):
                        yield changed, larger


def cheapest(
    setup: Setup, hardware: Hardware, experts: int, fits: Callable[[Setup, Hardware], bool]
) -> tuple[Setup, Hardware] | None:
    """The first of ``candidates`` for which ``fits`` is true; None if there is none."""
    return next((found for found in candidates(setup, hardware, experts) if fits(*found)), None)


def larger_micro_batches(setup: Setup, experts: int) -> Iterator[Setup]:
    """Yields the setups with two, four, ... times as many rows in a micro-batch that a run accepts."""
    rows = setup.micro_batch_size
    for more in _doubled(2 * rows, int(rows * setup.accumulation)):
        changed = replace(setup, micro_batch_size=more)
        if changed.possible(experts):
            yield changed


def quicker(setup: Setup, experts: int) -> Iterator[Setup]:
    """Yields the setups that a run accepts with larger micro-batches, without recompute, or with both changes."""
    for rows in (setup, *larger_micro_batches(setup, experts)):
        for recompute in sorted({False, setup.recompute}):
            changed = replace(rows, recompute=recompute)
            if changed != setup:
                yield changed


def assignments(before: Setup, after: Setup) -> dict[str, object]:
    """The values of the recipe, by dotted key, that change the setup ``before`` into ``after`` on the same hardware."""
    keys = {
        "train.activation_checkpointing": (before.recompute, after.recompute),
        "train.micro_batch_size": (before.micro_batch_size, after.micro_batch_size),
        "parallel.zero_stage": (before.zero_stage, after.zero_stage),
        "parallel.tp_size": (before.tp_size, after.tp_size),
        "parallel.teacher_placement": (before.teacher, after.teacher),
        "parallel.ep_size": (before.ep_size, after.ep_size),
        "optim.offload": (before.offload, after.offload),
        "optim.moments": (before.moments, after.moments),
        "train.adapter.rank": (before.parts and before.parts.rank, after.parts and after.parts.rank),
    }
    return {key: new for key, (old, new) in keys.items() if old != new}


def changes(before: Setup, after: Setup, hardware: Hardware) -> list[str]:
    """The ``--set`` assignments and flags that change the setup ``before`` into ``after`` on ``hardware``."""
    values = assignments(before, after).items()
    written = [f"--set {key}={str(new).lower() if isinstance(new, bool) else new}" for key, new in values]
    return written + ([f"--nodes {hardware.nodes}"] if before.world != after.world else [])


def _teachers(setup: Setup, ep_size: int) -> list[Literal["none", "replicated", "sharded"]]:
    """The placements of the teacher's experts to try: its own and, if it is on every rank, the sharded one."""
    sharded = setup.teacher == "replicated" and ep_size > 1
    return [setup.teacher, "sharded"] if sharded else [setup.teacher]


def _doubled(start: int, most: int) -> Iterator[int]:
    while start <= most:
        yield start
        start *= 2


def _halved(start: int) -> Iterator[int]:
    while start:
        yield start
        start //= 2
