"""Random arrivals for the bound and for other ways to sum as well, and for sums in flight from fewer tokens on.

    python benchmarks/vllm/vllm_load.py 256,1024 llama3-8b --layers 16 --tp 2 ...

This is ``fcsd bench serve`` with the words behind the first. For each number of tokens in the first word there is
one more variant: the wiring with that ``overlap_from``. What a user would do instead of converting is left out.
"""

import sys
from typing import Any

from fcsd.bench.serve import under_vllm, variants
from fcsd.cli.main import main as fcsd


def main() -> None:
    """Run ``fcsd bench serve`` with these variants."""
    numbers = [int(word) for word in sys.argv[1].split(",")]
    told: Any = {f"overlap from {number} tokens": {"overlap_from": number} for number in numbers}
    under_vllm.UNDER_LOAD = ("original", "wired", "way", "bound")
    under_vllm.core = lambda wirings, ways, _: variants.core(wirings, ways, told)
    under_vllm.alternatives = lambda *_, **__: ([], {})
    sys.argv[1:2] = ["bench", "serve"]
    fcsd()


if __name__ == "__main__":
    main()
