"""Derives the tensor-parallel schedule of a wiring: what each layer sums, when the sum starts, which read awaits it.

Under tensor parallelism every output of a layer is a partial sum on each rank. It has to be reduced before the first
read that includes it, and no earlier. One rule follows, and it is the whole schedule:

    The outputs of one layer that the same read needs first share one reduction. The reduction starts when the last of
    them is computed, and that read awaits it.

Where outputs are normed on arrival, the attention's is normed apart from the MLP's, so these two never share one.

The rule runs the wiring itself: ``read``, ``split`` and ``add`` of ``wiring.py`` on sets of names instead of tensors,
so the schedule cannot differ from the model. The outputs of a layer are computed in the order attention, shared
experts, routed experts; a dense MLP counts as shared experts, as everywhere in a wiring.

``layer_plans`` turns the schedule into what each decoder layer does, call by call. fcsd's engine, tensor-parallel
training and the plugin for vLLM run these plans, and ``run_step`` says for all of them what becomes of an output. Under
expert parallelism a layer has one output in flight, and needs no plan (``fcsd.parallel.overlap``).

Every read of the residual stream includes all that the read before it included. One running sum of landed outputs is
therefore enough: a layer lands the sums that its read awaits, and leaves the others in flight.

Under Desync the running sum is that of one rank alone. An output whose reduction is dropped is added to it as it is. A
kept reduction replaces it by the sum over the ranks of ``output + running / degree`` (``fcsd.models.desync``).

This file contains no communication. Whoever runs a plan decides how the sums travel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from ..errors import ConfigError
from .wiring import LayerWiring, Parts, add, plan_layers, read, split
from .wiring_block import DESYNC, Blocks, Wiring, kept_reductions

Part = Literal["attn", "shared", "routed"]
Kind = Literal["dense", "moe", "moe-shared"]
# Maps the kind of a layer to the outputs of its MLP, in the order in which they are computed.
MLP_PARTS: dict[Kind, tuple[Part, ...]] = {
    "dense": ("shared",),
    "moe": ("routed",),
    "moe-shared": ("shared", "routed"),
}


class Output(NamedTuple):
    """The output that one part of one layer adds to the residual stream."""

    layer: int
    part: Part


class Read(NamedTuple):
    """One read of the residual stream; the final norm is ``Read(number of layers, "norm")``."""

    layer: int
    by: Literal["attn", "mlp", "norm"]


class Reduction(NamedTuple):
    """One all-reduce of the schedule.

    Attributes:
        sums: the outputs that are added up on each rank before they are reduced, in the order of their computation.
            Under Desync they are the outputs that were added to the rank-local residual since the last reduction.
        starts_after: the last of ``sums``; the reduction can start once it is computed.
        awaited_by: the first read that includes them.
        covered_by: the outputs that are computed while the reduction is in flight. If there are none, the reduction
            is exposed.
    """

    sums: tuple[Output, ...]
    starts_after: Output
    awaited_by: Read
    covered_by: tuple[Output, ...]


class _Names(frozenset[Output]):
    """The names of the outputs that a stream includes; streams are added as tensors are."""

    def __add__(self, other: "_Names") -> "_Names":
        return _Names(self | other)


def kind_of(parts: Parts) -> Kind:
    """The kind of a layer that was taken apart into ``parts``."""
    if parts.routed is None:
        return "dense"
    return "moe" if parts.shared is None else "moe-shared"


def reads_of(
    wiring: Wiring,
    kinds: Sequence[Kind],
    blocks: Blocks = Blocks(),  # noqa: B008
) -> dict[Read, frozenset[Output]]:
    """For each read of a model, in the order of execution, the outputs that the stream it reads includes.

    Args:
        wiring: any wiring but Desync, whose reads differ from rank to rank.
        blocks: says whether outputs are normed on arrival; by default they are not.

    Raises:
        ValueError: the wiring is Desync, or it names a layer that does not exist.
    """
    if wiring.name in DESYNC:
        raise ValueError(f"{wiring.name} reads rank-local streams, which no set of whole outputs describes")
    _check_depth(wiring, kinds)
    plans = plan_layers(wiring, len(kinds), blocks, every=True)  # the parts are never called
    reads: dict[Read, frozenset[Output]] = {}
    streams: Sequence[_Names] = [_Names()]
    for i, kind in enumerate(kinds):
        reads[Read(i, "attn")], streams = read(streams, plans[i].attn)
        streams = add(streams, None, _Names([Output(i, "attn")]), keep=plans[i].mlp + 1)
        reads[Read(i, "mlp")], streams = read(streams, plans[i].mlp)
        shared = _Names([Output(i, "shared")]) if "shared" in MLP_PARTS[kind] else None
        routed = _Names([Output(i, "routed")]) if "routed" in MLP_PARTS[kind] else None
        outputs = split(shared, routed, plans[i].settles(routed is not None))
        streams = add(streams, *outputs, keep=plans[i].hands_on)
    reads[Read(len(kinds), "norm")] = streams[0]
    return reads


def reductions(
    wiring: Wiring,
    kinds: Sequence[Kind],
    blocks: Blocks = Blocks(),  # noqa: B008
) -> list[tuple[Reduction, ...]]:
    """For each decoder layer, the reductions that start in it, in the order in which they start.

    Args:
        wiring: any wiring. Reductions that Desync drops do not appear.
        blocks: says whether outputs are normed on arrival; by default they are not.

    Raises:
        ValueError: the wiring names a layer that does not exist, or it is Desync and outputs are normed on arrival.
    """
    computed = [Output(i, part) for i, kind in enumerate(kinds) for part in ("attn", *MLP_PARTS[kind])]
    find = _kept_sums if wiring.name in DESYNC else _first_needed_together
    found: list[list[Reduction]] = [[] for _ in kinds]
    for sums, place in find(wiring, kinds, blocks, computed):
        last = sums[-1]
        later = computed[computed.index(last) + 1 :]
        covered_by = tuple(output for output in later if _when(_input_of(output)) < _when(place))
        found[last.layer].append(Reduction(tuple(sums), last, place, covered_by))
    return [tuple(sorted(layer, key=lambda reduction: computed.index(reduction.starts_after))) for layer in found]


def _first_needed_together(
    wiring: Wiring, kinds: Sequence[Kind], blocks: Blocks, computed: Sequence[Output]
) -> list[tuple[list[Output], Read]]:
    first: dict[Output, Read] = {}
    for place, includes in reads_of(wiring, kinds, blocks).items():
        first |= dict.fromkeys(includes - first.keys(), place)
    groups: dict[tuple[int, bool, Read], list[Output]] = {}
    for output in computed:
        apart = blocks.normed and output.part == "attn"
        groups.setdefault((output.layer, apart, first[output]), []).append(output)
    return [(sums, place) for (*_, place), sums in groups.items()]


def _kept_sums(
    wiring: Wiring, kinds: Sequence[Kind], blocks: Blocks, computed: Sequence[Output]
) -> list[tuple[list[Output], Read]]:
    # A reduction that Desync keeps sums all outputs since the last kept reduction, and the next read awaits it.
    _check_depth(wiring, kinds)
    if blocks.normed:
        raise ValueError(f"{wiring.name} has no whole outputs, which the norms of this architecture need")
    keeps = kept_reductions(wiring.layers, wiring.kept)
    groups, local = [], []
    for output in computed:
        local.append(output)
        attn, mlp = keeps.get(output.layer, (True, True))
        if output.part == "attn" and attn:
            groups.append((local, Read(output.layer, "mlp")))
            local = []
        elif output.part == MLP_PARTS[kinds[output.layer]][-1] and mlp:
            follower = "norm" if output.layer + 1 == len(kinds) else "attn"
            groups.append((local, Read(output.layer + 1, follower)))
            local = []
    return groups


def _input_of(output: Output) -> Read:
    """The read that an output is computed from."""
    return Read(output.layer, "attn" if output.part == "attn" else "mlp")


def _when(place: Read) -> tuple[int, bool]:
    """A key that sorts reads in the order of execution: the attention of a layer reads before its MLP."""
    return place.layer, place.by == "mlp"


def _check_depth(wiring: Wiring, kinds: Sequence[Kind]) -> None:
    if wiring.layers and wiring.layers[-1] >= len(kinds):
        raise ValueError(f"layer {wiring.layers[-1]} does not exist: the model has {len(kinds)}")


# What is called, and what happens to its output: it is added to the sum that is being collected; the sum starts and
# stays in flight; the sum is reduced at once, because nothing covers it; the output stays this rank's own (Desync); or
# all ranks' running sums are averaged with it (Desync).
Call = Literal["attn", "mlp", "shared", "routed"]
Then = Literal["collect", "start", "now", "local", "resync"]


class Step(NamedTuple):
    """One call of a layer, and what happens to its output.

    Attributes:
        call: what is called.
        then: what happens to the output.
        joins: whether the output is first added to the sum that is being collected.
        crosses: whether the sum that starts here is in flight while an attention is computed.
        slot: the lowest number that no other sum has that is in flight when this one starts.
    """

    call: Call
    then: Then
    joins: bool
    crosses: bool
    slot: int = 0


class LayerPlan(NamedTuple):
    """What one decoder layer does.

    Attributes:
        attn: the sums that the attention's read awaits, as positions among those not landed yet, oldest first.
        mlp: the same for the MLP's read.
        steps: the calls, in their order; the first is the attention.
        hands_on: None if the next layer takes over what is in flight. Otherwise the layer returns vLLM's pair
            ``(hidden, residual)``: the residual includes the sums at these positions, and ``hidden`` the others. An
            engine whose last layer this is needs their sum alone.
    """

    attn: tuple[int, ...]
    mlp: tuple[int, ...]
    steps: tuple[Step, ...]
    hands_on: tuple[int, ...] | None

    @property
    def splits(self) -> bool:
        """Whether shared and routed experts are called one by one."""
        return any(step.call == "shared" for step in self.steps)


@dataclass(frozen=True)
class PlannedWiring(LayerWiring):
    """A layer's place in the schedule.

    Attributes:
        index: 0-based index of the decoder layer.
        plan: what the layer does.
    """

    index: int
    plan: LayerPlan


class Running(NamedTuple):
    """The residual stream of one rank between two calls of a layer, apart from what is in flight.

    Attributes:
        landed: what the last read has included; None if the oldest sum in flight includes it, too.
        collected: the outputs that wait for others with which they share a sum; None if there are none.
    """

    landed: Any
    collected: Any


class Sent(NamedTuple):
    """What joins the sums that a later read awaits.

    Attributes:
        out: what this rank adds to the sum.
        how: the sum starts and stays in flight; or it is reduced at once; or there is none, and ``out`` stays this
            rank's own.
        arrives: whether the layer still norms or multiplies the sum when it has arrived.
    """

    out: Any
    how: Literal["start", "now", "local"]
    arrives: bool


def run_step(
    step: Step, out: Any, state: Running, arrive: Callable[[Any], Any] | None, degree: int
) -> tuple[Running, Sent | None]:
    """Do with the output of a call what its step says.

    Args:
        step: what was called, and what happens to its output.
        out: the output of this rank, a tensor ``[..., hidden]``.
        state: the stream before.
        arrive: what the layer does with a sum before it is added to the stream; None if it is added as it is. Outputs
            that share a sum have the same one, and under Desync it acts on a part of an output as on the whole.
        degree: the number of tensor-parallel ranks.

    Returns:
        The stream after it, and what is sent; None if the output is collected.
    """
    landed, collected = state
    if step.joins:
        assert collected is not None, "the first output of a sum is collected"
        out, collected = collected + out, None
    if step.then == "collect":
        return Running(landed, out), None
    if step.then == "resync":
        assert landed is not None, "a reduction of Desync includes what this rank has added"
        own = out if arrive is None else arrive(out)
        return Running(None, collected), Sent(own + landed / degree, "now", arrives=False)
    return Running(landed, collected), Sent(out, step.then, arrives=True)


class _Waiting(NamedTuple):
    """A sum, or an output of this rank alone, that no read has included yet."""

    awaited_by: Read
    slot: int | None  # that of a sum in flight


def layer_plans(
    wiring: Wiring,
    kinds: Sequence[Kind],
    stage: range,
    every: bool = False,
    blocks: Blocks = Blocks(),  # noqa: B008
) -> dict[int, LayerPlan]:
    """What the layers of one pipeline stage do. Layers are left out that read and sum as the original's code does.

    Args:
        kinds: the kind of each decoder layer of the model. Kinds outside of the stage have no effect.
        stage: the indices of the layers of this stage.
        every: whether no layer is left out, and shared and routed experts are always two calls.
        blocks: says whether outputs are normed on arrival; by default they are not.

    Raises:
        ValueError: the wiring names a layer that does not exist, or more streams than vLLM's pair would have to cross
            the border of the stage.
    """
    schedule = reductions(wiring, kinds, blocks)
    partial_reads = _partial_reads(wiring, len(kinds))
    wired = [every or i in wiring.layers or not _is_standard(i, kinds[i], schedule[i]) for i in range(len(kinds))]
    # The next stage cannot see the kind of this layer, so what it gets depends on what it reads alone.
    wired[stage.stop - 1] |= stage.stop in partial_reads
    plans: dict[int, LayerPlan] = {}
    queue: list[_Waiting] = []
    for i in stage:
        if i == stage.start:  # the pair that the stage before handed on, or the embedding
            queue = [_Waiting(Read(i, "mlp" if i in partial_reads else "attn"), None)] if i else []
        elif not wired[i - 1]:
            queue = [_Waiting(Read(i, "attn"), None)]
        if not wired[i]:
            continue
        attn, mlp, steps = _land(queue, Read(i, "attn")), (), []
        for call, parts in _calls(i, kinds[i], schedule[i], every):
            if len(steps) == 1:
                mlp = _land(queue, Read(i, "mlp"))
            outputs = [Output(i, part) for part in parts]
            ends = next((reduction for reduction in schedule[i] if reduction.starts_after == outputs[-1]), None)
            then, joins = _then(queue, outputs, ends, wiring), _joins(outputs[0], schedule[i], wiring)
            crosses = ends is not None and any(output.part == "attn" for output in ends.covered_by)
            steps.append(Step(call, then, joins, crosses, (queue[-1].slot or 0) if then == "start" else 0))
        last = i + 1 == stage.stop
        hands_on = None
        if last or not wired[i + 1]:
            hands_on = _pair(queue, i, len(kinds), splits=last and i + 1 in partial_reads)
        plans[i] = LayerPlan(attn, mlp, tuple(steps), hands_on)
    return plans


def plans_of(
    layers: Sequence[Any], parts: Callable[[Any], Parts], wiring: Wiring, blocks: Blocks
) -> dict[int, LayerPlan]:
    """What the decoder layers of a whole model do, all of which are taken apart by ``parts``.

    Raises:
        ConfigError: the wiring does not fit the model.
    """
    try:
        kinds: list[Kind] = [kind_of(parts(layer)) for layer in layers]
        return layer_plans(wiring, kinds, range(len(kinds)), every=True, blocks=blocks)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _is_standard(i: int, kind: Kind, schedule: Sequence[Reduction]) -> bool:
    """Whether vLLM's own code does what the schedule asks of a layer."""
    mlp = tuple(Output(i, part) for part in MLP_PARTS[kind])
    found = [(reduction.sums, reduction.awaited_by) for reduction in schedule]
    attn = ((Output(i, "attn"),), Read(i, "mlp"))
    return found in ([attn, (mlp, Read(i + 1, "attn"))], [attn, (mlp, Read(i + 1, "norm"))])


