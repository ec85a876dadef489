"""Reductions under vLLM: an all-reduce that starts on a stream of its own, and is awaited where its sum is read.

Two operators carry it through torch.compile: ``fcsd::reduce_start(x, slot, group, reduce, overlap_from, within) -> y``
and ``fcsd::reduce_wait(y, x, after, slot)``. The two know each other by their slot, a small number that no other sum
has which is in flight at the same time (``Step.slot``). It repeats from layer to layer, so that pieces of a model stay
alike, and a compiler compiles one of them. The wait takes ``x`` so that its memory is not given to
another tensor before the sum is complete. It takes ``after``, the newest tensor that was computed, so that no
compiler moves it to an earlier place: with ``y`` and ``x`` alone Inductor places every wait directly behind its
start. Inductor also moves a start behind the computation that should cover it. A third operator,
``fcsd::reduce_cover(x, y)``, does nothing, but declares that it writes ``x``. It is applied to what the cover reads,
which is thereby computed after the start.

All sums of a process that are in flight belong to one ``InFlight``, which the operators call, and travel on one stream
of high priority. vLLM's communicators reuse their
buffers from one sum to the next, which is right if all sums of a group are on one stream, or are joined: sums with
nothing in flight use vLLM's own ``all_reduce`` on the main stream.

A sum is complete when ``reduce_start`` returns, and nothing is overlapped, in three cases:

- on a CPU;
- in a piecewise CUDA graph, if an attention is computed before it is awaited (``Step.crosses``), or by a backend of
  fcsd: vLLM captures the graph part by part, and a stream that forks in one part cannot join in the next. The parts end
  at the attentions. Where others are in flight such a sum is made behind them;
- in a step without a graph that has fewer than ``overlap_from`` tokens. Such a step waits for the host, and the second
  stream and its events are more work for the host.

A table (``parallel.all_reduce.ways``) decides the last case by itself: by its decoding rows what a whole graph covers,
by its other rows every other step. Compiled code holds the name of the table and not its rows, which are read when the
process starts; a whole graph asks when it is captured, for the one size that it has.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.models.schedule import Step
from fcsd.parallel.all_reduce.backends import backend_of, is_bound
from fcsd.parallel.all_reduce.ways import Way, Ways, is_table, read_ways

# Tokens. Over NVLink a server whose steps without a graph had some 1100 tokens was slower with sums in flight; one with
# 8192 was faster. Without peer access 2048 were faster, and two runs disagree about 768 and 1024 (benchmarks/results,
# "Serving by vLLM", "Random arrivals once more").
OVERLAP_FROM = 2048


class Settings(NamedTuple):
    """What a user can choose in ``--additional-config``.

    Attributes:
        reduce: the name of a backend, see ``parallel.all_reduce.backends``; or the file of a table.
        overlap_from: the fewest tokens of a step without a CUDA graph whose sums are in flight; a table does not ask.
        pieces: whether sums are in flight in piecewise CUDA graphs, too, where that can be. ``checks.check`` sets it to
            false where vLLM's own pieces are not asked for.
        shared_experts: ``beside`` the routed ones, by vLLM's call for both, which computes few tokens of them on a
            second stream; or ``apart``, before them. It is asked where both have sums of their own.
    """

    reduce: str
    overlap_from: int
    shared_experts: str
    pieces: bool


class Sum(NamedTuple):
    """A sum over the ranks.

    Attributes:
        total: the sum, ``[tokens, hidden]``; not complete before ``Reducer.wait`` if it is in flight.
        summand: what this rank adds to it; None if the sum is complete.
        arrive: what becomes of the sum on arrival, before it is added to the stream; None if it is added as it is.
        slot: see ``Step``.
    """

    total: Tensor
    summand: Tensor | None
    arrive: Callable[[Tensor], Tensor] | None = None
    slot: int = 0


@dataclass(frozen=True)
class Reducer:
    """How one process sums over its tensor-parallel group.

    Attributes:
        size: the number of ranks.
        group: the name of the group in vLLM.
        reduce: see ``Settings``.
        overlap_from: see ``Settings``.
        pieces: see ``Settings``.
        sends: whether anything is sent. It is a value, because torch.compile reads it.
    """

    size: int
    group: str = ""
    reduce: str = "auto"
    overlap_from: int = OVERLAP_FROM
    pieces: bool = True
    sends: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sends", self.size > 1 and not leaves_out(self.reduce))

    def start(self, x: Tensor, step: Step) -> Sum:
        """Start to sum ``x``, as ``step`` says. It must not be changed before the sum is awaited."""
        if not self.sends:
            return Sum(x, None)
        x = x.contiguous()
        return Sum(torch.ops.fcsd.reduce_start(x, step.slot, *self._how(step)), x, slot=step.slot)

    def hold(self, x: Tensor, own: Tensor | None) -> None:
        """Keep ``own`` for the next ``start_held``, which what is computed from ``x`` will ask for."""
        if self.sends and own is not None:
            torch.ops.fcsd.reduce_hold(x, own)

    def start_held(self, x: Tensor, step: Step) -> Tensor:
        """Start to sum ``x``, to which what is held is added first if it joins; or return ``x`` if nothing is sent.

        vLLM calls it where no argument can be handed over: inside its operator for experts.
        """
        if not self.sends:
            return x
        return torch.ops.fcsd.reduce_held(x, step.joins, step.slot, *self._how(step))

    def held(self, total: Tensor, own: Tensor | None, later: Tensor, step: Step) -> Sum:
        """The sum that ``start_held`` started.

        Args:
            own: what was held; it is read until the sum is awaited.
            later: a tensor that was computed after the start.
        """
        if not self.sends:
            return Sum(total if own is None else own + total, None)
        return Sum(total, later if own is None else own, slot=step.slot)

    def wait(self, sum_: Sum, newest: Tensor) -> Tensor:
        """Wait for a sum.

        Args:
            newest: the tensor that was computed last, behind which the wait stays.
        """
        if sum_.summand is not None:
            after = sum_.summand if newest is sum_.total else newest
            torch.ops.fcsd.reduce_wait(sum_.total, sum_.summand, after, sum_.slot)
        return sum_.total

    def cover(self, x: Tensor, newest: Tensor, sums: tuple[Sum, ...]) -> None:
        """Keep what reads ``x`` behind the start of a sum.

        Args:
            newest: the tensor that was computed last.
            sums: the sums that may be in flight. If ``newest`` is the total of one, it has just been started.
        """
        if any(sum_.total is newest and sum_.summand is not None for sum_ in sums):
            torch.ops.fcsd.reduce_cover(x, newest)

    def now(self, x: Tensor) -> Sum:
        """Sum ``x`` on the main stream, by vLLM's own operator. Nothing else may be in flight."""
        if not self.sends:
            return Sum(x, None)
        from vllm.distributed import tensor_model_parallel_all_reduce  # pyright: ignore[reportMissingImports]

        return Sum(tensor_model_parallel_all_reduce(x.contiguous()), None)

    def _how(self, step: Step) -> tuple[str, str, int, bool]:
        """How a sum travels, as the operators take it. It may be in flight in a piece that holds its start and wait."""
        return self.group, self.reduce, self.overlap_from, self.pieces and not step.crosses


