"""Derives the tensor-parallel schedule of a wiring: what each layer sums, when the sum starts, which read awaits it.

Under tensor parallelism every output of a layer is a partial sum on each rank. It has to be reduced before the first
read that includes it, and no earlier. One rule follows, and it is the whole schedule:

    The outputs of one layer that the same read needs first share one reduction. The reduction starts when the last of
    them is computed, and that read awaits it.

Where outputs are normed on arrival, the attention's is normed apart from the MLP's, so these two never share one.

The rule runs the wiring itself: ``read``, ``split`` and ``add`` of ``wiring.py`` on sets of names instead of tensors,
so the schedule cannot differ from the model. The outputs of a layer are computed in the order attention, shared
experts, routed experts; a dense MLP counts as shared experts, as everywhere in a wiring.

This file contains no communication. An engine, a plugin or a bound takes the reductions from here and decides how
they travel.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from .wiring import Parts, add, plan_layers, read, split
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
        kinds: the kind of each decoder layer.
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
        kinds: the kind of each decoder layer.
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
