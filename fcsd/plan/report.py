"""Formats a plan as text and as JSON."""

from dataclasses import asdict

from fcsd.models.adapters.nf4 import BYTES
from fcsd.plan import Plan
from fcsd.plan.memory import copy_bytes
from fcsd.plan.setup import GIB, Setup
from fcsd.plan.speed import BUS, DECODE, HOST, PEAK, Speed, readable, shared_layers


def to_text(plan: Plan) -> str:
    """Formats a plan as text: parameters, memory by part at the fullest moment, disk, time, cost and the verdict."""
    verdict = "fits" if plan.memory.fits else f"does not fit; {plan.advice()}"
    rows = [*_costs(plan), *(("not counted", text) for text in plan.not_counted), ("verdict", verdict)]
    lines = [*map(_row, _run(plan)), *_memory(plan), *map(_row, rows)]
    if (new := plan.faster) is not None:
        taken = f"{readable(new.hours)} instead of {readable(plan.speed.hours)}, {_gib(new.total).strip()} of each GPU"
        lines += [_row(("faster", f"{taken}, with")), " ".join(new.written)]  # a line that can be pasted
    return "\n".join(lines)


def _row(row: tuple[str, str]) -> str:
    return f"{row[0]:<12} {row[1]}"


def _run(plan: Plan) -> list[tuple[str, str]]:
    """The rows about what is planned: recipe, hardware, parameters, settings and the size of a step."""
    numbers, setup, hardware = plan.numbers, plan.setup, plan.hardware
    parameters = f"{_billions(numbers.total)}, dense"
    if numbers.experts:
        parameters = (
            f"{_billions(numbers.total)}, {_billions(numbers.active)} of them active; {_billions(numbers.routed)} in "
            f"routed experts ({numbers.experts} in a layer, {numbers.top_k} for each token)"
        )
    files = f"{numbers.stored / 1e9:,.1f} GB of {plan.method}; counted below as they are in memory, decoded"
    nodes = f" on {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    gpus = "1 GPU" if hardware.world == 1 else f"{hardware.world} GPUs"
    divided = f", experts divided among {setup.ep_size} GPUs" if setup.ep_size > 1 else ""
    divided += f", layers sharded among {setup.tp_size} GPUs" if setup.tp_size > 1 else ""
    rows = [("hardware", hardware.source)] if hardware.source else []  # what everything below it assumes
    rows += [("recipe", plan.name), ("parameters", parameters)]
    rows += [] if plan.method is None else [("files", files)]
    if (parts := setup.parts) is not None:
        found = [f"{_billions(parts.in_adapters)} in adapters of rank {parts.rank}"] if parts.rank else []
        where = "in a draft head" if parts.drafts else f"of the model itself ({', '.join(parts.words)})"
        found += [f"{_billions(parts.own)} {where}"] if parts.own else []
        first = "adapters off" if parts.rank else "first weights"
        beside = f"; the teacher is the student with its {first}" if setup.teacher != "none" else ""
        if (shared := shared_layers(setup)) > 0:
            beside += f", and the first {shared} layers are computed once for both"
        rows.append(("trained", ", and ".join(found) + beside))
        if parts.rounded is not None:
            size = _gib(int(BYTES * parts.rounded.values)).strip()
            rows.append(("NF4", f"{_billions(parts.rounded.values)} of the frozen weights, {size} on every GPU"))
    rows += [
        (
            "run",
            f"{gpus}{nodes}{divided}, ZeRO-{setup.zero_stage}, {setup.dtype}{_optimizer(setup)}, recompute "
            f"{'on' if setup.recompute else 'off'}",
        ),
        (
            "step",
            f"{setup.batch_tokens:,} tokens: on each GPU {setup.accumulation:g} micro-batch"
            f"{'es' * (setup.accumulation > 1)} of {setup.micro_batch_size} x {setup.seq_len} tokens",
        ),
    ]
    for name in plan.packaged:
        text = f"{name} is neither on disk nor could the hub be read; its packaged config.json is used"
        rows.append(("config", text))
    return rows


