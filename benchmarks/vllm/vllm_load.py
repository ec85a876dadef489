"""``fcsd bench serve`` with random arrivals for the bound and for sums at once, too, and without alternatives.

    python benchmarks/vllm/vllm_load.py llama3-8b --layers 16 --tp 2 ...

The words are those of ``fcsd bench serve``, whose own loads are for what a user would serve.
"""

import sys

from fcsd.bench.serve import under_vllm
from fcsd.cli.main import main as fcsd


def main() -> None:
    """Run ``fcsd bench serve`` with these variants."""
    under_vllm.UNDER_LOAD = ("original", "wired", "way", "bound")
    under_vllm.alternatives = lambda *_, **__: ([], {})
    sys.argv[1:1] = ["bench", "serve"]
    fcsd()


if __name__ == "__main__":
    main()
