"""Measures the speed and the memory of a run, and the exposed communication of steps that are profiled."""

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from fcsd.config import Recipe
from fcsd.distill.inputs import teacher_name
from fcsd.distill.step.feed import Feed
from fcsd.errors import BadInputError
from fcsd.launch.world import World
from fcsd.parallel.trace import overlaps, read
from fcsd.parallel.transports.transport import Traffic
from fcsd.plan import setup_for
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import GIB
from fcsd.plan.speed import PEAK, flops_per_token

WAITS = 0.01  # a warning is printed if a larger share of the steps' time is spent waiting for data
_SAME_PEAK = ("H200", "H100 80GB HBM3")  # parts of torch's names for GPUs; both are SXM and have the same peak


class Meter:
    """Times the steps of this process. Every rank has a meter, and all ranks call ``read`` together.

    Args:
        run: the run directory; traces of profiled steps are written below it.
        world: the processes, on their devices.
        hosts: the same processes, in a group whose collectives do not involve a device.
        start: the number of steps that were taken before.
        feed: the source of the steps' data.
        traffic: counts the bytes that dispatch and combine send; None if no experts are divided.
    """

    def __init__(
        self,
        run: Path,
        recipe: Recipe,
        world: World,
        hosts: World,
        start: int,
        feed: Feed,
        traffic: Traffic | None = None,
    ) -> None:
        self._traces, self._recipe, self._world, self._hosts = run / "traces", recipe, world, hosts
        self._feed, self._waited, self._warned = feed, 0.0, False
        self._exposed: dict[str, float] = {}
        self._traffic, self._of_step = traffic, Traffic()
        self._full = full_speed_of(recipe, world)
        self._seconds, self._start, self._read = 0.0, start, (start, 0.0)

    def traces(self, step: int) -> bool:
        """Whether this step is profiled, which makes it slower."""
        every = self._recipe.train.trace_every
        return every > 0 and step % every == 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Times the block, which takes the step with this number (from 1) and does nothing else."""
        profiler = torch.profiler.profile() if self.traces(step) else None
        if self._traffic is not None:
            self._traffic.reset()  # evaluations between two steps do not count
        with profiler or nullcontext():
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began
        if self._traffic is not None:
            self._of_step = replace(self._traffic)
        if profiler is not None:
            trace = self._traces / f"step-{step}" / f"rank-{self._world.rank}.json.gz"
            trace.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            self._exposed = exposed_communication(trace) if self._world.rank == 0 else {}

    def read(self, step: int) -> dict[str, float]:
        """The speed and the memory of the run. Every rank calls this after the same step.

        Returns:
            The metrics by name. Three are measured since the last reading: ``tokens_per_second`` over all processes;
            ``mfu``, on a GPU whose peak is known; and ``data_wait``, the share of the steps' time that the slowest
            process spent waiting for data. The first share above ``WAITS`` causes a warning. Three are measured since
            the start: ``seconds``, the time spent in steps; ``peak_host_memory_gib`` (resident) and
            ``peak_memory_gib`` (allocated by torch), each of the process with the highest peak. If experts are divided,
            two are those of the last step: ``wire_bytes``, the bytes that all processes together sent to others in
            dispatch and combine, of student and teacher, forward and backward; and ``fullest_rank_rows``, the largest
            number of rows that a process received in one dispatch. After a profiled step the values of
            ``exposed_communication`` are added.
        """
        before, seconds = self._read
        speed = (step - before) * self._recipe.train.batch_tokens / (self._seconds - seconds)
        found = {"tokens_per_second": speed, "seconds": self._seconds}
        if self._full is not None:
            found["mfu"] = speed / self._full
        found, self._exposed = found | self._exposed, {}
        own = self._memory() | {"data_wait": (self._feed.waited - self._waited) / (self._seconds - seconds)}
        everyone = self._hosts.everywhere(lambda: (own, self._of_step.sent, self._of_step.fullest))
        found |= {name: max(one[name] for one, _, _ in everyone) for name in own}
        if self._traffic is not None:
            found |= {
                "wire_bytes": sum(sent for _, sent, _ in everyone),
                "fullest_rank_rows": max(rows for _, _, rows in everyone),
            }
        # No earlier step could hide the preparation of the first step's data.
        if before > self._start:
            self._warn(found["data_wait"])
        self._read, self._waited = (step, self._seconds), self._feed.waited
        return found

    def _warn(self, data_wait: float) -> None:
        """Says once that the run waits for data."""
        if data_wait > WAITS and not self._warned and self._world.rank == 0:
            self._warned = True
            print(
                f"warning: {data_wait:.1%} of the time of the last steps was spent waiting for data; data on a faster "
                "disk, or a CPU core for each process besides the one that trains, would help",
                file=sys.stderr,
            )

    def _memory(self) -> dict[str, float]:
        found = {"peak_host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        if self._world.device.type == "cuda":
            found["peak_memory_gib"] = torch.cuda.max_memory_allocated(self._world.device) / GIB
        return found


def exposed_communication(path: Path) -> dict[str, float]:
    """The exposed and the hidden communication in the trace of a profiled step on one rank.

    Returns:
        ``exposed_communication_ms``, the milliseconds in which dispatch or combine ran but no computation kernel, and
        ``hidden_communication``, the share of their time that was hidden. The dict is empty if the trace has neither
        dispatch nor combine on a device, for example on a CPU.
    """
    try:
        found = [overlap for (kind, _), overlap in overlaps([read(path)]).items() if kind == "all"]
    except BadInputError:
        return {}
    shown, whole = sum(one.exposed for one in found), sum(one.on_device for one in found)
    return {"exposed_communication_ms": shown, "hidden_communication": 1 - shown / whole}


def gpu_peak(name: str, dtype: str) -> float | None:
    """The peak FLOP/s of a GPU with torch's name ``name``; None if it is not known."""
    return PEAK[dtype] if any(part in name for part in _SAME_PEAK) else None


def full_speed_of(recipe: Recipe, world: World) -> float | None:
    """``full_speed`` at the peak of this process's GPU; None on a CPU, or if the peak is not known."""
    if world.device.type != "cuda":
        return None
    peak = gpu_peak(torch.cuda.get_device_name(world.device), recipe.train.dtype)
    return None if peak is None else full_speed(recipe, world.size, peak)


def full_speed(recipe: Recipe, processes: int, peak: float) -> float:
    """The tokens per second of a run at ``peak`` FLOP/s for each process.

    The run is assumed to do nothing but the student's forward and backward pass and the teacher's forward pass.
    Recomputed layers do not count (PaLM, appendix B: model FLOPs utilization).
    """
    model = MetaModel(recipe.model)
    student = model.numbers
    teacher = MetaModel(teacher_name(recipe)).numbers if recipe.needs_original else student
    setup = replace(setup_for(recipe, processes, model), recompute=False)
    return processes * peak / flops_per_token(student, teacher, setup)
