"""Encodes rows for communication, with 2 to 8 bits per value; one record of bytes holds one row.

Source: FlashCommunication V2, section 3: round to nearest per group, bit splitting, spike reserving, integer scales.
docs/slow_links.md explains the formats and says what each of them costs.

``encode`` turns rows ``[n, width]`` into records, uint8 ``[n, row_bytes]``; ``decode`` turns records back into rows.
On GPUs both are Triton kernels (``kernels``), elsewhere torch (``reference``); the two agree in every bit.

A record consists of these parts, in this order, without gaps:

    planes    the codes, b bits per value: the highest bits first, in planes of 8, 4, 2 and 1 bits (7 = 4 + 2 + 1);
              in a plane of p bits, byte i holds values i * 8/p to (i + 1) * 8/p - 1, the first in the lowest bits
    scales    per group: the step between two codes, bf16, or one byte that stands for 2^((byte - 128) / 10)
    zeros     per group: the value of code 0, bf16, or the code of value 0, one byte
    spikes    with spike reserving: the least value of each group, then the greatest of each group, bf16
    indices   with spike reserving: the places of these values in their groups, in the same order: whole
              numbers of two bytes beside bf16 scales, of one byte beside integer scales
    padding   zeros, up to a multiple of 16 bytes

Numbers of two bytes are little-endian.

- A group that contains a value which is not finite decodes to NaN in all its values. So does a group whose range the
  scale cannot express. Nothing is clipped silently.
- Values below the least normal number (2^-126) and negative zero are encoded as zero.
"""

from fcsd.kernels.bit_split.codec import decode, encode
from fcsd.kernels.bit_split.format import Format

__all__ = ["Format", "decode", "encode"]