def _partial_reads(wiring: Wiring, count: int) -> set[int]:
    """The layers whose attention reads a partial stream, with experts or without."""
    if wiring.name in DESYNC:
        return set()
    plans = plan_layers(wiring, count, Blocks(), every=True)  # the parts are never called
    return {i + 1 for i, plan in plans.items() if plan.hands_on > 1}


def _calls(i: int, kind: Kind, schedule: Sequence[Reduction], every: bool) -> list[tuple[Call, tuple[Part, ...]]]:
    """The calls of a layer in their order, and the outputs that each of them computes.

    Shared and routed experts are one call, which vLLM can run on two streams, unless their outputs are needed apart or
    ``every`` asks for two.
    """
    parts, both = MLP_PARTS[kind], {Output(i, "shared"), Output(i, "routed")}
    apart = len(parts) > 1 and (every or any(len(both.intersection(reduction.sums)) == 1 for reduction in schedule))
    mlp: list[tuple[Call, tuple[Part, ...]]] = [("shared", ("shared",)), ("routed", ("routed",))]
    return [("attn", ("attn",)), *(mlp if apart else [("mlp", parts)])]


def _then(queue: list[_Waiting], outputs: list[Output], ends: Reduction | None, wiring: Wiring) -> Then:
    """What happens to the outputs of a call, which end a reduction or none. The queue gets what has to be awaited."""
    if ends is None and wiring.name in DESYNC:
        queue.append(_Waiting(_next_read(outputs[-1]), None))
        return "local"
    if ends is None:
        return "collect"
    alone = ends.sums == tuple(outputs)
    taken = {waiting.slot for waiting in queue} - {None}
    covered = bool(ends.covered_by or taken)
    queue.append(_Waiting(ends.awaited_by, min({*range(len(taken) + 1)} - taken) if covered else None))
    if wiring.name in DESYNC and not alone:
        return "resync"
    return "start" if covered else "now"


