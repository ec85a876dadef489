"""What is served under vLLM: the original and what a user would do instead of converting, the rewired model, the bound.

Which of them exist depends on the version of vLLM, on what else is installed and on the workload. What does not exist
is named with the reason, because a ratio to an original that lacks an option says less.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fcsd.parallel.all_reduce.ways import Way
from fcsd.serve.vllm.support import version_of

Role = Literal["original", "wired", "way", "bound"]  # a way: another one for the sums of a wiring
ORIGINAL = "original"
_NO_SEQUENCE_PARALLEL = (0, 32)  # vLLM took the passes for sequence parallelism and async TP out


@dataclass(frozen=True)
class Variant:
    """One way to serve the model.

    Attributes:
        name: what the table calls it.
        role: ``bound`` leaves all sums out and has wrong results.
        wiring: the name of a wiring; None is the original.
        options: further options of ``vllm serve``.
        environment: environment variables.
        replicas: servers of one GPU each, between which requests are divided in turn; 0 is one server of all GPUs.
        spread: whether attention is data-parallel over all GPUs, with whole experts on each.
        way: how a wiring sums; None for an original and a bound.
    """

    name: str
    role: Role
    wiring: str | None = None
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 0
    spread: bool = False
    way: Way | None = None

    @property
    def alone(self) -> bool:
        """Whether it takes more memory of a GPU than the others, so that nothing else runs beside it."""
        return self.replicas > 0 or self.spread


class Machine(NamedTuple):
    """What the choice depends on.

    Attributes:
        version: of vLLM.
        installed: says whether a module is installed.
        gpus: GPUs that the workload takes, ``tp x dp``.
        fits_one: whether the whole model fits into one GPU; None if that is not known.
    """

    version: str
    installed: Callable[[str], bool]
    gpus: int
    fits_one: bool | None


def core(
    wirings: tuple[str, ...], ways: Mapping[Way, str | None], forms: Mapping[str, Mapping[str, str]] | None = None
) -> list[Variant]:
    """The original with vLLM's own choices, each wiring, further forms and the bound of the first, other ways to sum.

    Args:
        wirings: their names.
        ways: for each way, what the plugin is told to choose it; None for its own choice. The first is that of the
            verdict.
        forms: by name, what else the plugin can be told of the first wiring; see ``reduction.Settings``.
    """
    (first, told), *others = ways.items()
    return [
        Variant(ORIGINAL, "original"),
        *(Variant(name, "wired", name, _plugin(told), way=first) for name in wirings),
        *(
            Variant(f"{wirings[0]}, {name}", "wired", wirings[0], _plugin(told, own))
            for name, own in (forms or {}).items()
        ),
        Variant("bound", "bound", wirings[0], _plugin("none")),
        *(
            Variant(label(name, way, first), "way", name, _plugin(told), way=way)
            for name in wirings
            for way, told in others
        ),
    ]


def _plugin(reduce: str | None, more: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The options of ``vllm serve`` that tell the plugin how to sum, and what else it is told."""
    fields = {**({} if reduce is None else {"reduce": reduce}), **(more or {})}
    return ("--additional-config", json.dumps({"fcsd": fields})) if fields else ()


def label(name: str, way: Way, first: Way) -> str:
    """The name of a variant: the model's, its backend if not that of the first way, and whether it sums at once."""
    name = name if way.reduce == first.reduce else f"{name}, {way.reduce}"
    return name if way.travels else f"{name}, sums at once"


def alternatives(machine: Machine, *, tp: int, moe: bool, dp: int = 1) -> tuple[list[Variant], dict[str, str]]:
    """What a user would do instead of converting.

    Args:
        machine: see ``Machine``.
        tp: the tensor-parallel degree.
        moe: whether the model has experts.
        dp: data-parallel replicas of all variants.

    Returns:
        The variants, the likeliest gain first; and for each that cannot be run here, its name and why.
    """
    found: list[Variant] = []
    missing: dict[str, str] = {}

    def offer(name: str, why_not: str | None, **given: Any) -> None:
        if why_not is None:
            found.append(Variant(f"{ORIGINAL}, {name}", "original", **given))
        else:
            missing[name] = why_not

    alone = None if tp > 1 else "there is one rank, which sums nothing"
    offer("one replica a GPU", _no_replicas(machine), replicas=machine.gpus)
    no_flashinfer = None if machine.installed("flashinfer") else "flashinfer is not installed"
    offer(
        "fused all-reduce and norm",
        alone or no_flashinfer,
        options=passes(fuse_allreduce_rms=True),
        environment={"VLLM_ALLREDUCE_USE_FLASHINFER": "1"},
    )
    gone = version_of(machine.version) >= _NO_SEQUENCE_PARALLEL
    offer(
        "async TP",
        alone or (f"vLLM {machine.version} does not have it; up to 0.31 it does" if gone else None),
        options=passes(enable_sp=True, fuse_gemm_comms=True),
    )
    offer("symmetric memory by NCCL", alone, environment={"VLLM_USE_NCCL_SYMM_MEM": "1"})
    offer("no custom all-reduce", alone, options=("--disable-custom-all-reduce",))
    spreads = None if moe and machine.gpus > 1 else "it needs a model with experts and two GPUs"
    spreads = "every variant has it" if moe and dp > 1 else spreads
    offer("data-parallel attention", spreads, spread=True)
    offer(
        "dual batch overlap",
        spreads or (None if machine.installed("deep_ep") else "deep_ep is not installed"),
        options=("--enable-dbo", "--all2all-backend", "deepep_high_throughput"),
        spread=True,
    )
    return found, missing


def passes(**chosen: bool) -> tuple[str, ...]:
    """The option of ``vllm serve`` that sets passes of its compiler."""
    return ("--compilation-config", json.dumps({"pass_config": chosen}))


def _no_replicas(machine: Machine) -> str | None:
    if machine.gpus == 1:
        return "there is one GPU"
    if machine.fits_one is None:
        return "the memory of the GPUs is not known"
    return None if machine.fits_one else "the model does not fit into one GPU"


def groups(first: list[Variant], others: list[Variant], room: int) -> list[list[Variant]]:
    """The variants whose servers run at the same time and are timed in turns.

    The core comes first, so that the time that is left goes to the alternatives. The original stands in every group of
    two or more, so that what is compared with it takes turns with it. What needs the GPUs alone comes last.

    Args:
        first: the core, the original before all others.
        others: the alternatives.
        room: how many servers fit into the memory of the GPUs at once, at least 1.
    """
    sharing, alone = [v for v in others if not v.alone], [[v] for v in others if v.alone]
    if room == 1:
        return [*([v] for v in [*first, *sharing]), *alone]
    found = []
    for rest in (first[1:], sharing):
        for begin in range(0, len(rest), room - 1):
            found.append([first[0], *rest[begin : begin + room - 1]])
    return found + alone


def room_for(memory: int, weights: int, cache: int, ranks: int, reserve: int = 6 << 30) -> int:
    """How many servers fit into the GPUs at once, at least 1.

    Args:
        memory: bytes of each GPU.
        weights: bytes of all weights.
        cache: bytes of the keys and values of one server, on all ranks together.
        ranks: GPUs of a server.
        reserve: bytes that a server takes on a GPU for activations, graphs and libraries.
    """
    return max(1, int(0.94 * memory) // ((weights + cache) // ranks + reserve))
