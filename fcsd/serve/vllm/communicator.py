"""The sums of every model under vLLM, converted or not, through memory of the host, where a user asks for it.

``FCSD_ALL_REDUCE=host`` (or ``host:int8``, which changes results a little) gives vLLM's platform another communicator:
a subclass of its own, whose all-reduce and all-gather (of logits) of the tensor-parallel group go by tables that are
measured when the group is made. vLLM sees its own operator, so its compiler and its CUDA graphs stay as they are. Where
vLLM's own way is faster, as it is between GPUs with NVLink, the table has it.
"""

import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

from fcsd.errors import ConfigError
from fcsd.foreign_errors import reason_of
from fcsd.kernels.bit_split import Format

ASKED = "FCSD_ALL_REDUCE"
log = logging.getLogger("vllm.fcsd")


def format_of(asked: str) -> Format | None:
    """The format in which sums may travel, by the value of ``FCSD_ALL_REDUCE``; None if they have to be exact.

    Raises:
        ConfigError: the value is another one, or the format is unknown.
    """
    first, _, format = asked.partition(":")
    if first != "host":
        raise ConfigError(f"{ASKED}={asked}: sums are vLLM's own, host or host:FORMAT", "Use host, or host:int8.")
    return Format.parse(format) if format else None


def use_host_sums() -> None:
    """Give vLLM's platform the communicator, if ``FCSD_ALL_REDUCE`` asks for it.

    Raises:
        ConfigError: its value is unknown, or the platform is not CUDA.
    """
    asked = os.environ.get(ASKED, "")
    if not asked:
        return
    format_of(asked)
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    if not current_platform.is_cuda():
        raise ConfigError(f"{ASKED}={asked} is for NVIDIA GPUs")
    name = f"{__name__}.HostCommunicator"
    # The platform names the class of its communicators; vLLM looks it up for each group of ranks.
    type(current_platform).get_device_communicator_cls = classmethod(lambda cls: name)


def __getattr__(name: str) -> Any:
    if name == "HostCommunicator":  # vLLM imports it by its name, and this module must not import vLLM's otherwise
        return _communicator()
    raise AttributeError(name)


@cache
def _communicator() -> type[Any]:
    from vllm.distributed.device_communicators.cuda_communicator import (  # pyright: ignore[reportMissingImports]
        CudaCommunicator,
    )

    return communicator_of(CudaCommunicator)


def communicator_of(base: type[Any]) -> type[Any]:
    """The communicator over a class of vLLM's.

    Args:
        base: has ``unique_name``, ``world_size``, ``cpu_group``, ``all_reduce`` and ``all_gather``.
    """

    class HostCommunicator(base):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._sums: Any = None
            if self.unique_name.split(":")[0] == "tp" and self.world_size > 1:
                self._open(format_of(os.environ[ASKED]))

        def _open(self, format: Format | None) -> None:
            import torch
            import torch.distributed as dist

            from fcsd.parallel.all_reduce.host import sums_of
            from fcsd.parallel.all_reduce.host_table import file_for, kept, measured

            problem, opened = None, None
            try:
                opened = sums = sums_of(self.cpu_group)
                stock = super().all_reduce, super().all_gather
                file = file_for(caches(), torch.cuda.get_device_name(), self.world_size, os.environ[ASKED])
                self._tables = kept(file, lambda: measured(sums, *stock, self.cpu_group, format), self.cpu_group)
                self._format = format
            except Exception as error:  # a server that starts is better than one that does not; it says so below
                problem = f"{type(error).__name__}: {reason_of(error)}"
                log.debug("sums through the host", exc_info=True)
            problems: list[Any] = [None] * self.world_size
            dist.all_gather_object(problems, problem, group=self.cpu_group)
            if found := next(filter(None, problems), None):
                log.warning("sums are vLLM's own: %s", found)
                return
            self._sums = opened
            rows = zip(self._tables.sums.sizes, self._tables.sums.ways, strict=True)
            told = ", ".join(f"{size >> 10} KiB {way}" for size, way in rows)
            log.info("sums through the host, the fastest way by size: %s", told)

        def all_reduce(self, input_: Any) -> Any:
            """The sum over the ranks, as a new tensor."""
            sums = self._sums
            if sums is None or not sums.supports(input_):
                return super().all_reduce(input_)
            way = self._tables.sums.way(input_.nbytes)
            if way == "stock":
                return super().all_reduce(input_)
            out = input_.new_empty(input_.shape)
            method, _, format = way.partition(":")
            if format and _divides(self._format, input_):
                sums.all_reduce(input_, out, format=self._format)
            elif format:
                sums.all_reduce(input_, out)
            else:
                sums.all_reduce(input_, out, method)
            return out

        def all_gather(self, input_: Any, dim: int = -1) -> Any:
            """The tensors of all ranks, one after the other along ``dim``."""
            sums = self._sums
            if sums is None or not input_.is_contiguous() or self._tables.gathers.way(input_.nbytes) == "stock":
                return super().all_gather(input_, dim)
            dim %= input_.dim()
            return sums.gathered(input_).movedim(0, dim).flatten(dim, dim + 1)

    return HostCommunicator


def caches() -> Path:
    """The folder of vLLM's caches, as vLLM finds it."""
    general = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or Path(general, "vllm")).expanduser()


def _divides(format: Format | None, x: Any) -> bool:
    return format is not None and x.dim() > 1 and x.shape[-1] % format.group == 0
