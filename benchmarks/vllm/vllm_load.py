"""``fcsd bench serve`` with random arrivals for the bound and for sums at once, too, and a second original.

    python benchmarks/vllm/vllm_load.py llama3-8b --layers 16 --tp 2 ...

The words are those of ``fcsd bench serve``, whose own loads are for what a user would serve. Alternatives are left out.
The second original is the control: steps without a graph wait for the host, whose pace differs from server to server.
"""

import sys
from dataclasses import replace
from typing import Any

from fcsd.bench.serve import under_vllm, variants
from fcsd.cli.main import main as fcsd


def main() -> None:
    """Run ``fcsd bench serve`` with these variants."""
    under_vllm.UNDER_LOAD = ("original", "wired", "way", "bound")
    under_vllm.core = _with_control
    under_vllm.alternatives = lambda *_, **__: ([], {})
    sys.argv[1:1] = ["bench", "serve"]
    fcsd()


def _with_control(*given: Any) -> list[variants.Variant]:
    first, *others = variants.core(*given)
    return [first, *others, replace(first, name="original, again", role="way")]


if __name__ == "__main__":
    main()
