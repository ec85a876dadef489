"""What data sheets say of the GPUs that serve models: memory, its bandwidth, and the rate of dense products in bf16.

A prediction scales what was measured on an H100 by these figures.
"""

import re
from typing import NamedTuple


class Card(NamedTuple):
    """A GPU.

    Attributes:
        name: as people call it.
        memory_gb: memory as sold, 10^9 bytes.
        read_gb_per_s: bandwidth of its memory, 10^9 bytes per second.
        tflops: dense products in bf16 that are summed in fp32, 10^12 operations per second (fp16 for a V100).
        pcie_gb_per_s: its link to the host in one direction, 10^9 bytes per second, with 16 lanes.
        known: whether it stands in the table; otherwise its rates are an H100's.
    """

    name: str
    memory_gb: float
    read_gb_per_s: float
    tflops: float
    pcie_gb_per_s: float = 32
    known: bool = True


H100 = Card("H100", 80, 3350, 989, 64)
# The first pattern that is found in the name that the driver tells; longer names stand before those that begin alike.
_CARDS = (
    (r"B200", Card("B200", 180, 8000, 2250, 64)),
    (r"H200", Card("H200", 141, 4800, 989, 64)),
    (r"H100 NVL", Card("H100 NVL", 94, 3900, 835, 64)),
    (r"H100 PCIe", Card("H100 PCIe", 80, 2000, 756, 64)),
    (r"H100", H100),
    (r"H20\b", Card("H20", 96, 4000, 148, 64)),
    (r"A100.*80GB PCIe", Card("A100 PCIe 80 GB", 80, 1935, 312)),
    (r"A100.*80", Card("A100 80 GB", 80, 2039, 312)),
    (r"A100", Card("A100 40 GB", 40, 1555, 312)),
    (r"L40S", Card("L40S", 48, 864, 362)),
    (r"L40", Card("L40", 48, 864, 181)),
    (r"L20\b", Card("L20", 48, 864, 119)),
    (r"L4\b", Card("L4", 24, 300, 121)),
    (r"A40\b", Card("A40", 48, 696, 150)),
    (r"A30\b", Card("A30", 24, 933, 165)),
    (r"A10G?\b", Card("A10", 24, 600, 125)),
    (r"A6000", Card("RTX A6000", 48, 768, 155)),
    (r"RTX PRO 6000", Card("RTX PRO 6000", 96, 1792, 503, 64)),
    (r"RTX 6000 Ada", Card("RTX 6000 Ada", 48, 960, 364)),
    (r"5090", Card("RTX 5090", 32, 1792, 209, 64)),
    (r"4090", Card("RTX 4090", 24, 1008, 165)),
    (r"3090", Card("RTX 3090", 24, 936, 71)),
    (r"V100", Card("V100", 32, 900, 125, 16)),
)
NAMES = tuple(card.name for _, card in _CARDS)


def card_of(name: str, memory_gb: float | None = None) -> Card:
    """The card with this name of a driver, or of a user (``4090``); another one gets the rates of an H100.

    Args:
        memory_gb: what the machine says of the memory; it goes before the data sheet.
    """
    words = re.sub(r"[-_]", " ", name)
    found = next((card for pattern, card in _CARDS if re.search(pattern, words, re.IGNORECASE)), None)
    card = found or H100._replace(name=name, known=False)
    return card if memory_gb is None else card._replace(memory_gb=memory_gb)