def _memory(plan: Plan) -> list[str]:
    """The lines about the memory of one GPU, by part at its fullest moment."""
    peak = plan.memory.peak
    parts = {**peak.parts, "context": plan.memory.context, "allocator slack": plan.memory.slack}
    lines = [f"memory of one GPU at its fullest moment ({peak.name})"]
    lines += [f"  {name:<16} {_gib(size)}" for name, size in parts.items() if size]
    return [*lines, f"  {'total':<16} {_gib(plan.memory.total)} of {_gib(plan.memory.usable).strip()} usable"]


def _costs(plan: Plan) -> list[tuple[str, str]]:
    """The rows about host memory, disk, time and money, and what they assume."""
    setup, hardware, speed = plan.setup, plan.hardware, plan.speed
    rate = f"the {PEAK[setup.dtype] / 1e12:g} TFLOP/s of an H200, whose times these are"
    shorter = "" if plan.faster is None else f"; {readable(plan.faster.hours)} with the settings of `faster`"
    cost = "" if speed.cost is None else f", cost {speed.cost:,.0f} at {hardware.price:g} per GPU-hour"
    rows = [
        ("host memory", f"{_host(plan)}{_copy(plan)}"),
        ("disk", f"{plan.disk / 1e9:,.0f} GB: {_files(setup)}"),
        (
            "time",
            f"{setup.tokens:,} tokens at {speed.tokens_per_second:,.0f} tokens/s: {readable(speed.hours)}, "
            f"{_gpu_time(speed)}{cost}{shorter}",
        ),
        ("of these", _parts(speed)),
        ("speed", f"{speed.utilisation:.1%} of {rate}; --mfu plans with a share that you measured"),
    ]
    if setup.ep_size > 1:
        rows.append(("assumed", f"the GPU with the most rows for its experts receives {setup.imbalance:g}x the mean"))
    if setup.parts is not None and setup.parts.rounded is not None:
        rows.append(("assumed", f"{DECODE / 1e12:g} TB/s at which NF4 is decoded in each pass; no run has measured it"))
    if setup.offload != "none":
        rates = f"{BUS / 1e9:g} GB/s between GPU and host, {HOST / 1e9:g} GB/s of a node's memory"
        rows.append(("assumed", f"for AdamW on the host: {rates}; no run has measured it"))
    if speed.limited_by_host:
        rows.append(("note", "the host takes longer to start the kernels than the GPU to run them"))
    return rows


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
        "adapters": plan.adapted.written if plan.adapted else None,
        "faster": plan.faster.written if plan.faster else None,
        "packaged_configs": list(plan.packaged),
        "not_counted": list(plan.not_counted),
        "parameters": totals,
        "stored": {"bytes": plan.numbers.stored, "as": None if plan.method is None else str(plan.method)},
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
    """What differs from an optimizer on the GPU."""
    rounded = "" if setup.moments == "fp32" else ", moments in 8 bits"
    return rounded if setup.offload == "none" else ", AdamW on the host"


def _host(plan: Plan) -> str:
    """The host memory of a process, and what needs it."""
    if plan.setup.offload == "none":
        return f"{_gib(plan.host).strip()} for each process while it loads the model"
    node = _gib(plan.host * plan.hardware.gpus).strip()
    return f"{_gib(plan.host).strip()} for each process, {node} for a node; most of it is pinned, for the optimizer"


def _files(setup: Setup) -> str:
    """Names the files that the disk must hold at the same time."""
    best = ", the best one" if setup.best else ""
    return f"{setup.keep} checkpoints{best} and one being written"


def _copy(plan: Plan) -> str:
    """Names the host memory for checkpoints that are written while the run goes on."""
    if not plan.setup.saves_beside:
        return ""
    size = copy_bytes(plan.numbers, plan.setup)
    return f", and {_gib(size).strip()}, at most twice as much, for the copy that checkpoints are written from"


def _gpu_time(speed: Speed) -> str:
    """The time of all GPUs together, in GPU-hours if it is an hour or longer."""
    hours = speed.gpu_hours
    return f"{hours:,.1f} GPU-hours" if hours >= 1 else f"{readable(hours)} of GPU time"


def _parts(speed: Speed) -> str:
    """Lists what takes the time of the run, without what takes none."""
    return ", ".join(f"{name} {readable(hours)}" for name, hours in speed.parts.items() if hours)


def _gib(size: int) -> str:
    return f"{size / GIB:7.1f} GiB"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M"
