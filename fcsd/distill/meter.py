"""How fast a run is, and what it takes: tokens per second, share of the GPUs' peak, memory of the fullest process."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from fcsd.config import Recipe
from fcsd.distill.teacher import needs_teacher, teacher_name
from fcsd.launch import World
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import GIB, setup_of
from fcsd.plan.speed import PEAK, flops_per_token

_SAME_PEAK = ("H200", "H100 80GB HBM3")  # in the names torch has for GPUs: both SXM, with the same arithmetic


class Meter:
    """The steps of this process; every rank has one, and they read it together."""

    def __init__(self, recipe: Recipe, world: World, start: int) -> None:
        self._recipe, self._world = recipe, world
        on_gpu = world.device.type == "cuda"
        peak = gpu_peak(torch.cuda.get_device_name(world.device), recipe.train.dtype) if on_gpu else None
        self._full = None if peak is None else full_speed(recipe, world.size, peak)
        self._seconds, self._read = 0.0, (start, 0.0)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Times the block, which is one step and nothing else."""
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def read(self, step: int) -> dict[str, float]:
        """Since the last reading ``tokens_per_second`` over all processes and, on a known GPU, ``mfu``; since the start
        ``seconds`` in steps, and of the fullest process the peaks ``peak_host_memory_gib`` (resident) and
        ``peak_memory_gib`` (allocated by torch).
        """
        before, seconds = self._read
        speed = (step - before) * self._recipe.train.batch_tokens / (self._seconds - seconds)
        self._read = (step, self._seconds)
        found = {"tokens_per_second": speed, "seconds": self._seconds}
        if self._full is not None:
            found["mfu"] = speed / self._full
        everyone = self._world.everywhere(self._memory)
        return found | {name: max(one[name] for one in everyone) for name in everyone[0]}

    def _memory(self) -> dict[str, float]:
        found = {"peak_host_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB}
        if self._world.device.type == "cuda":
            found["peak_memory_gib"] = torch.cuda.max_memory_allocated(self._world.device) / GIB
        return found


def gpu_peak(name: str, dtype: str) -> float | None:
    """FLOP/s of a GPU by the name torch has for it; None if it is not known."""
    return PEAK[dtype] if any(part in name for part in _SAME_PEAK) else None


def full_speed(recipe: Recipe, processes: int, peak: float) -> float:
    """Tokens per second of a run that does nothing but the student's forward and backward and the teacher's forward,
    at ``peak`` FLOP/s a process. Recomputed layers do not count (PaLM, appendix B: model FLOPs utilization).
    """
    student = MetaModel(recipe.model).numbers
    teacher = MetaModel(teacher_name(recipe)).numbers if needs_teacher(recipe) else student
    setup = replace(setup_of(recipe, processes, len(student.layers)), recompute=False)
    return processes * peak / flops_per_token(student, teacher, setup)
