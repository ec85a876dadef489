"""Times the way of rows from tokens to experts: pack them, send them, order them for the experts.

Every token has ``TOP_K`` rows. Each rank packs its rows by destination, exchanges them, and orders what arrives by
expert. The ways are

    bf16               a kernel packs rows of bf16, the wire carries them, a kernel orders them
    FORMAT, steps      the same, and a kernel encodes before the wire, and one decodes after it
    FORMAT, fused      one kernel packs and encodes, one decodes and orders
    FORMAT, wire       the exchange of the records alone; ``bf16, wire`` of the rows

The fused way is compared with the one in steps first, bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.sent import bits_sent
from benchmarks.turns import Timing, timings
from torch import Tensor

from fcsd.bench.runner import table
from fcsd.errors import FcsdError
from fcsd.kernels import rows_reference
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.kernels.bit_split.moves import decode_from, encode_at
from fcsd.launch.world import World
from fcsd.parallel.transports.transport import Splits, Transport, splits_of

WIDTH, TOP_K, EXPERTS = 2048, 6, 64  # DeepSeek-V2-Lite
# Which experts tokens choose: any, so that a share of 1 / ranks of all rows stays at home, or only other ranks'.
SCENARIOS = ("any expert", "experts elsewhere")


@dataclass(frozen=True)
class Routed:
    """The rows of one rank.

    Attributes:
        tokens: bf16 ``[tokens, WIDTH]``.
        places: ``[tokens, TOP_K]``, the number of each row among those that are sent.
        source: ``[received]``, the number among those that arrive of each row in the order of the experts.
        splits: the sizes of the exchange.
    """

    tokens: Tensor
    places: Tensor
    source: Tensor
    splits: Splits


def route(world: World, tokens: int, scenario: str) -> Routed:
    """Let tokens choose ``TOP_K`` different experts at random. All ranks make this call."""
    slots = EXPERTS // world.size
    generator = torch.Generator().manual_seed(world.rank)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if scenario == "experts elsewhere":
        scores[:, world.rank * slots : (world.rank + 1) * slots] = -1
    chosen = scores.topk(TOP_K).indices.flatten()
    counts = [torch.zeros(EXPERTS, dtype=torch.long) for _ in range(world.size)]
    dist.all_gather_object(counts, chosen.bincount(minlength=EXPERTS))
    everyone = torch.stack(counts).view(world.size, world.size, slots)
    splits = splits_of(everyone.sum(dim=2).tolist(), world.rank)
    order = chosen.argsort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(tokens, TOP_K)
    arriving = torch.arange(slots).repeat(world.size).repeat_interleave(everyone[:, world.rank].flatten())
    x = torch.randn(tokens, WIDTH, generator=generator).bfloat16()
    source = arriving.argsort(stable=True)
    return Routed(x.to(world.device), places.to(world.device), source.to(world.device), splits)


def ways(routed: Routed, transport: Transport, formats: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """The functions to time, by name.

    Raises:
        FcsdError: the fused way gives other rows than the way in steps.
    """
    moves: Any = rows_reference
    if routed.tokens.is_cuda:
        from fcsd.kernels import rows

        moves = rows
    found: dict[str, Callable[[], Any]] = {}
    sent, by_expert = routed.splits, routed.source.unsqueeze(1)
    count = sum(sent.sends)

    def packed() -> Tensor:
        rows = routed.tokens.new_empty(count, WIDTH)
        moves.spread(routed.tokens, None, routed.places, rows)
        return rows

    def ordered(rows: Tensor) -> Tensor:
        ordered = rows.new_empty(len(routed.source), WIDTH)
        moves.collect(rows, None, by_expert, ordered)
        return ordered

    def over_formats(rows: Tensor) -> Tensor:
        received, work = transport(rows, sent, dist.group.WORLD, False)
        work.wait()
        return received

    def add(name: str, records: Tensor, steps: Callable[[], Tensor], fused: Callable[[], Tensor]) -> None:
        if not torch.equal(steps(), fused()):
            raise FcsdError(f"{name}: the fused way gives other rows than the way in steps")
        found[f"{name}, steps"], found[f"{name}, fused"] = steps, fused
        found[f"{name}, wire"] = lambda: over_formats(records)

    rows = packed()
    found["bf16"], found["bf16, wire"] = lambda: ordered(over_formats(packed())), lambda: over_formats(rows)
    dtype = routed.tokens.dtype
    for text in formats:
        format = Format.parse(text)
        add(
            text,
            encode(rows, format),
            lambda f=format: ordered(decode(over_formats(encode(packed(), f)), f, WIDTH, dtype)),
            lambda f=format: decode_from(
                over_formats(encode_at(routed.tokens, f, None, routed.places, count)), f, WIDTH, dtype, routed.source
            ),
        )
    return found


def bench(
    world: World, transports: dict[str, Transport], formats: Sequence[str], tokens: int, repeats: int
) -> dict[str, dict[str, dict[str, Timing]]]:
    """The milliseconds of each way, by scenario and transport. All ranks make this call.

    Args:
        world: this rank and its device.
        transports: the transports, by name.
        formats: the names of the formats.
        tokens: the tokens of each rank, which sends ``tokens * TOP_K`` rows of ``WIDTH`` values.
        repeats: how often each way is timed.

    Raises:
        FcsdError: the fused way of a format gives other rows than the way in steps.
    """
    found: dict[str, dict[str, dict[str, Timing]]] = {}
    for scenario in SCENARIOS:
        routed = route(world, tokens, scenario)
        by_transport = {name: ways(routed, transport, formats) for name, transport in transports.items()}
        every = {(name, way): run for name, runs in by_transport.items() for way, run in runs.items()}
        timed = timings({f"{name}|{way}": run for (name, way), run in every.items()}, world.device, repeats)
        found[scenario] = {name: {way: timed[f"{name}|{way}"] for way in runs} for name, runs in by_transport.items()}
    return found


def to_text(found: dict[str, dict[str, dict[str, Timing]]], formats: Sequence[str]) -> str:
    """The times as a table; each ratio is that of the median to the median of bf16 over the same transport."""
    rows: dict[str, dict[str, str | None]] = {}
    for scenario, of_transport in found.items():
        for name, timing in of_transport.items():
            plain, label = timing["bf16"], f"{scenario}, {name}"
            wire = f"{timing['bf16, wire'].median:.3f}"
            rows[f"{label}, bf16"] = {"steps": f"{plain.median:.3f}", **_fused(plain, plain), "wire": wire}
            for text in formats:
                steps, fused, wire = (timing[f"{text}, {way}"] for way in ("steps", "fused", "wire"))
                cells = {"steps": f"{steps.median:.3f} ({plain.median / steps.median:.2f}x)", **_fused(fused, plain)}
                rows[f"{label}, {text}"] = cells | {"wire": f"{wire.median:.3f}"}
    return f"{table(rows, 'rows to experts, ms (ratio to bf16)')}\non the wire: {bits_sent(formats)}"


def _fused(timing: Timing, plain: Timing) -> dict[str, str | None]:
    """The cells of the fused way; bf16 has only one way, and its quartiles."""
    ratio = None if timing is plain else f"{timing.median:.3f} ({plain.median / timing.median:.2f}x)"
    return {"fused": ratio, "quartiles": f"{timing.low:.3f}-{timing.high:.3f}"}
