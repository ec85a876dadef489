"""Turns the schedule of a wiring into what each decoder layer does under vLLM. Plain data; torch computes nothing here.

Every read of the residual stream includes all that the read before it included, so one running sum of landed outputs
is enough: a layer lands the sums that its read awaits, adds them, and leaves the others in flight.

Under Desync the running sum is that of one rank alone. An output whose reduction is dropped is added to it as it is. A
kept reduction replaces it by the sum over the ranks of ``output + running / degree`` (``fcsd.models.desync``).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from fcsd.models.schedule import MLP_PARTS, Kind, Output, Part, Read, Reduction, reductions
from fcsd.models.wiring import plan_layers as layer_wirings
from fcsd.models.wiring_block import DESYNC, Blocks, Wiring

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
    """

    call: Call
    then: Then
    joins: bool


class LayerPlan(NamedTuple):
    """What one decoder layer does.

    Attributes:
        attn: the sums that the attention's read awaits, as positions among those not landed yet, oldest first.
        mlp: the same for the MLP's read.
        steps: the calls, in their order; the first is the attention.
        hands_on: None if the next layer takes over what is in flight. Otherwise the layer returns vLLM's pair
            ``(hidden, residual)``: the residual includes the sums at these positions, and ``hidden`` the others.
    """

    attn: tuple[int, ...]
    mlp: tuple[int, ...]
    steps: tuple[Step, ...]
    hands_on: tuple[int, ...] | None

    @property
    def splits(self) -> bool:
        """Whether shared and routed experts are called one by one."""
        return any(step.call == "shared" for step in self.steps)


class _Waiting(NamedTuple):
    """A sum, or an output of this rank alone, that no read has included yet."""

    awaited_by: Read
    in_flight: bool


def plan_layers(wiring: Wiring, kinds: Sequence[Kind], stage: range) -> dict[int, LayerPlan]:
    """The layers of one pipeline stage that the plugin takes apart. vLLM's own code runs the others.

    Args:
        wiring: the wiring of the model.
        kinds: the kind of each decoder layer of the model. Kinds outside of the stage have no effect.
        stage: the indices of the layers of this stage.

    Raises:
        ValueError: the wiring names a layer that does not exist, or more streams than vLLM's pair would have to cross
            the border of the stage.
    """
    schedule = reductions(wiring, kinds)
    partial_reads = _partial_reads(wiring, len(kinds))
    wired = [i in wiring.layers or not _is_standard(i, kinds[i], schedule[i]) for i in range(len(kinds))]
    # The next stage cannot see the kind of this layer, so what it gets depends on what it reads alone.
    wired[stage.stop - 1] |= stage.stop in partial_reads
    plans: dict[int, LayerPlan] = {}
    queue: list[_Waiting] = []
    for i in stage:
        if i == stage.start:  # the pair that the stage before handed on, or the embedding
            queue = [_Waiting(Read(i, "mlp" if i in partial_reads else "attn"), False)] if i else []
        elif not wired[i - 1]:
            queue = [_Waiting(Read(i, "attn"), False)]
        if not wired[i]:
            continue
        attn, mlp, steps = _land(queue, Read(i, "attn")), (), []
        for call, parts in _calls(i, kinds[i], schedule[i]):
            if len(steps) == 1:
                mlp = _land(queue, Read(i, "mlp"))
            outputs = [Output(i, part) for part in parts]
            steps.append(
                Step(call, _then(queue, outputs, schedule[i], wiring), _joins(outputs[0], schedule[i], wiring))
            )
        last = i + 1 == stage.stop
        hands_on = None
        if last or not wired[i + 1]:
            hands_on = _pair(queue, i, len(kinds), splits=last and i + 1 in partial_reads)
        plans[i] = LayerPlan(attn, mlp, tuple(steps), hands_on)
    return plans


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
    plans = layer_wirings(wiring, count, Blocks(), every=True)  # the parts are never called
    return {i + 1 for i, plan in plans.items() if plan.hands_on > 1}


def _calls(i: int, kind: Kind, schedule: Sequence[Reduction]) -> list[tuple[Call, tuple[Part, ...]]]:
    """The calls of a layer in their order, and the outputs that each of them computes.

    Shared and routed experts are one call, which vLLM can run on two streams, unless their outputs are needed apart.
    """
    parts = MLP_PARTS[kind]
    apart = len(parts) > 1 and any(
        Output(i, "shared") in reduction.sums and Output(i, "routed") not in reduction.sums for reduction in schedule
    )
    mlp: list[tuple[Call, tuple[Part, ...]]] = [("shared", ("shared",)), ("routed", ("routed",))]
    return [("attn", ("attn",)), *(mlp if apart else [("mlp", parts)])]


def _then(queue: list[_Waiting], outputs: list[Output], schedule: Sequence[Reduction], wiring: Wiring) -> Then:
    """What happens to the outputs of a call. What has to be awaited is put into the queue."""
    ends = next((reduction for reduction in schedule if reduction.starts_after == outputs[-1]), None)
    if ends is None and wiring.name in DESYNC:
        queue.append(_Waiting(_next_read(outputs[-1]), False))
        return "local"
    if ends is None:
        return "collect"
    alone = ends.sums == tuple(outputs)
    covered = bool(ends.covered_by) or any(waiting.in_flight for waiting in queue)
    queue.append(_Waiting(ends.awaited_by, covered))
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
