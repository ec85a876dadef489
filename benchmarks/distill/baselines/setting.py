"""What every side of the comparison is given, and the watch that times its steps."""

import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.train.account import read_account
from torch.profiler import ProfilerActivity, profile
from transformers import PretrainedConfig, PreTrainedModel

from fcsd.config import Recipe, accumulation
from fcsd.distill.data.rows import Mixture
from fcsd.distill.experts.expert_parallel import randomise
from fcsd.distill.student import DTYPES
from fcsd.distill.teacher.targets import compile_layers
from fcsd.launch.world import World
from fcsd.models.build import unwired, wire
from fcsd.parallel.trace import ON_DEVICE, read_content


@dataclass(frozen=True)
class Setting:
    """What one side trains, on which rows.

    Attributes:
        recipe: the batch, the micro-batch, the optimizer's settings, the dtype, and whether layers are recomputed.
        student: the config of the student, which is a converted one.
        teacher: the frozen teacher, which all sides share.
        rows: the rows of the run. Each of them is one document, and all its tokens but the first are predicted.
    """

    recipe: Recipe
    student: PretrainedConfig
    teacher: PreTrainedModel
    rows: Mixture
    world: World

    @property
    def accumulation(self) -> int:
        """Micro-batches in an optimizer step."""
        return accumulation(self.recipe, self.world.size)

    def new_student(self) -> PreTrainedModel:
        """A student with the weights of the teacher, on the device. They are the same on every call."""
        recipe = self.recipe
        draw: Any = {"dtype": DTYPES[recipe.train.dtype], "device": self.world.device, "seed": recipe.seed}
        # TRL changes the config of the model that it trains, for example the index of the padding token.
        return randomise(copy.deepcopy(self.student), 1, **draw)

    def plain_teacher(self) -> PreTrainedModel:
        """The teacher as transformers computes it, without the kernels that fcsd has put into it.

        Its modules are copies, into which a side may put its own code. Its weights are those of all sides.
        """
        self.teacher.set_attn_implementation("sdpa")
        plain = wire(self.teacher, unwired())
        twin = copy.deepcopy(plain, {id(held): held for held in (*plain.parameters(), *plain.buffers())})
        compile_layers(twin, self.recipe)
        return twin


class Watch:
    """Times the steps of a side. The side calls ``ended`` after every step, and does not wait for the device itself.

    Args:
        untimed: steps before the timed ones; at least one.
        timed: steps that are timed together.
        traced: whether one more step follows, in which the device is observed. This step is not timed. It is left out
            on CPUs.

    Attributes:
        waited: the seconds that the side has spent waiting for data so far; the side keeps it up to date.
        seconds: mean duration of a timed step.
        data_wait: the share of the timed steps that was spent waiting for data.
        peak: the largest number of bytes that torch had allocated during the timed steps; None on CPUs.
        idle, exposed: the shares of the traced step in which the device ran nothing, and only communication; None if no
            step was traced.
        synchronisations: how often the host waited for the device in the traced step.
        kernels: what took the most time on the device in the traced step; see ``longest``.
        weights, activations: the bytes of the student's weights, and those that its forward pass leaves for the
            backward pass; only the sides of fcsd say it, on GPUs.
    """

    def __init__(self, device: torch.device, untimed: int, timed: int, *, traced: bool) -> None:
        self._on_cuda = device.type == "cuda"
        self._untimed, self._last = untimed, untimed + timed
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if traced and self._on_cuda else None
        self.steps = self._last + (self._profile is not None)
        self._began = self._waited = self.waited = 0.0
        self.seconds = self.data_wait = float("nan")
        self.peak: int | None = None
        self.weights: int | None = None
        self.activations: int | None = None
        self.idle: float | None = None
        self.exposed: float | None = None
        self.synchronisations: int | None = None
        self.kernels: list[tuple[str, int, float]] | None = None

    def ended(self, step: int) -> None:
        """Notes that the host has launched step number ``step``, counted from 1."""
        if step == self._untimed:
            self._wait()
            if self._on_cuda:
                torch.cuda.reset_peak_memory_stats()
            self._began, self._waited = time.perf_counter(), self.waited
        if step == self._last:
            self._wait()
            seconds = time.perf_counter() - self._began
            self.seconds = seconds / (self._last - self._untimed)
            self.data_wait = (self.waited - self._waited) / seconds
            if self._on_cuda:
                self.peak = torch.cuda.max_memory_allocated()
            if self._profile is not None:
                self._profile.start()
        if step == self._last + 1 and self._profile is not None:
            self._wait()
            self._profile.stop()
            self._read(self._profile)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time of the block as time spent waiting for data."""
        began = time.perf_counter()
        yield
        self.waited += time.perf_counter() - began

    def _wait(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()

    def _read(self, traced: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "step.json")
            traced.export_chrome_trace(str(path))
            account = read_account(path)
            self.kernels = longest(read_content(path)["traceEvents"])
        self.idle = sum(states["idle"] for states in account.phases.values()) / account.total
        self.exposed = sum(states["exposed"] for states in account.phases.values()) / account.total
        self.synchronisations = sum(count for count, _ in account.synchronisations.values())


def longest(events: list[dict[str, Any]], count: int = 60) -> list[tuple[str, int, float]]:
    """The kernels, copies and fills among the complete events of a Chrome trace that took the most time on the device.

    Returns: the name (its first 120 characters), how often it ran, and its ms in all, in descending order of the ms.
    """
    found: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            name = event["name"][:120]
            times, ms = found.get(name, (0, 0.0))
            found[name] = times + 1, ms + event["dur"] / 1e3
    rows = [(name, times, ms) for name, (times, ms) in found.items()]
    return sorted(rows, key=lambda row: -row[2])[:count]


# Trains a new student on the first rows of a setting, reports each step to the watch, and returns the loss of the first
# step, which is the mean over its tokens before the weights have changed.
Side = Callable[[Setting, Watch], float]
