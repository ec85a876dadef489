"""How fast are the kernels of a decoding step, beside what they replace and the time of reading their input?

    python -m benchmarks.kernels.decode [SHAPE...] [--tokens 1 4 16 64] [--keys 1024] [--out FILE]

``experts`` are the routed experts of one layer by ``kernels.decode.experts``, beside grouped products. ``latents`` are
the attention of one token of each row to latents (MLA) without expanding them, beside the attention to expanded ones.
Both have the dimensions of a SHAPE in ``fcsd.bench.shapes``, random values in bf16, and experts that are chosen at
random.

The ways run in turns, as CUDA graphs of several calls with different weights or latents, most of which do not fit into
the GPU's cache. The bound is the time of reading the weights of the chosen experts, or the latents, at the speed of a
copy.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from benchmarks.kernels.rates import copy_rate
from benchmarks.out_file import out_file
from benchmarks.turns import timings
from torch import Tensor
from transformers import PretrainedConfig

from fcsd.bench.runner import table, write
from fcsd.bench.shapes import SHAPES
from fcsd.engine.attention import attend_to_latents
from fcsd.kernels.decode.attention import decode_attention
from fcsd.kernels.decode.experts import few_experts
from fcsd.kernels.latent import expand
from fcsd.launch.environment import snapshot
from fcsd.models.build import experts_of
from fcsd.models.fused.experts import fused_experts

SETS = 3  # calls of a graph, each with other weights or latents
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


def latents(config: Any, rows: int, keys: int, device: torch.device, dtype: torch.dtype) -> tuple[Ways, float]:
    """The ways of attending to latents, the projections before and after included, and the bytes of the latents."""
    draw = _generator(device, dtype)
    heads, rank, own = config.num_attention_heads, config.kv_lora_rank, config.qk_nope_head_dim
    rotated, value = config.qk_rope_head_dim, config.v_head_dim
    matrix = draw(heads * (own + value), rank) / rank**0.5
    module = SimpleNamespace(
        qk_nope_head_dim=own, kv_lora_rank=rank, v_head_dim=value, kv_b_proj=SimpleNamespace(weight=matrix)
    )
    query = draw(rows, heads, 1, own + rotated)
    caches = [(draw(rows, 1, keys, rank), draw(rows, 1, keys, rotated)) for _ in range(SETS)]
    ranges = torch.tensor([[[[0, keys - 1]]]], device=device)
    scale = (own + rotated) ** -0.5

    def expanded(number: int) -> Tensor:
        latent, shared = caches[number]
        projected = (latent @ matrix.T).view(rows, keys, heads, own + value)
        return decode_attention(query[:, :, 0], *expand(projected, shared, own), ranges[:, 0, 0], scale)

    def kept(number: int) -> Tensor:
        return attend_to_latents(module, query, *caches[number], ranges, scaling=scale)[0][:, 0]

    return {"kernels": kept, "replaced": expanded}, rows * keys * (rank + rotated) * dtype.itemsize


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


def cases(config: PretrainedConfig, tokens: int, keys: int, **where: Any) -> dict[str, tuple[Ways, float]]:
    """The kernels that a model of this config uses, with their ways and the bytes that they have to read."""
    found = {"experts": experts(config, tokens, **where)}
    if getattr(config, "kv_lora_rank", None):
        found["latents"] = latents(config, tokens, keys, **where)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    known = [name for name, make in SHAPES.items() if getattr(make(1), "moe_intermediate_size", None)]
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"from {', '.join(known)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64], help="up to 1024 / top_k")
    parser.add_argument("--keys", type=int, default=1024, help="latents of each row")
    parser.add_argument("--out", type=out_file, help="write all figures as JSON")
    given = parser.parse_args()
    shapes = given.shapes or ["deepseek-v2-lite", "qwen3-30b-a3b"]
    for name in shapes:
        if name not in known:
            parser.error(f"no MoE shape {name}: {', '.join(known)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks.kernels.decode times kernels on a GPU, and this machine has none")
    copies = copy_rate(torch.empty(COPIED, dtype=torch.uint8, device="cuda"))
    result: dict[str, Any] = {"environment": snapshot(), "copies_bytes_per_s": copies, "keys": given.keys, "rows": []}
    rows: dict[str, dict[str, str | None]] = {}
    for name in shapes:
        for tokens in given.tokens:
            found = cases(SHAPES[name](1), tokens, given.keys, device=torch.device("cuda"), dtype=torch.bfloat16)
            for kernel, case in found.items():
                row = measure(*case, copies)
                result["rows"].append({"shape": name, "kernel": kernel, "tokens": tokens, **row})
                gain = row["replaced"] / row["kernels"]
                figures = {key: f"{row[key]:.1f}" for key in ("kernels", "replaced", "bound")}
                rows[f"{kernel} of {name}, {tokens} rows"] = {**figures, "x replaced": f"{gain:.2f}"}
                write(result, given.out)
            del found
    print(table(rows, "microseconds"))


if __name__ == "__main__":
    main()