def leaves_out(reduce: str) -> bool:
    """Whether every sum is left out, which gives wrong results; see ``Settings``."""
    return not is_table(reduce) and is_bound(reduce, "plugin")


def read_settings(additional_config: Any, degree: int | None = None) -> Settings:
    """The user's choice: ``--additional-config '{"fcsd": {"reduce": "vllm", "overlap_from": 2048}}'``.

    Args:
        additional_config: vLLM's setting.
        degree: the tensor-parallel degree, for which a table has to be; None if it is not known.

    Raises:
        ConfigError: the section ``fcsd`` has another form, or one of its values is unknown.
        BadInputError: the file is not a table for this.
    """
    section = additional_config.get("fcsd", {}) if isinstance(additional_config, dict) else {}
    if not isinstance(section, dict) or section.keys() - set(Settings._fields):
        keys = " and ".join((", ".join(f'"{key}"' for key in Settings._fields[:-1]), f'"{Settings._fields[-1]}"'))
        raise ConfigError(f'--additional-config: the section "fcsd" has the keys {keys} alone')
    reduce = str(section.get("reduce", "auto"))
    read_ways(reduce, degree)
    if is_table(reduce) and "overlap_from" in section:
        raise ConfigError(
            f"overlap_from does not go with {reduce}, which says for each size what travels; leave it out"
        )
    overlap_from = section.get("overlap_from", OVERLAP_FROM)
    if type(overlap_from) is not int or overlap_from < 0:
        raise ConfigError(f"overlap_from is a number of tokens, not {overlap_from!r}; 0 always overlaps")
    shared_experts = section.get("shared_experts", "beside")
    if shared_experts not in ("beside", "apart"):
        raise ConfigError(f'shared_experts is "beside" or "apart", not {shared_experts!r}')
    pieces = section.get("pieces", True)
    if type(pieces) is not bool:
        raise ConfigError(f"pieces is true or false, not {pieces!r}")
    return Settings(reduce, overlap_from, shared_experts, pieces)


