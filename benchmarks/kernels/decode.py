"""How fast are the kernels of routed experts in a decoding step, beside what they replace and reading their weights?

    python -m benchmarks.kernels.decode [SHAPE...] [--tokens 1 4 16 64] [--out FILE]

The routed experts of one layer by ``kernels.few_experts``, beside grouped products, with the dimensions of a SHAPE
in ``fcsd.bench.shapes``, random values in bf16, and experts that are chosen at random.

The ways run in turns, as CUDA graphs of several calls with different weights, most of which do not fit into the GPU's
cache. The bound is the time of reading the weights of the chosen experts at the speed of a copy.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.kernels.rates import copy_rate
from benchmarks.out_file import out_file
from benchmarks.turns import timings
from torch import Tensor

from fcsd.bench.runner import table, write
from fcsd.bench.shapes import SHAPES
from fcsd.kernels.few_experts import few_experts
from fcsd.launch.environment import snapshot
from fcsd.models.build import experts_of
from fcsd.models.fused import fused_experts

SETS = 3  # calls of a graph, each with other weights
REPEATS = 9
COPIED = 2**30  # bytes

Ways = dict[str, Callable[[int], Tensor]]  # name -> a function of the number of a set


def experts(config: Any, tokens: int, device: torch.device, dtype: torch.dtype) -> tuple[Ways, float]:
    """The ways of computing routed experts, and the bytes of weights that a call has to read."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    draw = _generator(device, dtype)
    count, top_k = experts_of(config), config.num_experts_per_tok
    x, scores = draw(tokens, hidden), draw(tokens, top_k).abs().float()
    weights = [
        (draw(count, 2 * inner, hidden) / hidden**0.5, draw(count, hidden, inner) / inner**0.5) for _ in range(SETS)
    ]
    chosen = [draw(tokens, count).argsort(1)[:, :top_k].contiguous() for _ in range(SETS)]
    ways: Ways = {
        "kernels": lambda number: few_experts(x, chosen[number], scores, *weights[number]),
        "replaced": lambda number: fused_experts(x, chosen[number], scores, *weights[number]),
    }
    read = statistics.mean(len(each.unique()) for each in chosen)
    return ways, read * 3 * inner * hidden * dtype.itemsize


def measure(ways: Ways, read: float, copies: float) -> dict[str, float]:
    """Microseconds of a call of each way, ``bound`` among them.

    Args:
        read: the bytes that a call has to read.
        copies: the bytes that a copy within the GPU reads and writes in a second.
    """
    graphs = {name: _captured(way).replay for name, way in ways.items()}
    found = {name: each.median * 1e3 / SETS for name, each in timings(graphs, torch.device("cuda"), REPEATS).items()}
    return {**found, "bound": read / copies * 1e6}


def _captured(way: Callable[[int], Tensor]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # Triton compiles kernels, which is not allowed during a capture
        way(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(SETS):
            way(number)
    return graph


def _generator(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator, device=device, dtype=dtype)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = [name for name, make in SHAPES.items() if getattr(make(1), "moe_intermediate_size", None)]
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"from {', '.join(known)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64], help="up to 1024 / top_k")
    parser.add_argument("--out", type=out_file, help="write all figures as JSON")
    given = parser.parse_args()
    shapes = given.shapes or ["deepseek-v2-lite", "qwen3-30b-a3b"]
    for name in shapes:
        if name not in known:
            parser.error(f"no MoE shape {name}: {', '.join(known)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels.decode times kernels on a GPU, and this machine has none")
    copies = copy_rate(torch.empty(COPIED, dtype=torch.uint8, device="cuda"))
    result: dict[str, Any] = {"environment": snapshot(), "copies_bytes_per_s": copies, "rows": []}
    rows: dict[str, dict[str, str | None]] = {}
    for name in shapes:
        for tokens in given.tokens:
            ways, read = experts(SHAPES[name](1), tokens, device=torch.device("cuda"), dtype=torch.bfloat16)
            row = measure(ways, read, copies)
            del ways
            result["rows"].append({"shape": name, "kernel": "experts", "tokens": tokens, **row})
            gain = row["replaced"] / row["kernels"]
            figures = {key: f"{row[key]:.1f}" for key in ("kernels", "replaced", "bound")}
            rows[f"{name}, {tokens} rows"] = {**figures, "x replaced": f"{gain:.2f}"}
            write(result, given.out)
    print(table(rows, "microseconds"))


if __name__ == "__main__":
    main()