def _joins(output: Output, schedule: Sequence[Reduction], wiring: Wiring) -> bool:
    """Whether an output is reduced together with an earlier one of its layer; under Desync the running sum has that."""
    return wiring.name not in DESYNC and any(output in reduction.sums[1:] for reduction in schedule)


def _next_read(output: Output) -> Read:
    """The read that follows an output; the final norm reads where a layer behind the last one would."""
    return Read(output.layer, "mlp") if output.part == "attn" else Read(output.layer + 1, "attn")


def _land(queue: list[_Waiting], place: Read) -> tuple[int, ...]:
    """Take what a read awaits out of the queue, and return the positions that it had."""
    found = tuple(n for n, waiting in enumerate(queue) if waiting.awaited_by == place)
    queue[:] = [waiting for waiting in queue if waiting.awaited_by != place]
    return found


def _pair(queue: Sequence[_Waiting], i: int, layers: int, splits: bool) -> tuple[int, ...]:
    """``LayerPlan.hands_on`` of a layer before vLLM's own code; ``splits`` if the next stage reads a partial stream."""
    if not splits:
        assert all(waiting.awaited_by in (Read(i + 1, "attn"), Read(layers, "norm")) for waiting in queue)
        return tuple(range(len(queue) - 1))
    if any(waiting.awaited_by not in (Read(i + 1, "attn"), Read(i + 1, "mlp")) for waiting in queue):
        raise ValueError(f"after layer {i} more than two streams would have to cross the border of a pipeline stage")
    return tuple(n for n, waiting in enumerate(queue) if waiting.awaited_by == Read(i + 1, "attn"))
