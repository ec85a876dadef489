"""``fcsd bench serve`` with random arrivals for the bound and for sums at once, too, and a second original.

    python -m benchmarks.vllm load llama3-8b --layers 16 --tp 2 ...

The words are those of ``fcsd bench serve``, whose own loads are for what a user would serve. Alternatives are left out.
The second original is the control: steps without a graph wait for the host, whose pace differs from server to server.
ONLY in the environment has the names of the variants that are timed, between semicolons, and SECONDS_OF_LOAD how long
requests arrive.
"""

import os
import sys
from dataclasses import replace
from typing import Any

from fcsd.bench.serve import under_vllm, variants
from fcsd.cli.main import main as fcsd

ARGUMENTS = None


def main(given: Any) -> None:
    """Run ``fcsd bench serve`` with these variants."""
    under_vllm.UNDER_LOAD = ("original", "wired", "way", "bound")
    under_vllm.LOAD_SECONDS = int(os.environ.get("SECONDS_OF_LOAD", under_vllm.LOAD_SECONDS))
    under_vllm.core = _with_control
    under_vllm.alternatives = lambda *_, **__: ([], {})
    sys.argv[1:] = ["bench", "serve", *given.words]
    fcsd()


def _with_control(*given: Any, **named: Any) -> list[variants.Variant]:
    first, *others = variants.core(*given, **named)
    every = [first, *others, replace(first, name="original, again", role="way")]
    only = os.environ.get("ONLY")
    return every if only is None else [variant for variant in every if variant.name in only.split(";")]
