"""Integer scales: one byte stands for a step between codes, 2^((byte - 128) / 10), and is found without a logarithm.

FlashCommunication V2, section 3.3, stores ``floor(log2(step) * theta)`` with theta = 10. The last bits
of a logarithm differ between libraries and devices. Here the exponent of the step gives a multiple of ten, and a
comparison of its mantissa with those of 2^(j/10) gives the rest j. The byte is therefore the same everywhere.
"""

import torch
from torch import Tensor

from fcsd.kernels.bit_split.format import Rounding

# The mantissa bits of 2^(j/10) in fp32, j = 0..9.
MANTISSAS = (0, 602079, 1247372, 1938980, 2680227, 3474675, 4326144, 5238726, 6216807, 7265088)
HALF_CODE = 1.0352649688720703  # 2^(1/20) in fp32: half the distance between two codes, on the logarithmic scale
GREATEST = 254  # a step of about 6208; 255 marks a group that decodes to NaN
BROKEN = 255


def code_of(step: Tensor, rounding: Rounding) -> Tensor:
    """The scale byte, int32, of steps, fp32, that are not negative. The result may be outside of 0 to 254."""
    if rounding == "nearest":
        step = step * HALF_CODE
    bits = step.view(torch.int32)
    if rounding == "ceil":
        bits = bits - 1  # the next lower number, whose code is the last one below the step; 1 is added
    mantissa = bits & 0x7FFFFF
    code = ((bits >> 23) - 127) * 10 + 128 + (1 if rounding == "ceil" else 0)
    for bound in MANTISSAS[1:]:
        code = code + (mantissa >= bound).int()
    return code


def step_of(code: Tensor) -> Tensor:
    """The step, fp32, for which a scale byte from 0 to 254 stands."""
    tens = code.int() + 2  # 128 + 2 is a multiple of 10
    mantissa = torch.tensor(MANTISSAS, dtype=torch.int32, device=code.device)[(tens % 10).long()]
    return (((tens // 10 + 114) << 23) | mantissa).view(torch.float32)  # 114 = 127 - 130 / 10, with the bias 127
