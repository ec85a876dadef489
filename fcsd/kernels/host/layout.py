"""How ranks use memory that all of them have mapped, and why no value is torn, stale or overwritten.

Memory of the host begins with a control page. Then each rank has a region, which only this rank writes; all read it.
Four protocols have parts of their own in a region, so none sees another's flags:

    one shot   two slots of lines of 16 bytes: four bytes of values, the number of the call, and both once more
    blocks     two slots for values and two for sums, a flag for each block and step
    codes      two slots for codes and scales and two for those of sums, a flag for each block and step
    exchange   one slot, which copy engines fill and empty in pieces, a flag for each piece, and one for "done"

The kernels of the first two take the address of such a part of each rank, wherever it lies. So they also work in memory
of GPUs that can access each other's (``parallel.all_reduce.symmetric``). In one shot a rank then writes into a part of
its own in the memory of every other rank, so that nobody waits across the link. The control page stays in the host's.

**Torn.** A GPU moves each aligned half of a line as one access (NCCL's LL protocol relies on the same). In one shot
each half has the number of the call, so a half that has arrived says so by itself, and nothing has to be fenced. In
the other protocols a flag is stored with release semantics and loaded with acquire semantics, both for the whole
system. One thread of a block does either, between barriers of the block. In PTX's memory model a release also orders
what other threads have stored before the barrier, and an acquire what they load behind it, so they need no fences
of their own; what the whole block fenced took 3 to 4 microseconds of a sum. Loads are volatile and miss the caches.

**Stale.** The number of a call rises by one with each call of a protocol and is stored on the device, one for each
block, so a captured CUDA graph can be replayed. Every launch has the same number of blocks, and a block without work
counts, too. So all blocks of all ranks agree on the number as long as all ranks make the same calls in the same
order, whatever the sizes. A slot has the values of the call before the last one, so a number is compared for
equality, and may wrap; what is seldom written is written anew every million calls, long before an old number could
come again.

**Overwritten.** In one shot, blocks and codes, call n uses slot n mod 2. A rank that starts call n + 2 has ended call
n + 1, for which it has read something from every other rank that was written in *its* call n + 1; that rank has
therefore ended call n and read the slot. So a rank that has no share of what is summed has to read all of it. In blocks
and codes it awaits all flags of a block that has work, as the first one always has. Slots of sums are written and read
within the same calls. In the exchange a rank fills its slot after all others have said that they are done with the call
before. This needs the calls of one protocol to follow each other on the device: all calls of a rank are on one stream,
or on streams that wait for each other.

**It ends.** Every wait looks at the control page and at a clock. If it lasted too long, or a rank is known to be
lost, the kernel notes it and stops with an error, which no later call of this process survives
(``parallel.all_reduce.host``).
"""

from dataclasses import dataclass

MOST_RANKS = 8
CONTROL = 4096  # bytes of the control page
LOST, STOPPED = 0, 4  # offsets in it: the lost rank + 1, and a word for each rank that was stopped by it
ONE_SHOT = 128 << 10  # the most bytes of values in one shot; they take twice as much room
BLOCKS = 2 << 20  # the most bytes of values in blocks
CODES = 4608 << 10  # the most bytes of a rank's codes and scales
EXCHANGE = 68 << 20  # the most bytes that a rank shows the others at once
PIECES = 64  # flags of the exchange
# Blocks of every launch and threads of a block. They wait beside other work, so they are as few as keep the link busy:
# those that let a step beside them be, of what was tried (benchmarks/results/sums_beside_steps_2xh200.json).
LAUNCH = {"one_shot": (16, 512), "in_blocks": (8, 256), "in_codes": (16, 512)}
# Groups of codes of a block, whose scales lie in shared memory: 128 bytes and four for their scale and zero.
GROUPS = -(-CODES // (132 * 4 * LAUNCH["in_codes"][0])) * 4
_FLAG = 64  # bytes between two flags, so that each has a line of the cache for itself


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes in the region of a rank; ``region`` is its size."""

    one_shot: int = 0
    blocks: int = 4 * ONE_SHOT
    codes: int = blocks + 4 * BLOCKS + 2 * 64 * _FLAG
    piece_flags: int = codes + 4 * CODES + 2 * 64 * _FLAG
    done: int = piece_flags + PIECES * _FLAG
    exchange: int = -(-(done + _FLAG) // 4096) * 4096
    region: int = exchange + EXCHANGE

    def piece_flag(self, piece: int) -> int:
        """The flag of a piece of the exchange."""
        return self.piece_flags + _FLAG * piece


LAYOUT = Layout()


def total_bytes(ranks: int) -> int:
    """The memory of all ranks."""
    return CONTROL + ranks * LAYOUT.region
