"""What is served under vLLM: the original and what a user would do instead of converting, the rewired model, the bound.

Which of them exist depends on the version of vLLM, on what else is installed and on the workload. What does not exist
is named with the reason, because a ratio to an original that lacks an option says less.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fcsd.bench.serve.workload import BUDGET, LARGE, SMALL, Workload
from fcsd.parallel.all_reduce.ways import Way
from fcsd.serve.vllm.communicator import ASKED
from fcsd.serve.vllm.support import version_of

Role = Literal["original", "wired", "way", "bound"]  # a way: another one for the sums of a wiring
ORIGINAL = "original"
NO_CUSTOM = "--disable-custom-all-reduce"
_NO_SEQUENCE_PARALLEL = (0, 32)  # vLLM took the passes for sequence parallelism and async TP out
RESERVE = 6 << 30  # bytes that a server takes on a GPU for activations, graphs and libraries
CHUNKS = (BUDGET, str(SMALL))  # of pipeline stages, which several steps have to fill
PAIRS = "stages of two GPUs, host sums"
# What serves a model with sums through memory of the host, by the name of the variant; see ``serve.vllm.communicator``.
HOST_SUMS = {"host sums": {ASKED: "host"}, "host sums in int8": {ASKED: "host:int8"}}
_NOT_HOST = ("sums are vLLM's own",)  # what the plugin says where it leaves them out
IMITATED = "NCCL_P2P_DISABLE=1 imitates GPUs without peer access, and it would use it"


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
        stages: pipeline stages, between which the GPUs of tensor parallelism are divided; 0 is none.
        spread: whether attention is data-parallel over all GPUs, with whole experts on each.
        way: how a wiring sums; None for an original and a bound.
        ignored: what vLLM says where it leaves the options out and serves the plain original.
    """

    name: str
    role: Role
    wiring: str | None = None
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    replicas: int = 0
    stages: int = 0
    spread: bool = False
    way: Way | None = None
    ignored: tuple[str, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether it takes more memory of a GPU than the others, so that nothing else runs beside it.

        The first and the last of several stages have the whole embeddings.
        """
        return self.replicas > 0 or self.stages > 0 or self.spread


class Missing(NamedTuple):
    """Why something was not run.

    Attributes:
        why: a sentence.
        needless: whether the ratios say as much without it: it is no alternative to converting, or does not exist for
            this workload on any machine and with any version of vLLM.
    """

    why: str
    needless: bool = False


class Machine(NamedTuple):
    """What the choice depends on.

    Attributes:
        version: of vLLM.
        installed: says whether a module is installed.
        gpus: GPUs that the workload takes, ``tp x dp``.
        fits_one: whether all layers of the model fit into one GPU, those that are not timed, too; None if that is not
            known.
        peers: whether NCCL may use peer access between GPUs.
    """

    version: str
    installed: Callable[[str], bool]
    gpus: int
    fits_one: bool | None
    peers: bool = True


def core(
    wirings: tuple[str, ...],
    ways: Mapping[Way, str | None],
    forms: Mapping[str, Mapping[str, Any]] | None = None,
    host: bool = False,
) -> list[Variant]:
    """The original with vLLM's own choices, each wiring, further forms and the bound of the first, other ways to sum.

    Args:
        ways: for each way, what the plugin is told to choose it; None for its own choice. The first is that of the
            verdict.
        forms: by name, what else the plugin is told of the first wiring; see ``reduction.Settings``.
        host: whether the original and the wirings are served with sums through the host, too.
    """
    through_host = HOST_SUMS if host else {}
    (first, told), *others = ways.items()
    return [
        Variant(ORIGINAL, "original"),
        *(
            Variant(f"{ORIGINAL}, {told}", "original", environment=asked, ignored=_NOT_HOST)
            for told, asked in through_host.items()
        ),
        *(Variant(name, "wired", name, _plugin(told), way=first) for name in wirings),
        *(
            Variant(f"{name}, {told}", "wired", name, way=first, environment=asked, ignored=_NOT_HOST)
            for name in wirings
            for told, asked in through_host.items()
        ),
        *(
            Variant(f"{wirings[0]}, {name}", "wired", wirings[0], _plugin(told, own), way=first)
            for name, own in (forms or {}).items()
        ),
        Variant("bound", "bound", wirings[0], _plugin("none")),
        *(
            Variant(label(name, way, first), "way", name, _plugin(told), way=way)
            for name in wirings
            for way, told in others
        ),
    ]


def _plugin(reduce: str | None, more: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """The options of ``vllm serve`` that tell the plugin how to sum, and what else it is told."""
    fields = {**({} if reduce is None else {"reduce": reduce}), **(more or {})}
    return ("--additional-config", json.dumps({"fcsd": fields})) if fields else ()


def label(name: str, way: Way, first: Way) -> str:
    """The name of a variant: the model's, its backend if not that of the first way, and whether it sums at once."""
    name = name if way.reduce == first.reduce else f"{name}, {way.reduce}"
    return name if way.travels else f"{name}, sums at once"


def alternatives(
    machine: Machine, load: Workload, *, hidden: int, moe: bool
) -> tuple[list[Variant], dict[str, Missing]]:
    """What a user would do instead of converting.

    vLLM leaves some options out without an error: where it is known before, the alternative is missing, and what only a
    server knows is in ``Variant.ignored``.

    Args:
        load: the workload: its degrees, and the options that every variant has.
        moe: whether the model has experts.

    Returns:
        The variants, the likeliest gain first; and for each that cannot be run here, its name and why.
    """
    found: list[Variant] = []
    missing: dict[str, Missing] = {}
    tp = load.tp

    def offer(name: str, why_not: Missing | None, **given: Any) -> None:
        if why_not is None:
            found.append(Variant(f"{ORIGINAL}, {name}", "original", **given))
        else:
            missing[name] = why_not

    alone = None if tp > 1 else Missing("there is one rank, which sums nothing", needless=True)
    by_peers = alone or (None if machine.peers else Missing(IMITATED))
    offer("one replica a GPU", _no_replicas(machine), replicas=machine.gpus)
    untested = alone or (None if load.dp == 1 else Missing("it was not tested with --dp"))
    chunks = () if BUDGET in " ".join(load.options) else CHUNKS
    offer("pipeline stages", untested, stages=tp, options=chunks)
    if tp >= 4 and tp % 2 == 0 and not machine.peers:
        how: Any = {"options": chunks, "environment": HOST_SUMS["host sums"], "ignored": _NOT_HOST}
        offer(PAIRS, untested, stages=tp // 2, **how)
    no_flashinfer = None if machine.installed("flashinfer") else Missing("flashinfer is not installed")
    offer(
        "fused all-reduce and norm",
        by_peers or no_flashinfer,
        options=passes(fuse_allreduce_rms=True),
        environment={"VLLM_ALLREDUCE_USE_FLASHINFER": "1"},
        ignored=("AllReduce fusion pass is disabled", "allreduce-norm fusion will be disabled"),
    )
    least, most = async_tp_from(hidden, tp), load.budget or LARGE
    short = None if least < most else Missing(f"it begins at {least} tokens, and a step has at most {most}")
    gone = version_of(machine.version) >= _NO_SEQUENCE_PARALLEL
    gone_or_short = Missing(f"vLLM {machine.version} does not have it; up to 0.31 it does") if gone else short
    offer(
        "async TP",
        by_peers or gone_or_short,
        options=passes(enable_sp=True, fuse_gemm_comms=True, sp_min_token_num=least),
        ignored=("for the SP threshold heuristic, disabling",),
    )
    few = None
    if tp < 8 and tp != 4:
        few = Missing(f"vLLM does it for 4, 8 and more ranks, and leaves it out at {tp}")
    offer(
        "symmetric memory by NCCL",
        by_peers or few,
        environment={"VLLM_USE_NCCL_SYMM_MEM": "1"},
        ignored=("Failed to compile NCCL memory allocator",),
    )
    every = Missing("every variant is without it", needless=True) if NO_CUSTOM in load.options else None
    offer("no custom all-reduce", alone or every, options=(NO_CUSTOM,))
    spreads = None
    if not moe or machine.gpus == 1:
        spreads = Missing("it needs a model with experts and two GPUs", needless=True)
    elif load.dp > 1:
        spreads = Missing("every variant has it", needless=True)
    offer("data-parallel attention", spreads, spread=True)
    no_deep_ep = None if machine.installed("deep_ep") else Missing("deep_ep is not installed")
    # The first has no CUDA graphs and is for prefill, the second has them and is for decoding.
    for backend in ("high_throughput", "low_latency"):
        offer(
            f"dual batch overlap, {backend.replace('_', ' ')}",
            spreads or no_deep_ep,
            options=("--enable-dbo", "--all2all-backend", f"deepep_{backend}"),
            spread=True,
        )
    return found, missing


def async_tp_from(hidden: int, tp: int) -> int:
    """Tokens of a step from which vLLM's sequence parallelism and async TP work, in bfloat16.

    On Hopper vLLM chooses the same number for hidden sizes of 8192 and more. For smaller ones, and on other GPUs, it
    would leave the option out.
    """
    return max(2, (8 << 20) * tp // (2 * hidden))


def passes(**chosen: int) -> tuple[str, ...]:
    """The option of ``vllm serve`` that sets passes of its compiler."""
    return ("--compilation-config", json.dumps({"pass_config": chosen}))


def _no_replicas(machine: Machine) -> Missing | None:
    if machine.gpus == 1:
        return Missing("there is one GPU", needless=True)
    if machine.fits_one is None:
        return Missing("the memory of the GPUs is not known")
    return None if machine.fits_one else Missing("all layers of the model do not fit into one GPU", needless=True)


def groups(first: list[Variant], others: list[Variant], room: int) -> list[list[Variant]]:
    """The variants whose servers run at the same time and are timed in turns.

    The core comes first, so that the time that is left goes to the alternatives. The original stands in every group of
    two or more, so that what is compared with it takes turns with it. What needs the GPUs alone comes last.

    Args:
        first: the core, the original before all others.
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


def room_for(memory: int, weights: int, cache: int, ranks: int) -> int:
    """How many servers fit into the GPUs at once, at least 1.

    Args:
        memory: bytes of each GPU.
        weights: bytes of all weights.
        cache: bytes of the keys and values of one server, on all ranks together.
        ranks: GPUs of a server.
    """
    return max(1, int(0.94 * memory) // ((weights + cache) // ranks + RESERVE))
