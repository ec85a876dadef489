"""Compiles every Triton kernel of fcsd for a GPU that is not there; ``test_compile.py`` runs this file.

Triton's interpreter accepts programs that its compiler refuses. The compiler needs no GPU: only the driver, which says
for which GPU it compiles, takes a double here. Arguments are tensors on the CPU, and nothing is launched.

    python tests/kernels/compiled.py BACKEND ARCHITECTURE THREADS_OF_A_WARP [once]     for example: cuda 90 32

With ``once`` each kernel is compiled for the first of its calls alone, otherwise for every format, type and width here.
The last line of the output is a JSON list of the kernels that were compiled.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fcsd.kernels import adamw, copies, few_experts, gated, latent, rotary, rows, vocabulary
from fcsd.kernels.bit_split import Format, kernels


class Driver:
    """What Triton asks its driver before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def compile_all(target: GPUTarget, once: bool) -> list[str]:
    """The names of the kernels, all compiled for ``target``: for the first call of each where ``once``, or for all."""
    triton.runtime.driver.set_active(Driver(target))  # type: ignore[arg-type]
    kernels: set[JITFunction] = set()
    run = JITFunction.run
    room = 232448 if target.backend == "cuda" else 65536  # bytes of shared memory of an H100, and of an MI300X
    few_experts.shared_memory = lambda device: room

    def compile_only(kernel: JITFunction, *args: Any, **options: Any) -> Any:
        if once and kernel in kernels:
            return None  # what a launch gives is not read
        kernels.add(kernel)
        found: Any = run(kernel, *args, **options | {"warmup": True})
        used = found.metadata.shared
        assert used <= room, f"{kernel.fn.__name__} needs {used} bytes of shared memory"
        return found

    JITFunction.run = compile_only  # type: ignore[method-assign]
    losses()
    token_rows()
    elementwise()
    records()
    return sorted({kernel.fn.__name__ for kernel in kernels})


def losses() -> None:
    logits, scale, how = torch.zeros(4, 1000), torch.ones(()), vocabulary.Launch()
    gradient = torch.zeros(4, 1000, dtype=torch.bfloat16)
    vocabulary.divergence(logits, logits, gradient, scale, 1.0, how)
    vocabulary.divergence(logits, logits, None, scale, 1.0, how)
    vocabulary.negative_log_likelihood(logits, torch.zeros(4, dtype=torch.int64), gradient, scale, how)
    vocabulary.multiply_(gradient, scale)


def token_rows() -> None:
    tokens, out = torch.zeros(8, 2048, dtype=torch.bfloat16), torch.zeros(48, 2048, dtype=torch.bfloat16)
    row_of, weight = torch.zeros(8, 6, dtype=torch.int64), torch.zeros(8, 6)
    for each in (weight, None):
        rows.spread(tokens, each, row_of, out)
        rows.collect(out, each, row_of, tokens)
    rows.dots(tokens, out, row_of)
    gate_up, down = torch.zeros(4, 2816, 2048, dtype=torch.bfloat16), torch.zeros(4, 2048, 1408, dtype=torch.bfloat16)
    for count in (1, 64):
        few_experts.few_experts(
            tokens.repeat(8, 1)[:count], row_of.repeat(8, 1)[:count], weight.repeat(8, 1)[:count], gate_up, down
        )
    records = torch.zeros(16, 64, dtype=torch.bfloat16)
    weights, experts = records.view(torch.float32)[:, :6], records.view(torch.int16)[:, 20:26]
    for chosen in (row_of, torch.zeros(8, 64, dtype=torch.int16)[:, 1:7]):
        copies.write_tails(weights, experts, weight, copies.number_copies(chosen, 4, 16, 6))


def elementwise() -> None:
    both = torch.zeros(4, 2048, dtype=torch.bfloat16).requires_grad_()
    gated.gated_silu_halves(both).sum().backward()
    heads = both.view(1, 4, 16, 128)
    for pairs, half in ((rotary.HALVES, 64), (rotary.Pairs(64, True, True), 32), (rotary.Pairs(64, True), 32)):
        turned = rotary.rotate(heads, heads[:, :1], *torch.zeros(2, 1, 16, half, dtype=torch.bfloat16), pairs)
        sum(x.sum() for x in turned).backward()
    keys, values = latent.expand(both.view(1, 4, 8, 256), torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16), 128)
    (keys.sum() + values.sum()).backward()
    weight = torch.zeros(4096, dtype=torch.bfloat16)
    kept = adamw.Moments(*(torch.zeros(4096) for _ in range(3)))
    adamw.launch(weight, weight, kept, torch.ones(4), adamw.Rates(1e-3, 0.9, 0.95, 1e-8, 0.1))


def records() -> None:
    x = torch.zeros(4, 2048, dtype=torch.bfloat16)
    places, weight = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)
    for text in ("int5:g64:int", "int3:g32:sr"):  # both kinds of scales; planes of two widths
        format = Format.parse(text)
        kernels.encode(x, format)
        packed = kernels.encode(x, format, weight=weight, places=places, count=8)
        kernels.decode(packed, format, 2048, torch.bfloat16, source=places[:, 0])
        kernels.decode_sum(packed, format, 2048, torch.bfloat16, weight, places)
        kernels.encode_sum(packed.view(2, 4, -1), format, 2048, packed[:4])
        kernels.decode(packed, format, 2048, torch.bfloat16, ranks=2)
    kernels.decode_dots(packed, format, x, places)


if __name__ == "__main__":
    backend, architecture, warp, *how = sys.argv[1:]
    known = int(architecture) if architecture.isdigit() else architecture
    print(json.dumps(compile_all(GPUTarget(backend, known, int(warp)), how == ["once"])))
