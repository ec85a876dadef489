"""The sums of every model under vLLM, converted or not, through memory of the host, where a user asks for it.

``FCSD_ALL_REDUCE=host`` (or ``host:int8``, which changes results a little) gives vLLM's platform another communicator:
a subclass of its own, whose all-reduce, all-gather (of logits) and reduce-scatter of the tensor-parallel group go by
tables that are measured when the group is made; and so do the gathers and scatters by which vLLM hands tokens to
experts beside data-parallel attention. vLLM sees its own operator, so its compiler and its CUDA graphs stay as they
are. Where vLLM's own way is faster, as it is between GPUs with NVLink, the table has it.
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
        base: has ``unique_name``, ``world_size``, ``rank_in_group``, ``cpu_group``, ``all_reduce``, ``all_gather``,
            ``all_gatherv``, ``reduce_scatter`` and ``reduce_scatterv``.
    """

    class HostCommunicator(base):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._sums: Any = None
            name = self.unique_name.split(":")[0]
            if self.world_size > 1 and (name == "tp" or (name in ("dp", "ep") and _exchanges_tokens())):
                self._open(format_of(os.environ[ASKED]))

        def _open(self, format: Format | None) -> None:
            import torch
            import torch.distributed as dist

            from fcsd.parallel.all_reduce.host import sums_of
            from fcsd.parallel.all_reduce.host_table import Stock, exact, file_for, kept, measured

            problem, opened = None, None
            try:
                opened = sums = sums_of(self.cpu_group)
                own = super()
                stock = Stock(own.all_reduce, own.all_gather, lambda x: own.reduce_scatter(x, 0))
                file = file_for(caches(), torch.cuda.get_device_name(), self.world_size, os.environ[ASKED])
                self._tables = kept(file, lambda: measured(sums, stock, self.cpu_group, format), self.cpu_group)
                self._format, self._exact = format, exact(self._tables)
            except Exception as error:  # a server that starts is better than one that does not; it says so below
                problem = f"{type(error).__name__}: {reason_of(error)}"
                log.debug("sums through the host", exc_info=True)
            problems: list[Any] = [None] * self.world_size
            dist.all_gather_object(problems, problem, group=self.cpu_group)
            if found := next(filter(None, problems), None):
                log.warning("sums are vLLM's own: %s", found)
                return
            self._sums = opened
            log.info("sums through the host, the fastest way by size: %s", self._tables.sums)

        def all_reduce(self, input_: Any) -> Any:
            """The sum over the ranks, as a new tensor."""
            sums = self._sums
            if sums is None:
                return super().all_reduce(input_)
            table = "sums" if _captures(input_) else "eager"
            way = getattr(self._tables, table).way(input_.nbytes)
            if ":" in way and not _divides(self._format, input_.shape[-1]):
                way = getattr(self._exact, table).way(input_.nbytes)
            # Asked first, because a step outside of graphs waits for the host.
            if way == "stock" or not sums.supports(given := _aligned(input_)):
                return super().all_reduce(input_)
            out = given.new_empty(given.shape)
            method, _, format = way.partition(":")
            sums.all_reduce(given, out, method, self._format if format else None)
            return out

        def all_gather(self, input_: Any, dim: int = -1) -> Any:
            """The tensors of all ranks, one after the other along ``dim``."""
            way = self._gathers(input_.nbytes)
            if way == "stock":
                return super().all_gather(input_, dim)
            dim %= input_.dim()
            return self._sums.gathered(_aligned(input_), way).movedim(0, dim).flatten(dim, dim + 1)

        def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
            """The same along the first dimension, with ``sizes`` rows of each rank; of each tensor, if it is a list."""
            import torch

            tensors = input_ if isinstance(input_, list) else [input_]
            counts: list[int] = sizes or [len(tensors[0])] * self.world_size
            width = sum(x[:1].nbytes if len(x) else 0 for x in tensors)  # what a row takes along, in one message
            way = self._gathers(max(counts) * width) if min(counts) else "stock"
            if way == "stock" or dim:
                return super().all_gatherv(input_, dim, sizes)
            found = self._sums.gathered(_message(tensors, max(counts)), way)
            rows = [part[:size] for part, size in zip(found, counts, strict=True)]
            out, at = [], 0
            for x in tensors:
                end = at + x[:1].nbytes
                whole = torch.cat([row[:, at:end] for row in rows])
                out.append(whole.view(x.dtype).view(-1, *x.shape[1:]))
                at = end
            return out if isinstance(input_, list) else out[0]

        def reduce_scatter(self, input_: Any, dim: int = -1) -> Any:
            """This rank's part of the sum, which is divided along ``dim``."""
            way = self._scatters(input_, dim)
            each, odd = divmod(len(input_), self.world_size)
            if way == "stock" or odd:
                return super().reduce_scatter(input_, dim)
            return self._sums.scattered(_aligned(input_), [each] * self.world_size, way)

        def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
            """The same along the first dimension, with ``sizes`` rows for each rank."""
            way = self._scatters(input_, dim) if sizes else "stock"
            if way == "stock":
                return super().reduce_scatterv(input_, dim, sizes)
            return self._sums.scattered(_aligned(input_), sizes, way)

        def _gathers(self, size: int) -> str:
            """The way to gather so many bytes of each rank: by what all ranks know alike."""
            return "stock" if self._sums is None or not size or size % 16 else self._tables.gathers.way(size)

        def _scatters(self, x: Any, dim: int) -> str:
            whole = x.nbytes > 0 and dim % x.dim() == 0 and x[:1].nbytes % 16 == 0
            return self._tables.scatters.way(x.nbytes) if self._sums is not None and whole and _summed(x) else "stock"

    return HostCommunicator


