"""The kind ``copies``: all-reduces between the GPUs of one host by copy engines, with one small kernel for the sum.

Every rank has a buffer with room for a share of the values of each rank, and for its own sums. For reduction n it

    copies its share of each peer's values into the peer's buffer, and sets flag ARRIVED to n there
    waits until all peers have set flag ARRIVED to n here, sums its own share, and sets flag SUMMED to n at all peers
    waits for each peer's flag SUMMED, and copies the peer's sums out of its buffer

All of it runs on one stream. Two such buffers are used in turn: a rank starts reduction n + 2 after all peers have
summed in reduction n + 1, and they did so after they had copied the sums of reduction n.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fcsd.kernels.all_reduce.memory import require_dtype
from fcsd.kernels.all_reduce.shares import sum_share
from fcsd.parallel.all_reduce import symmetric
from fcsd.parallel.all_reduce.window import required_buffers, window_of
from fcsd.parallel.transports.copies import ARRIVED, PeerBuffers
from fcsd.parallel.transports.transport import Work

SUMMED = 1
_IN_TURN = 2
PIECE = 32 * 2**20  # bytes of a rank's values in one exchange
_ALIGNMENT = 512  # bytes; the size of each share is a multiple


def share_bytes(size: int, ranks: int) -> int:
    """The size of each rank's share of ``size`` bytes; the last shares may be smaller or empty."""
    return -(-size // (ranks * _ALIGNMENT)) * _ALIGNMENT


def capacity(piece: int, ranks: int) -> int:
    """The size in bytes of the buffer that reductions in pieces of ``piece`` bytes need."""
    return _IN_TURN * (ranks + 1) * share_bytes(piece, ranks)


class Copies:
    """The reductions of one group.

    Args:
        peers: buffers of ``capacity(piece, ranks)`` bytes.
        piece: the most bytes of a rank's values in one exchange.
    """

    def __init__(self, peers: PeerBuffers, piece: int = PIECE) -> None:
        self._peers, self._piece, self._number = peers, piece, 0

    def __call__(self, x: Tensor) -> Work:
        """Start to replace ``x``, contiguous, by its sum over the ranks. Every rank gets the same bits.

        Raises:
            ConfigError: the dtype is not bf16, fp16 or fp32.
        """
        require_dtype(x)
        for piece in x.detach().view(-1).split(self._piece // x.element_size()):
            with self._peers.sending():
                self._reduce(piece)
        return _Kept(self._peers.work(), x)

    def _reduce(self, x: Tensor) -> None:
        peers, me, ranks = self._peers, self._peers.rank, self._peers.size
        self._number += 1
        share = share_bytes(x.nbytes, ranks)
        start = self._number % _IN_TURN * (ranks + 1) * share_bytes(self._piece, ranks)
        # Shares begin where they would in a whole number of shares, so those of the last ranks may be empty.
        shares = [x[rank * share // x.element_size() :][: share // x.element_size()] for rank in range(ranks)]

        def part(of: int, place: int, like: Tensor) -> Tensor:
            """What lies at a place of the buffer of rank ``of``, in the dtype and number of ``like``."""
            return peers.buffers[of].narrow(0, start + place * share, like.nbytes).view(x.dtype)

        others = [(me + step) % ranks for step in range(1, ranks)]
        for peer in others:
            part(peer, me, shares[peer]).copy_(shares[peer])
            peers.set_flag(peer, ARRIVED, self._number)
        for peer in others:
            peers.await_flag(peer, ARRIVED, self._number)
        arrived = peers.buffers[me].narrow(0, start, ranks * share).view(x.dtype).view(ranks, -1)
        sum_share(shares[me], arrived, me, out=part(me, ranks, shares[me]))
        for peer in others:
            peers.set_flag(peer, SUMMED, self._number)
        for peer in others:
            peers.await_flag(peer, SUMMED, self._number)
            shares[peer].copy_(part(peer, ranks, shares[peer]))


class _Kept:
    """Work, and a tensor that it uses, whose memory may belong to another stream."""

    def __init__(self, work: Work, tensor: Tensor) -> None:
        self._work, self._tensor = work, tensor

    def wait(self) -> None:
        """See ``Work``."""
        self._work.wait()
        del self._tensor


def all_reduce(x: Tensor, group: Any) -> Work:
    """Start to replace ``x`` by its sum over the ranks, in place. Every rank gets the same bits.

    In a CUDA graph that is being captured, it is reduced as by ``symmetric``: a stream cannot wait for another number
    in each replay.

    Args:
        x: bf16, fp16 or fp32 of any shape, contiguous. Nothing else may use it until the work was awaited.
        group: GPUs of one host.

    Raises:
        ConfigError: the GPUs cannot access each other's memory, or the dtype is another one.
    """
    if torch.cuda.is_current_stream_capturing():
        return symmetric.all_reduce(x, group)
    return prepare(group)(x)


@cache
def prepare(group: Any) -> Copies:
    """The reductions of a group. All ranks make the first call together.

    Raises:
        ConfigError: the GPUs cannot access each other's memory, or it does not suffice.
    """
    ranks = window_of(group).memory.size
    return Copies(required_buffers(group, capacity(PIECE, ranks)))
