"""Compares the distillation step of fcsd with those of public trainers, each at its best micro-batch, on one device.

All sides train the same converted student from the same weights on the same rows, with the same teacher, the same AdamW
with fp32 master weights, and the same kernels for attention and for the products of experts. A row is one document,
because TRL's trainer cannot keep attention inside several. At each visit a side builds its student and its optimizer
anew, because not all of them fit into one GPU's memory. First every side runs with every micro-batch; then the sides
take turns, each with the micro-batch at which it was fastest.
"""

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarks.distill.baselines import gkd, layers, loop, own
from benchmarks.distill.baselines.layers import Layers
from benchmarks.distill.baselines.prepare import held_bytes, prepare
from benchmarks.distill.baselines.setting import Setting, Side, Watch
from benchmarks.distill.baselines.table import OWN, table, told
from benchmarks.train.step.workload import Workload

from fcsd.bench.runner import write
from fcsd.errors import unknown_value
from fcsd.extras import require_extra
from fcsd.launch.environment import snapshot


@dataclass(frozen=True)
class Baseline:
    """A side that fcsd is compared with.

    Attributes:
        package: the name under which its package is imported.
        project: the name under which its package is installed.
        make: returns the side; the package is imported when the side runs.
    """

    package: str
    project: str
    make: Callable[[], Side]


LAYERS: dict[str, Layers] = {
    "": layers.plain,
    "-compiled": layers.compiled,
    "-model": layers.liger,
    "-grouped": layers.liger_but_experts,
}
BASELINES: dict[str, Baseline] = {
    "trl": Baseline("trl", "trl", lambda: gkd.training(fp32_logits=True)),
    "trl-bf16": Baseline("trl", "trl", lambda: gkd.training(fp32_logits=False)),
    **{
        f"loop-liger{ending}{suffix}": Baseline("liger_kernel", "liger-kernel", partial(loop.looping, divergence, made))
        for ending, divergence in (("", loop.liger), ("-kl", loop.liger_kl))
        for suffix, made in LAYERS.items()
    },
    "autoep": Baseline("liger_kernel", "liger-kernel", partial(loop.looping, loop.liger, layers.autoep)),
    "autoep-gate-up": Baseline(
        "liger_kernel", "liger-kernel", partial(loop.looping, loop.liger, partial(layers.autoep, gate_up="fused"))
    ),
    "loop-trl": Baseline("trl", "trl", lambda: loop.looping(loop.trl_chunked)),
    "fcsd-plain": Baseline("deepspeed", "deepspeed", lambda: own.distill_plainly),
    "fcsd-adapters": Baseline("peft", "peft", lambda: own.distill_adapters),
}


def check_names(names: tuple[str, ...]) -> None:
    """Checks that every named baseline exists and that its package is installed.

    Raises:
        ConfigError: a name is unknown, or a package is missing.
    """
    for name in names:
        if name not in BASELINES:
            raise unknown_value("baseline", name, BASELINES)
        require_extra("dev", f"--against {name}", BASELINES[name].package)


def bench(load: Workload, names: tuple[str, ...], out: Path | None = None, largest: bool = False) -> dict[str, Any]:
    """Measures fcsd and the named baselines, prints a table to stderr, and returns ``baselines.json``.

    Args:
        load: ``micro_batch`` is the largest micro-batch; its divisors are tried, too. A step has
            ``micro_batch * accumulation`` rows. ``steps`` and ``rounds`` are those of the turns; ``routers``,
            ``variants`` and ``wires`` are ignored.
        names: keys of ``BASELINES``.
        out: directory for ``baselines.json``.
        largest: whether each side tries micro-batches from the largest down, and stops at the first that fits.

    Raises:
        ConfigError: a baseline is unknown or not installed; or see ``prepare``.
    """
    check_names(names)
    setting, rate, bound = prepare(load, public=not all(name.startswith(OWN) for name in names))
    sides = {OWN: own.distill, **{name: BASELINES[name].make() for name in names}}

    result: dict[str, Any] = {
        "load": asdict(load),
        "against": names,
        "batch_tokens": setting.recipe.train.batch_tokens,
        "held": held_bytes(setting),
        "product_rate": rate,
        "bound": bound,
        "environment": snapshot(),
        "packages": {BASELINES[name].project: version(BASELINES[name].project) for name in names},
        "sweep": [],
        "turns": [],
    }

    def visit(part: str, name: str, micro: int, timed: int, *, traced: bool) -> bool:
        """Runs a side, adds what was measured to a part of the result, and returns whether the memory sufficed."""
        found = _visit(name, sides[name], with_micro_batch(setting, micro), timed=timed, traced=traced)
        result[part].append(found)
        print(told(found, result), file=sys.stderr, flush=True)
        write(result, out and out / "baselines.json")  # a comparison that is cut short leaves its figures
        return not found["out_of_memory"]

    for name in sides:
        for micro in divisors(load.micro_batch)[:: -1 if largest else 1]:
            if visit("sweep", name, micro, 1, traced=False) == largest:
                break  # larger ones need even more memory
    best = {name: fastest([found for found in result["sweep"] if found["side"] == name]) for name in sides}
    for number in range(load.rounds):
        for name, micro in best.items():
            if micro is not None:
                visit("turns", name, micro, load.steps, traced=number == load.rounds - 1)
    print(table(result), file=sys.stderr, flush=True)
    return result


def with_micro_batch(setting: Setting, micro: int) -> Setting:
    """The setting with another micro-batch. The rows of a step stay the same."""
    train = setting.recipe.train.model_copy(update={"micro_batch_size": micro})
    return replace(setting, recipe=setting.recipe.model_copy(update={"train": train}))


def divisors(number: int) -> list[int]:
    """The divisors of a number, in ascending order."""
    return [one for one in range(1, number + 1) if number % one == 0]


def _visit(name: str, side: Side, setting: Setting, *, timed: int, traced: bool) -> dict[str, Any]:
    """Runs a side for two steps that are not timed and ``timed`` timed ones.

    Returns: what ``Watch`` describes, the ``loss`` of the first step, ``visit_seconds``, which include the building of
        the side, and ``before``, the bytes that torch had allocated before, which are those of the teacher. If the
        memory did not suffice, ``out_of_memory`` is true and nothing was measured.
    """
    on_cuda = setting.world.device.type == "cuda"
    gc.collect()  # engines and trainers are freed only with the cycles that they are part of
    if on_cuda:
        torch.cuda.empty_cache()
    found: dict[str, Any] = {"side": name, "micro_batch": setting.recipe.train.micro_batch_size}
    found["before"] = torch.cuda.memory_allocated() if on_cuda else None
    watch = Watch(setting.world.device, 2, timed, traced=traced)
    began = time.perf_counter()
    try:
        loss = side(setting, watch)
    except torch.OutOfMemoryError:
        return found | {"out_of_memory": True}
    found["visit_seconds"] = time.perf_counter() - began
    measured = ("seconds", "data_wait", "peak", "weights", "activations")
    measured += ("idle", "exposed", "synchronisations", "kernels")
    return found | {"out_of_memory": False, "loss": loss, **{key: getattr(watch, key) for key in measured}}


def fastest(visits: list[dict[str, Any]]) -> int | None:
    """The micro-batch of the fastest visit; None if the memory sufficed for none."""
    finished = [visit for visit in visits if not visit["out_of_memory"]]
    return min(finished, key=lambda visit: visit["seconds"])["micro_batch"] if finished else None