def caches() -> Path:
    """The folder of vLLM's caches, as vLLM finds it."""
    general = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VLLM_CACHE_ROOT") or Path(general, "vllm")).expanduser()


def _captures(x: Any) -> bool:
    import torch

    return x.is_cuda and torch.cuda.is_current_stream_capturing()


@cache
def _divides(format: Format, width: int) -> bool:
    """Whether rows of ``width`` values travel in a format; what is told once of those that do not."""
    if width % format.group:
        log.warning("sums stay exact: groups of %d values do not divide rows of %d", format.group, width)
    return width % format.group == 0


def _summed(x: Any) -> bool:
    from fcsd.kernels.host.compiled import KINDS

    return x.dtype in KINDS


def _aligned(x: Any) -> Any:
    """As the kernels read it, on every rank: where a tensor lies must not decide which way one rank alone goes."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _message(tensors: list[Any], rows: int) -> Any:
    """The rows of all tensors as bytes, one behind the other, ``[rows, bytes]``; those that are missing are zeros."""
    import torch

    count = len(tensors[0])
    parts = [x.reshape(count, -1).contiguous().view(torch.uint8) for x in tensors]
    if len(parts) == 1 and count == rows:
        return _aligned(parts[0])
    out = torch.zeros(rows, sum(part.shape[1] for part in parts), dtype=torch.uint8, device=tensors[0].device)
    torch.cat(parts, dim=1, out=out[:count])
    return out


def _exchanges_tokens() -> bool:
    """Whether vLLM gathers the tokens of data-parallel ranks for their experts, and scatters the sums."""
    from vllm.config import (  # pyright: ignore[reportMissingImports]
        get_current_vllm_config_or_none,  # pyright: ignore[reportAttributeAccessIssue]
    )

    config = get_current_vllm_config_or_none()
    if config is None or config.model_config is None or not config.model_config.is_moe:
        return False
    parallel = config.parallel_config
    by_gathers = parallel.all2all_backend == "allgather_reducescatter"
    return parallel.data_parallel_size > 1 and by_gathers and not getattr(parallel, "enable_elastic_ep", False)
