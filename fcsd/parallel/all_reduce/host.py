"""The backend ``host``: sums between GPUs of one host without peer access, through mapped memory of the host.

Small tensors travel in one kernel, one shot; middle ones in blocks with a flag each; large ones by copy engines, which
leave the SMs to the products beside them. In fewer bits, records of a format travel by copy engines, and middle tensors
in int8 in blocks. The sum is made in fp32 in the order of ranks and rounded once, so every rank has the same bits,
whichever way the values travelled.

What is faster where depends on the machine: ``host_table`` measures it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.moves import decode_ranks, encode_sum
from fcsd.kernels.host import compiled
from fcsd.kernels.host.layout import BLOCKS, CODES, EXCHANGE, LAUNCH, LAYOUT, ONE_SHOT, PIECES, total_bytes
from fcsd.parallel.all_reduce.host_memory import LIMIT, HostMemory, open_memory
from fcsd.parallel.all_reduce.one_kernel import OneKernelSums, Places
from fcsd.parallel.all_reduce.quantised import cut
from fcsd.parallel.transports.transport import OnStream

_CODED = Format(8)  # what the kernel `in_codes` knows
_PIECE = 4 << 20  # bytes of most pieces of the exchange
# Up to so many bytes of a rank's values, by the number of ranks: measured on H200s (benchmarks/results/host_sums).
_ONE_SHOT = {2: 128 << 10, 3: 64 << 10}
_BLOCKS = {2: 1 << 20}


class HostSums(OneKernelSums):
    """The same in memory of the host, where copy engines move large tensors; see ``OneKernelSums``."""

    def __init__(self, memory: HostMemory, device: Any) -> None:
        self._base: int = device.mapped(memory.address, total_bytes(memory.size))
        places = {}
        parts = {
            "one_shot": (LAYOUT.one_shot, ONE_SHOT),
            "in_blocks": (LAYOUT.blocks, BLOCKS),
            "in_codes": (LAYOUT.codes, CODES),
        }
        for name, (offset, most) in parts.items():
            of = [self._base + memory.region(rank, offset) for rank in range(memory.size)]
            places[name] = Places(of, [of[memory.rank]], most, *LAUNCH[name])
        super().__init__(memory, device, self._base, places)
        self._calls["exchange"] = device.counters(1)
        # The exchange sends from here and receives here, so that it can be started again as a whole. To copy what is
        # sent takes one or two hundredths of the time that it travels.
        self._staged: Tensor = device.bytes(2 * EXCHANGE)

    def all_reduce(self, x: Tensor, out: Tensor, method: str | None = None, format: Format | None = None) -> None:
        """See ``OneKernelSums``; also by the method ``exchange``.

        Args:
            format: in which the values are sent; what ``in_blocks`` cannot send (``codes``) goes by ``exchange``.

        Raises:
            PeerLostError: a rank has ended.
            ConfigError: the groups of the format do not divide the rows of ``x``.
        """
        self.memory.require_peers()
        self.device.follow()
        if format is None:
            getattr(self, method or self.method(x.nbytes))(x, out)
        elif method != "exchange" and self.codes(x, format):
            if x.shape[-1] % format.group:
                format.row_bytes(x.shape[-1])  # which refuses it; a step outside of a graph waits for each microsecond
            self._start("in_codes", x, out, 16)
        else:
            self._in_format(x, out, format)

    def codes(self, x: Tensor, format: Format) -> bool:
        """Whether ``in_blocks`` sends ``x`` in this format: int8, up to some 8 MiB of bf16 values."""
        return format == _CODED and x.numel() * 33 // 32 <= CODES

    def method(self, size: int) -> str:
        """The method for ``size`` bytes."""
        if size <= _ONE_SHOT.get(self.size, 32 << 10):
            return "one_shot"
        return "in_blocks" if size <= _BLOCKS.get(self.size, 1 << 20) else "exchange"

    def exchange(self, x: Tensor, out: Tensor) -> None:
        """By copy engines: in one step between two ranks, in two steps between more."""
        if self.size == 2:
            self._in_one_step(x, out)
            return
        most = EXCHANGE // (16 * self.size) * (16 * self.size) // x.element_size()  # whole lines for each rank
        for part, total in zip(x.view(-1).split(most), out.view(-1).split(most), strict=True):
            self._in_two_steps(part, total)

    def _in_one_step(self, x: Tensor, out: Tensor) -> None:
        """By addresses: a step outside of a graph waits for each microsecond in which the host makes views."""
        staged, most = self._staged.data_ptr(), EXCHANGE // 32 * 32
        for at in range(0, x.nbytes, most):
            size, own = min(most, x.nbytes - at), x.data_ptr() + at
            self.device.copy_here(staged + self.rank * size, own, size)
            self._gather(size)
            self._add(x.dtype, size, own, staged, out.data_ptr() + at)

    def _in_two_steps(self, x: Tensor, out: Tensor) -> None:
        line = 16 // x.element_size()
        share = -(-len(x) // (self.size * line)) * line
        shares = self._sent(self.size, share, dtype=x.dtype)
        shares.view(-1)[: len(x)].copy_(x)
        shares.view(-1)[len(x) :].zero_()
        own = shares[self.rank]
        self._sum_share(shares, own)
        self._gather(own.nbytes)
        out.copy_(shares.view(-1)[: len(x)])

    def _sum_share(self, shares: Tensor, out: Tensor) -> None:
        """The sum of this rank's share, of ``shares`` ``[ranks, ...]`` of all ranks, which lie where rows are sent."""
        self._scatter(shares[0].nbytes)
        own, others = shares[self.rank], self._arrived(*shares.shape, dtype=shares.dtype)
        self._add(own.dtype, own.nbytes, own.data_ptr(), others.data_ptr(), out.data_ptr())

    def _add(self, dtype: torch.dtype, size: int, own: int, others: int, out: int) -> None:
        """Write the sum of what lies at two addresses, of which the second has a place for each rank, to a third."""
        blocks, lines = self.device.blocks(size // 16), size // 16
        self.device.start("add_parts", dtype, blocks, 256, None, own, others, out, lines, self.rank)

    def _in_format(self, x: Tensor, out: Tensor, format: Format) -> None:
        """Every value is decoded from what is sent, that of the rank itself too: see ``quantised``."""
        rows, sums = x.view(-1, x.shape[-1]), out.view(-1, x.shape[-1])
        width = format.row_bytes(rows.shape[1])
        # Records of rows that are cut take more room, not twice as much.
        most = EXCHANGE // (width if self.size == 2 else 2 * width)
        for part, total in zip(rows.split(most), sums.split(most), strict=True):
            if self.size == 2:
                records = self._sent(self.size, len(part), width)
                encode(part, format, out=records[self.rank])
                self._gather(records[0].nbytes)
                decode_ranks(records, format, total)
            else:
                self._in_format_in_two_steps(part, total, format)

    def _in_format_in_two_steps(self, rows: Tensor, out: Tensor, format: Format) -> None:
        dtype, rows = rows.dtype, cut(rows, format, self.size)
        share = -(-len(rows) // self.size)
        records = self._sent(self.size, share, format.row_bytes(rows.shape[1]))
        every = records.flatten(0, 1)
        encode(rows, format, out=every[: len(rows)])
        every[len(rows) :].zero_()
        self._scatter(records[0].nbytes)
        arrived = self._arrived(*records.shape)
        arrived[self.rank].copy_(records[self.rank])
        encode_sum(arrived, format, rows.shape[1], records[self.rank])
        self._gather(records[0].nbytes)
        decode(every[: len(rows)], format, rows.shape[1], dtype, out.view(rows.shape))

    def scattered(self, x: Tensor, sizes: Sequence[int], method: str | None = None) -> Tensor:
        """This rank's rows of the sum over the ranks, on the current stream.

        Args:
            x: ``[rows, ...]``; see ``supports``. A row has whole lines of 16 bytes.
            sizes: how many rows each rank has of the sum, the same on all ranks.
            method: see ``all_reduce``.

        Raises:
            PeerLostError: a rank has ended.
        """
        self.memory.require_peers()
        self.device.follow()
        method = method or self.method(x.nbytes)
        begin = sum(sizes[: self.rank])
        own = slice(begin, begin + sizes[self.rank])
        if method == "exchange":
            width = x[0].numel()
            out = x.new_empty(sizes[self.rank], width)
            most = EXCHANGE // (self.size * width * x.element_size())  # rows for a rank, in a round
            for at in range(0, max(sizes), most):
                shares = self._sent(self.size, min(most, max(sizes) - at), width, dtype=x.dtype)
                for share, rows in zip(shares, x.view(len(x), width).split(list(sizes)), strict=True):
                    part = rows[at : at + most]
                    share[: len(part)].copy_(part)
                self._sum_share(shares, shares[self.rank])
                mine = out[at : at + most]
                mine.copy_(shares[self.rank][: len(mine)])
            return out.view(len(out), *x.shape[1:])
        if method == "one_shot" and min(sizes) > 0:
            out, pairs = x.new_empty(sizes[self.rank], *x.shape[1:]), x.nbytes // len(x) // 8
            self.one_shot(x, out, range(pairs * own.start, pairs * own.stop))
            return out
        out = torch.empty_like(x)
        getattr(self, method)(x, out)
        return out[own]

    def gathered(self, x: Tensor, method: str = "exchange") -> Tensor:
        """``x`` of all ranks, ``[ranks, *x.shape]``, on the current stream.

        Args:
            x: contiguous, of any dtype, of the same shape on all ranks.
            method: ``one_shot``, ``in_blocks`` or ``exchange``; the first two are for whole lines of 16 bytes.

        Raises:
            PeerLostError: a rank has ended.
        """
        self.memory.require_peers()
        self.device.follow()
        out = x.new_empty(self.size, *x.shape)
        given = x.view(-1).view(torch.uint8)
        if method == "exchange":
            most = min(EXCHANGE, len(self._staged) // self.size)
            for part, places in zip(
                given.split(most), out.view(self.size, -1).view(torch.uint8).split(most, 1), strict=True
            ):
                every = self._sent(self.size, len(part))
                every[self.rank].copy_(part)
                self._gather(len(part))
                places.copy_(every)
        else:
            getattr(self, method)(given.view(torch.bfloat16), out, gather=True)  # these kernels gather bits
        return out

    def _sent(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Where rows lie that are sent, ``[ranks, ...]``; those that are gathered arrive there, too."""
        return self._staged[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _arrived(self, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Where rows that are scattered arrive, ``[ranks, ...]``."""
        return self._staged[EXCHANGE : EXCHANGE + prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _gather(self, size: int) -> None:
        """Send this rank's place in ``_sent``, ``[ranks, size]`` bytes, to all others, and receive theirs in theirs."""
        address = self._staged.data_ptr()

        def move() -> None:
            pieces = list(enumerate(_pieces(0, size, PIECES)))
            ups = [(flag, at, address + self.rank * size + at, length) for flag, (at, length) in pieces]
            downs = [
                (flag, [(peer, at, address + peer * size + at, length) for peer in self._others])
                for flag, (at, length) in pieces
            ]
            self._move(ups, downs)

        self.device.replay(("gather", size), move)

    def _scatter(self, size: int) -> None:
        """Send each other rank its place in ``_sent``, ``[ranks, size]`` bytes, and receive theirs in ``_arrived``."""
        address = self._staged.data_ptr()

        def move() -> None:
            pieces = _pieces(0, size, PIECES // self.size)
            ups, downs = [], []
            for number, (at, length) in enumerate(pieces):
                for peer in self._others:
                    ups.append((peer * len(pieces) + number, peer * size + at, address + peer * size + at, length))
                place = self.rank * size + at
                arriving = [(peer, place, address + EXCHANGE + peer * size + at, length) for peer in self._others]
                downs.append((self.rank * len(pieces) + number, arriving))
            self._move(ups, downs)

        self.device.replay(("scatter", size), move)

    @property
    def _others(self) -> list[int]:
        """The other ranks, each rank's next one first, so that not all read from the same one."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _move(
        self,
        ups: Sequence[tuple[int, int, int, int]],
        downs: Sequence[tuple[int, Sequence[tuple[int, int, int, int]]]],
    ) -> None:
        """One call of the exchange.

        Args:
            ups: flag, place in this rank's slot, address on the GPU, bytes, which may be 0.
            downs: flag that all others announce, and for each of them its rank, place, address on the GPU, bytes.
        """
        calls, dtype = self._calls["exchange"].data_ptr(), torch.bfloat16  # these kernels know no values
        start, copy, memory = self.device.start, self.device.copy, self.memory
        patience = self._base, memory.limit
        ups_on, downs_on = self.device.fork()
        every, own = self._base + memory.region(0), self._base + memory.region(self.rank)
        waiting = LAYOUT.region, self.rank, calls
        for stream in ups_on:
            start("await_all", dtype, 1, 32, stream, every + LAYOUT.done, *waiting, 1, *patience)
        for number, (flag, place, address, length) in enumerate(ups):
            stream = ups_on[number % len(ups_on)]
            if length:
                copy(memory.address + memory.region(self.rank, LAYOUT.exchange) + place, address, length, stream, True)
            start("announce", dtype, 1, 1, stream, own + LAYOUT.piece_flag(flag), calls)
        for number, (flag, arriving) in enumerate(downs):
            stream = downs_on[number % len(downs_on)]
            start("await_all", dtype, 1, 32, stream, every + LAYOUT.piece_flag(flag), *waiting, 0, *patience)
            for peer, place, address, length in arriving:
                copy(address, memory.address + memory.region(peer, LAYOUT.exchange) + place, length, stream, False)
        self.device.join()
        start("finish", dtype, 1, 1, None, own + LAYOUT.done, own + LAYOUT.piece_flags, PIECES, calls)

    def all_to_all_uneven(
        self, rows: Tensor, out: Tensor, sends: Sequence[int], receives: Sequence[int], most: int
    ) -> None:
        """Send each rank its part of ``rows``, and receive theirs in ``out``, on the current stream.

        The parts are in the order of ranks. Those of this rank are not moved.

        Args:
            rows, out: contiguous, of any dtype.
            sends, receives: bytes to each rank and from each; those of this rank itself, too.
            most: the most bytes from any rank to another one, the same on all ranks.

        Raises:
            PeerLostError: a rank has ended.
        """
        self.memory.require_peers()
        self.device.follow()
        room = EXCHANGE // (self.size - 1) // 256 * 256  # of a receiver in a slot, the next rank's first
        outgoing, incoming = (list(accumulate(counts, initial=0)) for counts in (sends, receives))
        for begin in range(0, most, room):
            # Every pair has the pieces of the largest part, because a flag is awaited from all ranks at once.
            pieces = _pieces(begin, min(most, begin + room), PIECES // self.size)
            ups, downs = [], []
            for number, (at, length) in enumerate(pieces):
                for peer in self._others:
                    place = (peer - self.rank - 1) % self.size * room + at - begin
                    size = max(0, min(length, sends[peer] - at))
                    ups.append((peer * len(pieces) + number, place, rows.data_ptr() + outgoing[peer] + at, size))
                arriving = [
                    (
                        peer,
                        (self.rank - peer - 1) % self.size * room + at - begin,
                        out.data_ptr() + incoming[peer] + at,
                        min(length, receives[peer] - at),
                    )
                    for peer in self._others
                    if receives[peer] > at
                ]
                if arriving:
                    downs.append((self.rank * len(pieces) + number, arriving))
            self._move(ups, downs)


def _pieces(begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Cut bytes into at most ``most`` pieces: where each begins, and its length.

    A piece that has come up can come down, so more pieces overlap more and each costs some microseconds. The last ones
    are small, because nothing covers their way down.
    """
    count = max(1, min(most - 2, -(-(end - begin) // _PIECE)))
    shares = [1.0] * count + [0.5, 0.25] if end - begin > 1 << 20 else [1.0, 0.5]
    pieces, at = [], begin
    for number, share in enumerate(shares):
        last = number == len(shares) - 1
        length = end - at if last else int(share / sum(shares) * (end - begin)) // 256 * 256
        if length > 0:
            pieces.append((at, length))
        at += max(0, length)
    return pieces


@cache
def sums_of(group: Any, limit: float = LIMIT) -> HostSums:
    """The sums of a group of GPUs. All ranks make the first call together, and not while a CUDA graph is captured.

    Raises:
        ConfigError: see ``open_memory``, and ``compiled.Gpu``.
    """
    device = torch.cuda.current_device()
    sums = HostSums(open_memory(group, device, limit), compiled.Gpu(dist.get_world_size(group)))
    torch.cuda.synchronize()
    dist.barrier(group)  # no rank starts before all have mapped the memory
    return sums


def starter(group: Any, format: Format | None, otherwise: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """What starts a sum on a stream of its own; a tensor that is not supported goes to ``otherwise``.

    Raises:
        ConfigError: the ranks cannot share memory of the host.
    """
    if not torch.cuda.is_available():
        raise ConfigError("sums through the host are for GPUs", "Use nccl, which is gloo on CPUs.")
    sums, stream = sums_of(group), _stream(group)
    return in_place(sums, lambda x, run: OnStream(stream, x, run), format, otherwise)


@cache
def _stream(group: Any) -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=-1)


def in_place(
    sums: HostSums,
    begin: Callable[[Tensor, Callable[[], None]], Any],
    format: Format | None,
    otherwise: Callable[[Tensor], Any],
) -> Callable[[Tensor], Any]:
    """What replaces a tensor by its sum, by work that ``begin`` starts; see ``starter``."""

    def start(x: Tensor) -> Any:
        if not sums.supports(x):
            return otherwise(x)
        values = x.detach()
        return begin(values, lambda: sums.all_reduce(values, values, format=format))

    return start