@cache
def _ways(reduce: str) -> Ways:
    return read_ways(reduce)


def way_of(x: Tensor, reduce: str, overlap_from: int, within: bool) -> Way:
    """How ``x``, ``[tokens, hidden]``, is summed, and whether its sum is in flight between its start and its wait.

    A step without a graph waits for the host, so what is known by the number of tokens alone is said first.

    Args:
        within: whether it may be in flight in a piecewise CUDA graph. CUDA refuses a piece that ends before its wait.
    """
    captured = x.device.type != "cpu" and torch.cuda.is_current_stream_capturing()
    if not captured and x.shape[0] < overlap_from and not is_table(reduce):
        return Way(reduce, False)
    if x.device.type == "cpu" or _captures_a_piece():
        ways = _ways(reduce)
        way = ways.of("prefill", x.shape[0])
        asked = way.travels or way is ways.rest  # where a table says nothing, it is as without one
        return way._replace(travels=captured and within and asked and backend_of(way.reduce, "plugin")[0].by_vllm)
    if is_table(reduce):
        return _ways(reduce).of("decode" if captured else "prefill", x.shape[0])
    return Way(reduce, captured or x.shape[0] >= overlap_from)


class Travelling(NamedTuple):
    """A sum in flight.

    Attributes:
        address: of the memory in which it arrives.
        wait: waits for it.
    """

    address: int
    wait: Callable[[], Any]


