"""``fcsd advise``: the ways to serve a model on a machine, what each is expected to bring, and the one to begin with.

The order of what a user gains decides: copies of the model if it fits one GPU; a better transport for the model as it
is; fewer bits; then a conversion, which has to be healed and loses points. Sums through the host are named as a trial,
because one short run alone has timed them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fcsd.advise.cards import H100
from fcsd.advise.host import Host
from fcsd.advise.losses import TOLD, Loss, nearest
from fcsd.advise.speed import STANDARD, Load, Served, Server, server_of
from fcsd.bench.serve.figures import break_even_days
from fcsd.bench.serve.variants import CHUNKS
from fcsd.errors import DoesNotFitError
from fcsd.kernels.bit_split.format import takes_rows
from fcsd.markdown import table
from fcsd.models.build import arch_of, without_injected
from fcsd.models.selection import ADVISED, advised_count
from fcsd.models.wiring_block import Wiring
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import Setup, with_parts
from fcsd.plan.speed import flops_per_token, peak_share

WIRINGS = ("ladder", "farskip")  # Desync loses more than what is as fast, and its checkpoint is for one number of GPUs
SHARES = (ADVISED, 1.0)  # of the layers, the last ones
RESERVE_GB = 6.0  # of a GPU, for activations, graphs and libraries
WORTH_A_TRIAL, PAYS_CONVERSION = 1.03, 1.10  # how much faster than what is simpler it has to be
HEAL_TOKENS, HEAL_LENGTH = 100e6, 4096
MEASURED = "measured here"  # the source of a way that a server here was timed with


@dataclass(frozen=True)
class Way:
    """One way to serve the model.

    Attributes:
        name: as it is printed.
        kind: ``stock``, ``sums`` (exact), ``bits`` (sums in fewer bits), ``stages``, ``replicas`` or ``conversion``.
        served: the prediction.
        gain: the geometric mean of how many times as fast as stock tensor parallelism a step and first tokens are.
        source: where its figures come from.
        share: of the layers that are converted.
        stages: pipeline stages.
    """

    name: str
    kind: str
    served: Served
    gain: float
    source: str
    share: float = 0.0
    wiring: str = "standard"
    stages: int = 1


@dataclass(frozen=True)
class Healing:
    """What it takes at most to heal half of the layers, trained alone, with ``HEAL_TOKENS``; by arithmetic.

    Attributes:
        gpu: on which it is counted: the GPUs that serve if it fits there, else rented H100s.
        gpus: how many it takes at least.
        gpu_hours: hours of one GPU, together.
    """

    gpu: str
    gpus: int
    gpu_hours: float


@dataclass(frozen=True)
class Advice:
    """The verdict.

    Attributes:
        ways: all that were weighed; the first is stock vLLM.
        chosen: the one to begin with.
        why: a sentence.
        command: the next command.
        trial: a command that is worth a trial, because one short run alone has timed it; None if there is none.
        losses: rows of measured losses that are nearest to the model.
        heal: what healing half of the layers takes at most.
        days: until these are won back by the best conversion over the best of the rest, infinite if never.
    """

    model: str
    server: Server
    host: Host
    ways: tuple[Way, ...]
    chosen: Way
    why: str
    command: str
    trial: str | None
    losses: tuple[Loss, ...]
    heal: Healing
    days: float
    price: float | None


def advise(
    model: str,
    host: Host,
    load: Load,
    price: float | None = None,
    speed: float | None = None,
    measured: Mapping[str, Served] = MappingProxyType({}),
) -> Advice:
    """Weigh the ways to serve a model.

    Args:
        model: a directory in which config.json is enough, or a hub id. Weights may be quantised by a method that
            ``fcsd convert`` reads.
        price: of one GPU for an hour.
        speed: how many times as fast as stock it should be; the cheapest way that reaches it is chosen then.
        measured: what servers here were timed with, by the name of a way; it takes the place of predictions.

    Raises:
        BadInputError: the config cannot be read, or its type is not supported.
        DoesNotFitError: the weights do not fit into these GPUs.
    """
    meta = MetaModel(model)
    server = server_of(meta, host.card, load)
    memory = host.card.memory_gb - RESERVE_GB
    weights, cache = server.weight_bytes / 1e9, server.cache_bytes / 1e9
    if weights > memory * host.gpus:
        needed = math.ceil(weights / memory)
        raise DoesNotFitError(
            f"{model}: its weights take {weights:.0f} GB, and {host.gpus} x {host.card.name} have "
            f"{host.card.memory_gb * host.gpus:.0f} GB",
            f"It takes {needed} such GPUs, or weights in fewer bits.",
        )
    fits_one = weights + min(cache, 0.1 * weights) <= memory
    ways = _with_measured(_ways(server, meta, host, fits_one), measured)
    stock = ways[0]
    tried = [way for way in ways if way.kind == "stages" or (way.kind == "sums" and way.source == MEASURED)]
    simple = [stock, *(way for way in tried if _nowhere_slower(way, stock))]
    best = max(simple, key=lambda way: way.gain)
    conversions = [way for way in ways if way.kind == "conversion"]
    converted = max(conversions, key=lambda way: (round(way.gain, 2), -way.share), default=None)
    chosen, why = _choose(ways, best, converted, fits_one, host, speed)
    heal = _healing(meta, host)
    rest = max((way.gain for way in ways if way.kind not in ("conversion", "replicas")), default=1.0)
    days = break_even_days(heal.gpu_hours, converted.gain / rest, host.gpus) if converted else math.inf
    rows = tuple(nearest(meta.numbers.total, bool(meta.numbers.experts)))
    command = _command(chosen, model, host, load)
    untried = [way for way in ways if way.kind == "sums" and way.source != MEASURED]
    better = [way for way in untried if way.gain > WORTH_A_TRIAL * chosen.gain]
    trial = None if fits_one or chosen.kind == "conversion" or not better else _command(better[0], model, host, load)
    return Advice(model, server, host, tuple(ways), chosen, why, command, trial, rows, heal, days, price)


def pairs_of(gpus: int) -> str:
    """The name of pipeline stages of two GPUs each."""
    return f"{gpus // 2} stages of 2 GPUs, sums by host"


def _with_measured(ways: Sequence[Way], measured: Mapping[str, Served]) -> list[Way]:
    """The ways with what was measured in the place of predictions."""
    found = [replace(way, served=measured[way.name], source=MEASURED) if way.name in measured else way for way in ways]
    stock = found[0].served
    gains = [math.sqrt(stock.step / way.served.step * stock.first / way.served.first) for way in found]
    return [replace(way, gain=gain) for way, gain in zip(found, gains, strict=True)]


def _nowhere_slower(way: Way, stock: Way) -> bool:
    """Whether neither steps nor first tokens are slower than those of stock, to 2 %."""
    return max(way.served.step / stock.served.step, way.served.first / stock.served.first) <= 1.02


def _ways(server: Server, meta: MetaModel, host: Host, fits_one: bool) -> list[Way]:
    count, sums = host.gpus, host.sums
    source = "measured sums" if sums.measured else "sums measured elsewhere"
    if count == 1:
        served = server.replicas(1)
        return [Way("stock vLLM", "stock", served, 1.0, "predicted")]
    stock = server.tensor_parallel(count, STANDARD, sums.of("stock", count))
    ways = [Way(f"stock vLLM, TP {count}", "stock", stock, 1.0, f"predicted, {source}")]

    def add(name: str, kind: str, served: Served, told: str = f"predicted, {source}", **more: Any) -> None:
        ways.append(Way(name, kind, served, 1.0, told, **more))

    if fits_one:
        add(f"{count} replicas", "replicas", server.replicas(count), "predicted")
    add(f"{count} pipeline stages", "stages", server.stages(count), "predicted", stages=count)
    methods = [method for method in sums.methods if method != "stock" and takes_rows(method, meta.numbers.hidden)]
    if "host" in methods and count >= 4 and count % 2 == 0:
        add(pairs_of(count), "stages", server.stages(count // 2, 2, sums.of("host", 2)), stages=count // 2)
    for method in methods:
        kind = "bits" if ":" in method else "sums"
        add(f"sums by {method}", kind, server.tensor_parallel(count, STANDARD, sums.of(method, count)))
    exact = sums.of("host" if "host" in methods else "stock", count)
    depth, arch = len(meta.numbers.layers), arch_of(meta.config)
    for name in (name for name in WIRINGS if name in arch.wirings):
        for share in SHARES:
            count_of = depth if share == 1 else advised_count(depth)
            layers = tuple(range(depth - count_of, depth))
            wiring = without_injected(meta.config, Wiring(name, layers))
            label = f"{name}, {'all' if share == 1 else 'half'} of the layers"
            served = server.tensor_parallel(count, wiring, exact)
            add(label, "conversion", served, share=share, wiring=name)
    return ways


def _choose(
    ways: list[Way], best: Way, converted: Way | None, fits_one: bool, host: Host, speed: float | None
) -> tuple[Way, str]:
    """The way to begin with, and why."""
    by_kind = {way.kind: way for way in reversed(ways)}
    if speed is not None:
        order = ("stock", "replicas", "stages", "sums", "bits", "conversion")  # the simplest first
        # A way that makes one of the two slower is not what was asked for.
        reached = [way for way in ways if way.gain >= speed and _nowhere_slower(way, ways[0])]
        if reached:
            first = min(reached, key=lambda way: (order.index(way.kind), way.share, -way.gain))
            return first, f"it is the simplest way that is expected to reach {speed:.2f}x in the mean of TPOT and TTFT"
        return best, f"nothing here is expected to reach {speed:.2f}x"
    if host.gpus == 1:
        return ways[0], "one GPU sends nothing, so there is nothing to gain"
    if fits_one:
        return by_kind[
            "replicas"
        ], "the model fits one GPU, and copies of it send nothing; serve by TP for single answers"
    if best.kind == "sums":
        return best, f"servers were timed here, and it was {best.gain:.2f}x as fast as stock, with the same answers"
    why = "of what servers were timed with, nothing that leaves the answers as they are is expected to be faster"
    stages, sums, bits = by_kind.get("stages"), by_kind.get("sums"), by_kind.get("bits")
    if stages is not None and stages != best and (first := ways[0].served.first / stages.served.first) > 1.02:
        why += f"; pipeline stages have first tokens {first:.2f}x as fast, and slower steps"
    if sums is not None and sums.gain > WORTH_A_TRIAL * best.gain:
        why += f"; sums through the host are expected to bring {sums.gain:.2f}x"
    if bits is not None and bits.gain > WORTH_A_TRIAL * best.gain:
        why += f"; in 8 bits {bits.gain:.2f}x, which changes answers a little"
    if converted is not None and converted.gain > PAYS_CONVERSION * best.gain:
        why += f"; a conversion {converted.gain:.2f}x, which has to be healed"
    return best, why


def _healing(meta: MetaModel, host: Host) -> Healing:
    """What healing takes.

    ``convert --layers auto`` may choose the first layers, so that the backward pass and its recompute go through all of
    them. This is therefore what ``fcsd plan`` counts for the first half, where arithmetic alone takes the time. Memory
    holds all weights in bf16, those of the originals of converted layers too, and what trains with gradients and
    AdamW's moments: 16 bytes a parameter.
    """
    numbers = meta.numbers
    first = tuple(range(advised_count(len(numbers.layers))))
    gigabytes = (2 * numbers.total + (2 + 16) * numbers.total / 2) / 1e9
    fits = gigabytes <= 0.8 * host.card.memory_gb * host.gpus
    card = host.card if fits else H100
    gpus = math.ceil(gigabytes / (0.8 * card.memory_gb))
    run = Setup(
        world=gpus,
        micro_batch_size=1,
        seq_len=HEAL_LENGTH,
        batch_tokens=gpus * HEAL_LENGTH,
        tokens=int(HEAL_TOKENS),
        recompute=True,
        ep_size=2 if numbers.experts else 1,  # the rate of experts that are divided, among however many
        teacher="replicated",
    )
    run = with_parts(run, meta.parts(None, ["converted"], Wiring("ladder", first)))
    rate = peak_share(numbers, run) * card.tflops * 1e12
    return Healing(card.name, gpus, flops_per_token(numbers, numbers, run) * HEAL_TOKENS / rate / 3600)


def _command(chosen: Way, model: str, host: Host, load: Load) -> str:
    if chosen.kind == "conversion":
        share = "all" if chosen.share == 1 else "auto"
        return f"fcsd convert {model} OUT --wiring {chosen.wiring} --layers {share}"
    if chosen.kind == "replicas":
        return f"vllm serve {model} --data-parallel-size {host.gpus}"
    if chosen.kind == "stages":
        ranks, stages = host.gpus // chosen.stages, f"--pipeline-parallel-size {chosen.stages} {' '.join(CHUNKS)}"
        by_host = f"fcsd serve {model} --gpus {ranks} --all-reduce host -- "
        return (by_host if ranks > 1 else f"vllm serve {model} ") + stages
    method = chosen.name.removeprefix("sums by ") if chosen.kind in ("sums", "bits") else ""
    if method and "=" not in method:
        graphs = f"--prompt-tokens {load.prompt_tokens} --concurrency {load.concurrency}"
        return f"fcsd serve {model} --gpus {host.gpus} --all-reduce {method} {graphs}"
    return f"{method} vllm serve {model} --tensor-parallel-size {host.gpus}".lstrip()


def to_text(advice: Advice) -> str:
    """One screen."""
    server, host, stock = advice.server, advice.host, advice.ways[0]
    load = server.load
    body = [
        [
            way.name,
            f"{1e3 * way.served.step:.1f}",
            f"{stock.served.step / way.served.step:.2f}x",
            f"{1e3 * way.served.first:.0f}",
            f"{stock.served.first / way.served.first:.2f}x",
            way.source,
        ]
        for way in _shown(advice)
    ]
    head = ["way", "TPOT, ms", "gain", "TTFT, ms", "gain", "from"]
    lines = [
        f"{advice.model}: {server.numbers.total / 1e9:.1f} billion parameters, {server.weight_bytes / 1e9:.0f} GB",
        host.described,
        f"{load.concurrency} prompts of {load.prompt_tokens} tokens at once",
        "",
        f"Do this: {advice.chosen.name}. Why: {advice.why}.",
        f"  {advice.command}",
        *([] if advice.trial is None else [f"Worth a trial, which one short run alone has timed: {advice.trial}"]),
        "",
        table(head, body),
        "",
        host.sums.told,
        f"Computation is predicted from the data sheet of {host.card.name}. `fcsd advise --measure` times it here.",
    ]
    if any(way.kind in ("sums", "bits", "conversion") for way in advice.ways):
        lines += [
            "Requests come at once here; `fcsd bench serve` measures random arrivals. Under them sums by host and",
            "conversions were often slower than stock vLLM with its own CUDA graphs, and faster in the median with",
            "those of `fcsd serve --prompt-tokens`.",
        ]
    if any(way.kind == "conversion" for way in advice.ways):
        lines += [
            *_healing_told(advice),
            "What conversions lost after healing, in points, as measured:",
            "",
            _loss_table(advice.losses),
        ]
    return "\n".join(lines)


def _healing_told(advice: Advice) -> list[str]:
    """What healing costs, and when it is won back where it is counted in hours of the GPUs that serve."""
    heal = advice.heal
    money = "" if advice.price is None else f", {heal.gpu_hours * advice.price:,.0f} at your price"
    told = [
        f"Healing half of the layers, whichever they are, with {HEAL_TOKENS / 1e6:.0f} million tokens takes at most "
        f"{math.ceil(heal.gpu_hours)} GPU-hours of at least {heal.gpus} x {heal.gpu}, by arithmetic{money}."
    ]
    if heal.gpu == advice.host.card.name:
        back = "never won back" if math.isinf(advice.days) else f"won back after {advice.days:.0f} days at full load"
        told.append(f"By the fastest conversion they are {back}.")
    return told


def _shown(advice: Advice) -> list[Way]:
    """All ways but the conversions that another one of as many layers beats; the chosen one in any case."""
    converted = [way for way in advice.ways if way.kind == "conversion"]
    halves, wholes = ([way for way in converted if way.share == share] for share in SHARES)
    best = [max(ways, key=lambda way: way.gain) for ways in (halves, wholes) if ways]
    return [way for way in advice.ways if way.kind != "conversion" or way in best or way == advice.chosen]


def _loss_table(rows: tuple[Loss, ...]) -> str:
    head = ["model", "wiring", "layers", "tokens", *TOLD, "mean", "source"]
    body = []
    for row in rows:
        told = ["-" if (lost := row.lost(name)) is None else f"{lost:.1f}" for name in TOLD]
        tokens = f"{row.tokens_b:g} B" if row.tokens_b >= 0.1 else f"{1e3 * row.tokens_b:g} M"
        body.append([row.model, row.wiring, f"{row.share:.0%}", tokens, *told, f"{row.mean:.1f}", row.source])
    return table(head, body, left=2)


def to_json(advice: Advice) -> dict[str, Any]:
    """The advice as data; times are in seconds."""
    return {
        "model": advice.model,
        "gpus": advice.host.gpus,
        "gpu": advice.host.card.name,
        "peers": advice.host.peers,
        "weights_bytes": advice.server.weight_bytes,
        "ways": [
            {"name": way.name, "kind": way.kind, **vars(way.served), "gain": way.gain, "from": way.source}
            for way in advice.ways
        ],
        "chosen": advice.chosen.name,
        "why": advice.why,
        "command": advice.command,
        "trial": advice.trial,
        "healing": vars(advice.heal),
        "won_back_days": None if math.isinf(advice.days) else advice.days,
        "losses": [{**row._asdict(), "mean": row.mean} for row in advice.losses],
    }
