"""Formats a plan as text and as JSON."""

from dataclasses import asdict

from fcsd.plan import Plan
from fcsd.plan.memory import cache_bytes, copy_bytes
from fcsd.plan.offload import BUS, HOST
from fcsd.plan.setup import GIB, Setup
from fcsd.plan.speed import PEAK, ROUND, Speed

_PLACES = {"none": "", "moments": "AdamW with its moments on the host", "host": "AdamW on the host"}


def to_text(plan: Plan) -> str:
    """Formats a plan as text: parameters, memory by part at the fullest moment, disk, time, cost and the verdict."""
    numbers, setup, hardware, speed = plan.numbers, plan.setup, plan.hardware, plan.speed
    experts = f", {numbers.experts} experts a layer, {numbers.top_k} for a token" if numbers.experts else ""
    nodes = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    rows = [("recipe", plan.name)]
    if hardware.source:
        rows.append(("hardware", hardware.source))
    rows += [
        (
            "parameters",
            f"{_billions(numbers.total)}, {_billions(numbers.active)} active: {_billions(numbers.routed)} routed, "
            f"{_billions(numbers.dense)} dense{experts}",
        ),
        (
            "run",
            f"{hardware.world} GPUs{nodes}, expert-parallel {setup.ep_size}, ZeRO-{setup.zero_stage}, "
            f"{setup.dtype}{_optimizer(setup)}, {setup.micro_batch_size} x {setup.seq_len} tokens * "
            f"{setup.accumulation:g} micro-batches, recompute {'on' if setup.recompute else 'off'}",
        ),
    ]
    peak = plan.memory.peak
    for name in plan.packaged:
        text = f"of {name}: packaged with fcsd, because neither the hub nor its cache gave one"
        rows.append(("config", text))
    lines = [*(f"{name:<12} {text}" for name, text in rows), f"memory of a GPU, fullest at: {peak.name}"]
    parts = {**peak.parts, "context": plan.memory.context, "allocator slack": plan.memory.slack}
    lines += [f"  {name:<16} {_gib(size)}" for name, size in parts.items() if size]
    lines += [f"  {'total':<16} {_gib(plan.memory.total)} of {_gib(plan.memory.usable).strip()} usable"]
    cost = "" if speed.cost is None else f", cost {speed.cost:,.0f} at {hardware.price:g} per GPU-hour"
    rows = [
        ("host memory", f"{_host(plan)}{_copy(plan)}"),
        ("disk", f"{plan.disk / 1e9:,.0f} GB: {_files(setup)}"),
        (
            "time",
            f"{setup.tokens:,} tokens at {speed.tokens_per_second:,.0f} tokens/s: {speed.hours:,.1f} hours, "
            f"{speed.gpu_hours:,.1f} GPU-hours{cost}",
        ),
        ("of these", _hours(speed)),
        (
            "assumed",
            f"{speed.utilisation:.1%} of {PEAK[setup.dtype] / 1e12:g} TFLOP/s (--mfu), "
            f"fullest rank receives {setup.imbalance:g} times the mean rows",
        ),
    ]
    if setup.offload != "none":
        rates = f"{BUS / 1e9:g} GB/s between GPU and host, {HOST / 1e9:g} GB/s of a node's memory"
        rows.append(("estimated", f"{_PLACES[setup.offload]} was never timed; assumed are {rates}"))
    elif setup.moments == "bf16":
        rows.append(("estimated", f"bf16 moments were never timed; assumed are {ROUND * 1e12:g} ps a parameter more"))
    if speed.limited_by_host:
        slow = "starting kernels takes longer than computing; a larger train.micro_batch_size would be faster"
        rows.append(("note", slow))
    rows += [
        ("verdict", "fits" if plan.memory.fits else f"does not fit; {plan.advice()}"),
    ]
    return "\n".join([*lines, *(f"{name:<12} {text}" for name, text in rows)])


def to_json(plan: Plan) -> dict[str, object]:
    """The whole plan as data that can be written as JSON; sizes are in bytes."""
    memory = plan.memory
    numbers = asdict(plan.numbers)
    numbers.pop("layers")
    totals = {"total": plan.numbers.total, "active": plan.numbers.active}
    totals |= {"dense": plan.numbers.dense, "routed": plan.numbers.routed}
    return {
        "recipe": plan.name,
        "fits": memory.fits,
        "change": plan.change.written if plan.change else None,
        "packaged_configs": list(plan.packaged),
        "parameters": totals,
        "model": numbers,
        "setup": {**asdict(plan.setup), "accumulation": plan.setup.accumulation},
        "hardware": asdict(plan.hardware),
        "memory": {
            "total": memory.total,
            "usable": memory.usable,
            "peak_allocated": memory.peak.total,
            "peak_at": memory.peak.name,
            **memory.peak.parts,
            "context": memory.context,
            "slack": memory.slack,
            "moments": {moment.name: moment.total for moment in memory.moments},
        },
        "host": plan.host,
        "disk": plan.disk,
        "speed": asdict(plan.speed),
    }


def _optimizer(setup: Setup) -> str:
    """What differs from an optimizer with fp32 moments on the GPU."""
    place = _PLACES[setup.offload]
    return ", bf16 moments" * (setup.moments == "bf16") + ", " * bool(place) + place


def _host(plan: Plan) -> str:
    """The host memory of a process, and what needs it."""
    if plan.setup.offload == "none":
        return f"{_gib(plan.host).strip()} a process while loading"
    node = _gib(plan.host * plan.hardware.gpus).strip()
    return f"{_gib(plan.host).strip()} a process, {node} a node, most of it pinned, for the optimizer"


def _files(setup: Setup) -> str:
    """Names the files that the disk must hold at the same time."""
    best = ", the best one" if setup.best else ""
    cache = f", and a teacher cache of {cache_bytes(setup) / 1e9:,.0f} GB" if setup.cached else ""
    return f"{setup.keep} checkpoints{best} and one being written{cache}"


def _copy(plan: Plan) -> str:
    """Names the host memory for checkpoints that are written while the run goes on."""
    if not plan.setup.saves_beside:
        return ""
    size = copy_bytes(plan.numbers, plan.setup)
    return f", and {_gib(size).strip()}, at most twice as much, for the copy that checkpoints are written from"


def _hours(speed: Speed) -> str:
    """Lists the parts of the hours, without those that are zero."""
    return ", ".join(f"{name} {hours:,.2f} hours" for name, hours in speed.parts.items() if hours)


def _gib(size: int) -> str:
    return f"{size / GIB:7.1f} GiB"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