class InFlight:
    """The sums of one process that are in flight, and what its operators do. ``define_operators`` makes it.

    vLLM runs one forward pass at a time, in which every sum that starts is awaited, so slots are free between passes.
    A graph is captured in a pass like others, and nothing of this is asked when it is replayed.

    Attributes:
        sums: by their slots.
        library: keeps the operators alive.
    """

    def __init__(self, library: torch.library.Library) -> None:
        self.sums: dict[int, Travelling] = {}
        self.library = library
        self._held: Tensor | None = None  # what joins the next sum of shared experts
        self._stream: torch.cuda.Stream | None = None
        self._opened: set[str] = set()

    def start(self, x: Tensor, slot: int, group: str, reduce: str, overlap_from: int, within: bool) -> Tensor:
        """The sum of ``x``, ``[tokens, hidden]``, which may be in flight: the operator ``reduce_start``.

        Raises:
            RuntimeError: the slot has a sum that was not awaited.
        """
        from vllm.distributed import parallel_state  # pyright: ignore[reportMissingImports]

        if slot in self.sums:
            raise RuntimeError(f"sum {slot} was not awaited before the next one started in its place")
        ranks = parallel_state._groups[group]()
        way = way_of(x, reduce, overlap_from, within)
        if is_table(reduce):
            self._open(reduce, ranks.device_group)
        if not backend_of(way.reduce, "plugin")[0].by_vllm:
            return self._start_of_fcsd(x, slot, ranks.device_group, way)
        if x.device.type == "cpu":
            return ranks._all_reduce_out_place(x.clone())  # the communicator of CPUs writes over its input
        side = self.side()  # made by the first sum of all, before any graph is captured
        if not way.travels:
            if self.sums:  # in a piece others travel, and no two sums of a group may be on two streams at the same time
                torch.cuda.current_stream().wait_stream(side)
            return ranks._all_reduce_out_place(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = ranks._all_reduce_out_place(x)
            event = torch.cuda.Event()
            event.record(side)
        self.sums[slot] = Travelling(y.data_ptr(), partial(_arrived, event, x))
        return y

    def wait(self, y: Tensor, x: Tensor, after: Tensor, slot: int) -> None:
        """Wait for the sum ``y`` if it is in flight: the operator ``reduce_wait``.

        Raises:
            RuntimeError: ``y`` is not the memory in which the sum arrives.
        """
        found = self.sums.pop(slot, None)
        if found is None:
            return
        if found.address != y.data_ptr():
            raise RuntimeError("a compiler copied a sum that is in flight, which would be read before it is complete")
        found.wait()

    def hold(self, x: Tensor, own: Tensor) -> None:
        """Keep ``own`` for the next ``start_held``: the operator ``reduce_hold``."""
        self._held = own

    def start_held(self, x: Tensor, joins: bool, slot: int, *how: Any) -> Tensor:
        """``start`` with what is held, if it ``joins``: the operator ``reduce_held``."""
        own, self._held = self._held, None
        if joins:
            assert own is not None, "what joins a sum of shared experts is held before"
            x = own + x
        return self.start(x.contiguous(), slot, *how)

    def side(self) -> torch.cuda.Stream:
        """The stream on which sums travel."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(priority=-1)
        return self._stream

    def _open(self, reduce: str, group: Any) -> None:
        """Prepare the backends of a table.

        This cannot be done while a graph is captured; vLLM runs a step before that.
        """
        from fcsd.parallel.all_reduce.reduce import Reduction

        if reduce in self._opened:
            return
        for backend in _ways(reduce).backends:
            if not backend_of(backend, "plugin")[0].by_vllm:
                Reduction(group, backend, 0)
        self._opened.add(reduce)

    def _start_of_fcsd(self, x: Tensor, slot: int, group: Any, way: Way) -> Tensor:
        """The same by fcsd's own backends, which sum in place."""
        from fcsd.parallel.all_reduce.reduce import reduce

        y = x.clone()
        reduction = reduce(y, group, way.reduce)
        if not way.travels:
            return reduction.wait()
        self.sums[slot] = Travelling(y.data_ptr(), reduction.wait)
        return y


def _arrived(event: torch.cuda.Event, summand: Tensor) -> None:
    """Wait for a sum; ``summand``, which it reads, had to stay until now."""
    torch.cuda.current_stream().wait_event(event)


def _captures_a_piece() -> bool:
    from vllm.config import CUDAGraphMode  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
    from vllm.forward_context import (  # pyright: ignore[reportMissingImports]
        get_forward_context,
        is_forward_context_available,
    )

    return is_forward_context_available() and get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE


@cache
def define_operators() -> InFlight:
    """Define the operators of this process, and what they share."""
    library = torch.library.Library("fcsd", "FRAGMENT")
    in_flight = InFlight(library)
    tags = (torch.Tag.needs_fixed_stride_order,)
    how = "int slot, str group, str reduce, int overlap_from, bool within"
    library.define(f"reduce_start(Tensor x, {how}) -> Tensor", tags=tags)
    library.define("reduce_wait(Tensor(a!) y, Tensor x, Tensor after, int slot) -> ()", tags=tags)
    library.define("reduce_cover(Tensor(a!) x, Tensor y) -> ()", tags=tags)
    library.define("reduce_hold(Tensor(a!) x, Tensor own) -> ()", tags=tags)
    library.define(f"reduce_held(Tensor x, bool joins, {how}) -> Tensor", tags=tags)
    for device in ("CPU", "CUDA"):
        library.impl("reduce_cover", lambda x, y: None, device)
        library.impl("reduce_hold", in_flight.hold, device)
        library.impl("reduce_held", in_flight.start_held, device)
        library.impl("reduce_start", in_flight.start, device)
        library.impl("reduce_wait", in_flight.wait, device)
    library._register_fake("reduce_start", lambda x, *how: torch.empty_like(x))
    library._register_fake("reduce_wait", lambda y, x, after, slot: None)
    library._register_fake("reduce_cover", lambda x, y: None)
    library._register_fake("reduce_hold", lambda x, own: None)
    library._register_fake("reduce_held", lambda x, joins, *how: torch.empty_like(x))
    return in_flight
