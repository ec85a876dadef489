"""The table of all-reduce backends: the ways in which ranks sum, by the names that users write.

fcsd's engine, ``fcsd chat``, ``fcsd eval``, the vLLM plugin and the benchmarks read it for names, help texts and
errors. It imports torch only when a backend is opened, so that the command line can read it.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from fcsd.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from fcsd.kernels.bit_split import Format
    from fcsd.parallel.transports.transport import Work

User = Literal["engine", "plugin"]  # fcsd's own engine, and the plugin for vLLM
Start = Callable[["Tensor"], "Work"]  # starts to replace a tensor by its sum over the ranks, in place
PEERS = "2 to 8 GPUs of one host that can access each other's memory"


@dataclass(frozen=True)
class Backend:
    """A way to sum over ranks; its field ``open`` says who opens it, and how.

    Attributes:
        name: what users write; FORMAT stands for a format of quantised communication.
        users: where it can be chosen.
        open: prepares a group of ranks, and returns what starts a sum; it takes the group and the format, and raises
            ConfigError if the ranks cannot sum in this way. None if fcsd opens nothing.
        only: where it works or pays, for help texts; empty if that is everywhere.
        by_vllm: whether vLLM itself sums in the plugin.
        bound: whether it sends nothing. Its results are wrong, and its time is a lower bound for all others.
    """

    name: str
    users: tuple[User, ...] = ("engine", "plugin")
    open: "Callable[[Any, Format | None], Start] | None" = None
    only: str = ""
    by_vllm: bool = False
    bound: bool = False


def _nccl(group: Any, _: "Format | None") -> Start:
    """The all-reduce of torch.distributed, by gloo on CPUs."""
    import torch.distributed as dist

    return lambda x: dist.all_reduce(x, group=group, async_op=True)  # pyright: ignore[reportReturnType]


def _symmetric(group: Any, _: "Format | None") -> Start:
    """One kernel in the memory of the GPUs of one host; NCCL for what it does not sum, or sums more slowly."""
    from fcsd.parallel.all_reduce import symmetric

    if (start := symmetric.starter(group, _nccl(group, None))) is None:
        raise ConfigError(
            f"this all-reduce backend needs {PEERS}", "use --all-reduce nccl, or under vLLM the backend vllm"
        )
    return start


def _auto(group: Any, _: "Format | None") -> Start:
    """``nccl`` or ``symmetric``, whichever was measured to be faster; more than two GPUs were not measured."""
    import torch.distributed as dist

    from fcsd.parallel.all_reduce import symmetric

    nccl = _nccl(group, None)
    if dist.get_world_size(group) == 2:
        with suppress(ConfigError):  # on both ranks: they share no memory of the host, or NVRTC is missing
            return symmetric.starter(group, nccl) or nccl
    return nccl


def _host(group: Any, format: "Format | None") -> Start:
    """Through memory of the host, exact or in a format; NCCL for what is not in whole lines of 16 bytes."""
    from fcsd.parallel.all_reduce import host

    return host.starter(group, format, _nccl(group, None))


def _quantised(group: Any, format: "Format | None") -> Start:
    """Rows in a format; see ``quantised`` and docs/slow_links.md."""
    from fcsd.parallel.all_reduce import quantised

    assert format is not None, "the name of a quantised backend has a format"
    return lambda x: quantised.all_reduce(x, format, group)


BACKENDS = (
    Backend("nccl", ("engine",), _nccl),
    Backend("symmetric", open=_symmetric, only=f"between {PEERS}"),
    Backend("auto", open=_auto, by_vllm=True),  # in the plugin it is ``vllm`` today
    Backend("vllm", ("plugin",), by_vllm=True),  # vLLM's own choice of all-reduce
    Backend("host", ("engine",), _host, only="between 2 to 8 GPUs of one host without peer access"),
    Backend("host:FORMAT", ("engine",), _host, only="the same in fewer bits"),
    Backend("quantised:FORMAT", open=_quantised, only="for GPUs without peer access"),
    Backend("none", bound=True),
)


def names(user: User) -> list[str]:
    """The names of the backends that a user can choose."""
    return [backend.name for backend in BACKENDS if user in backend.users]


def described(user: User) -> str:
    """The backends with right results, for the help of an option."""
    rows = [backend for backend in BACKENDS if user in backend.users and not backend.bound]
    *first, last = (f"{row.name} ({row.only})" if row.only else row.name for row in rows)
    return f"{', '.join(first)}, or {last}"


@cache
def backend_of(name: str, user: User) -> "tuple[Backend, Format | None]":
    """The backend of a name, and the format in which it sends; None for the values as they are.

    Raises:
        ConfigError: there is no such backend for this user, or no such format.
    """
    from fcsd.kernels.bit_split.format import format_of_reduction

    format = format_of_reduction(name)
    known = names(user)
    for backend in BACKENDS:
        if backend.name == (f"{name.partition(':')[0]}:FORMAT" if format else name) and user in backend.users:
            return backend, format
    raise ConfigError(f"unknown all-reduce backend {name!r}; one of {', '.join(known)}")


def is_bound(name: str, user: User = "engine") -> bool:
    """Whether a backend gives wrong results, because it exists for measurements of time alone.

    Raises:
        ConfigError: see ``backend_of``.
    """
    return backend_of(name, user)[0].bound


def require_right(name: str) -> None:
    """Refuse a backend of fcsd's engine that exists for measurements of time alone.

    Raises:
        ConfigError: it gives wrong results; see also ``backend_of``.
    """
    if is_bound(name):
        raise ConfigError(
            f"the all-reduce backend {name} gives wrong results; only benchmarks take it",
            hint="leave --all-reduce out, or use --all-reduce nccl",
        )
