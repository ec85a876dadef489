"""Rows in quantised communication: schedules, transports, recompute and the number of ranks change no bit."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny
import torch
import torch.distributed as dist
from blocks import Block
from divided import sharded
from file_buffers import opener
from late import late_collectives
from ranks import in_group
from studies.formats.directions import parse_formats
from test_dispatcher import through
from test_overlap import ALL, FARSKIP, _difference, _run
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format, decode, encode
from fcsd.models.wiring import Wiring
from fcsd.parallel.expert.dispatcher import Dispatcher, Mode, Transfer
from fcsd.parallel.expert.flat import flat
from fcsd.parallel.expert.hierarchical import hierarchical
from fcsd.parallel.expert.levels import one_level
from fcsd.parallel.expert.placement import Placement
from fcsd.parallel.overlap import overlap
from fcsd.parallel.quantised import Formats, Quantiser, RowCodec, simulate
from fcsd.parallel.transports.copies import CopiesTransport
from fcsd.parallel.transports.transport import Traffic, all_to_all

WIDTH, EXPERTS, TOP_K = 32, 6, 2  # of the rows without a model

DEDUPLICATED = hierarchical(one_level(2))


class Case(NamedTuple):
    """A wire on which the schedules are compared."""

    formats: str
    recompute: bool = False
    copies: bool = False
    wiring: Wiring = FARSKIP
    dispatcher: Dispatcher = flat
    fused: bool = False


CASES = (
    Case("int8:g64"),
    Case("dispatch=int4:g32,combine=int3:g32:sr", wiring=Wiring("ladder", ALL)),
    Case("dispatch_grad=int4:g32,combine_grad=int6:g64"),
    Case("int5:g16", copies=True),
    Case("int5:g16", recompute=True),
    Case("int8:g64", recompute=True, dispatcher=DEDUPLICATED),
    Case("combine=int4:g32,combine_grad=int8:g16", copies=True, dispatcher=DEDUPLICATED),
    Case("int8:g64", fused=True),
    Case("dispatch=int4:g32,combine_grad=int6:g64", copies=True, fused=True),
    Case("combine=int4:g32,dispatch_grad=int8:g16", recompute=True, fused=True),
)
DISPATCH_GRAD, COMBINE_GRAD = "dispatch_grad=int4:g32", "combine_grad=int8:g64"
MODES: tuple[Mode, ...] = ("off", "on", "eager-sync")


def _schedules(rank: int, folder: str, every: bool = False) -> list[str]:
    """What differs between the blocking reference and the overlapped schedules on the same wire.

    Args:
        every: whether eager-sync is held against it on all wires. It sends the rows of ``on``, and awaits them at once.
    """
    problems = []
    copies = CopiesTransport(opener(folder))
    ids = tiny.tokens(batch=1, seed=rank, length=4 + 2 * rank)  # the interpreter encodes row by row
    overlap(model := sharded("deepseek_v2"), FARSKIP, "off")
    plain = _run(model, [ids])
    for case in CASES:
        if case.recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        quantiser = Quantiser(parse_formats(case.formats))
        found, sent = [], []
        modes = MODES if every or case is CASES[0] else MODES[:2]
        for mode in modes:
            transport = copies if case.copies else all_to_all
            traffic = Traffic()
            how: Any = {"transport": transport, "dispatcher": case.dispatcher, "fused": case.fused}
            overlap(model, case.wiring, mode, quantiser=quantiser, traffic=traffic, **how)
            late = nullcontext() if mode == "off" else late_collectives()
            with late:
                found.append(_run(model, [ids]))
            sent.append((traffic.sent, traffic.fullest))
        for mode, other in zip(modes[1:], found[1:], strict=True):
            if difference := _difference(found[0], other):
                problems.append(f"{case} {mode}: {difference}")
        if len(set(sent)) > 1:
            problems.append(f"{case}: bytes and rows differ: {sent}")
        if _difference(plain, found[0]) is None:
            problems.append(f"{case}: the rows are not rounded")
        model.gradient_checkpointing_disable()
    return problems + _paused(model, ids, plain)


def _paused(model: Any, ids: Tensor, plain: Any) -> list[str]:
    quantiser = Quantiser(parse_formats("int3:g32"))
    overlap(model, FARSKIP, quantiser=quantiser)
    with quantiser.paused():
        difference = _difference(plain, _run(model, [ids]))
    return [f"paused: {difference}"] if difference else []


def _bytes(rank: int) -> dict[str, int]:
    """The bytes that this rank sends in one pass, for wires that change no choice of a router."""
    found = {}
    model = sharded("deepseek_v2")
    for text in ("", DISPATCH_GRAD, COMBINE_GRAD):
        traffic = Traffic()
        quantiser = Quantiser(parse_formats(text)) if text else None
        overlap(model, FARSKIP, quantiser=quantiser, traffic=traffic)
        _run(model, [tiny.tokens(seed=rank)])
        found[text] = traffic.sent
    return found


def _inputs(rank: int) -> Tensor:
    """Tokens of a rank, ``[2, 3 + rank, WIDTH]``."""
    return torch.randn(2, 3 + rank, WIDTH, generator=torch.Generator().manual_seed(rank))


def _against_one_process(rank: int) -> list[str]:
    """The dispatcher on all ranks against one process that has the tokens of all ranks and simulates the wire."""
    problems, world = [], dist.get_world_size()
    sizes = [_inputs(other)[..., 0].numel() for other in range(world)]
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for text in ("int4:g32", "combine=int3:g32,dispatch_grad=int4:g32"):
        for prescaled in (False, True):
            results = []
            for ranks, at, inputs in ((world, rank, _inputs(rank)), (1, 0, _everyone(world))):
                x = inputs.requires_grad_()
                # The router reads single values, so its sums are exact for any number of tokens.
                router: Any = {"gate": torch.eye(WIDTH, EXPERTS), "scale": torch.arange(1.0, EXPERTS + 1)}
                group = dist.group.WORLD if ranks > 1 else None
                block = Block(Placement(EXPERTS, ranks), group, at, prescaled, **router)
                y = through(x, block, Transfer(quantiser=Quantiser(parse_formats(text))))
                y.square().sum().backward()
                assert x.grad is not None
                results.append([t.detach().view(-1, WIDTH) for t in (y, x.grad)])
            ours, whole = results
            if not all(torch.equal(mine, all_rows[own]) for mine, all_rows in zip(ours, whole, strict=True)):
                problems.append(f"{text}, prescaled {prescaled}")
    return problems


def _moved_by_codecs(rank: int) -> list[str]:
    """What differs if the codecs of the wire move the rows, from the reference that moves them before and after it."""
    problems, world = [], dist.get_world_size()
    gate, scale = torch.eye(WIDTH, EXPERTS), torch.arange(1.0, EXPERTS + 1)
    for text in ("int8:g32", "dispatch=int4:g32", "combine=int5:g16,dispatch_grad=int4:g32", "combine_grad=int8:g32"):
        cases: tuple[tuple[int, Mode], ...] = ((world, "off"), (world, "on"), (1, "on"))
        for ranks, mode in cases:
            results = []
            for fused in (False, True):
                x, router = _inputs(rank).requires_grad_(), gate.clone().requires_grad_()
                at, group = (rank, dist.group.WORLD) if ranks > 1 else (0, None)
                block = Block(Placement(EXPERTS, ranks), group, at, False, router, scale)
                y = through(x, block, Transfer(mode=mode, fused=fused, quantiser=Quantiser(parse_formats(text))))
                y.square().sum().backward()
                assert x.grad is not None and router.grad is not None
                results.append((y.detach(), x.grad, router.grad))
            (y, x_grad, gate_grad), expected = results[1], results[0]
            if not torch.equal(y, expected[0]):
                problems.append(f"{text}, {ranks} ranks, {mode}: {float((y - expected[0]).abs().max())} in the outputs")
            # The scalar products behind the gradient of the scores are added in another order.
            for mine, theirs in ((x_grad, expected[1]), (gate_grad, expected[2])):
                if not torch.allclose(mine, theirs, rtol=1e-5, atol=1e-5):
                    problems.append(f"{text}, {ranks} ranks, {mode}: {float((mine - theirs).abs().max())} in gradients")
    return problems


def _everyone(world: int) -> Tensor:
    return torch.cat([_inputs(rank).view(-1, WIDTH) for rank in range(world)]).unsqueeze(0)


def _two_ranks(rank: int, folder: str) -> dict[str, Any]:
    return {
        "schedules": _schedules(rank, folder),
        "one process": _against_one_process(rank),
        "codecs that move": _moved_by_codecs(rank),
        "bytes": _bytes(rank),
    }


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return in_group(2, _two_ranks, str(tmp_path_factory.mktemp("buffers")))


@pytest.mark.parametrize("what", ["schedules", "one process", "codecs that move"])
def test_no_schedule_and_no_number_of_ranks_changes_a_bit(two_ranks: list[dict[str, Any]], what: str) -> None:
    assert [problem for rank in two_ranks for problem in rank[what]] == []


@pytest.mark.nightly
def test_eager_sync_changes_no_bit_on_any_wire(tmp_path: Path) -> None:
    assert [problem for rank in in_group(2, _schedules, str(tmp_path), True) for problem in rank] == []


def test_bytes_are_those_of_the_records(two_ranks: list[dict[str, Any]]) -> None:
    plain, record4, record8 = 4 * 64, Format.parse("int4:g32").row_bytes(64), Format.parse("int8:g64").row_bytes(64)
    back, there = [], []  # rows that a rank sends to the other in dispatch_grad and in combine_grad
    for found in (rank["bytes"] for rank in two_ranks):
        back.append((found[""] - found[DISPATCH_GRAD]) / (plain - record4))
        there.append((found[""] - found[COMBINE_GRAD]) / (plain - record8))
        assert found[""] == 2 * (back[-1] + there[-1]) * plain  # dispatch and combine are the same rows
    assert back == there[::-1] and min(back) > 0


def _round_trip(rows: Tensor, format: Format) -> Tensor:
    return decode(encode(rows, format), format, rows.shape[1], rows.dtype)


def test_the_gradient_of_rounding_is_the_identity_and_gradients_have_their_own_format() -> None:
    rows = torch.randn(5, WIDTH, requires_grad=True)
    upstream = torch.randn(5, WIDTH)
    there, back = Format.parse("int4:g32"), Format.parse("int6:g16")
    for grad_format in (None, back):
        rows.grad = None
        out = simulate(rows, RowCodec(there), None if grad_format is None else RowCodec(grad_format))
        out.backward(upstream)
        assert torch.equal(out, _round_trip(rows.detach(), there)) and not torch.equal(out, rows)
        assert rows.grad is not None
        assert torch.equal(rows.grad, upstream if grad_format is None else _round_trip(upstream, back))
    assert simulate(rows, None, None) is rows


def test_formats_are_read_for_all_directions_or_for_each() -> None:
    int8, int5 = Format.parse("int8"), Format.parse("int5")
    assert parse_formats("int8") == Formats(int8, int8, int8, int8)
    assert parse_formats("combine_grad=int5,dispatch=int8") == Formats(dispatch=int8, combine_grad=int5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int9", "2 to 8 bits"),
        ("dispatch=int8,dispatch=int4", '"dispatch" is unknown or repeated'),
        ("forward=int8", '"forward" is unknown or repeated'),
        ("combine_grad=int3:sr", "combine_grad: the scales of the format int3:sr cannot express"),
    ],
)
def test_what_is_not_a_wire_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_formats(text)


def test_groups_must_divide_the_row() -> None:
    parse_formats("dispatch=int4:g32").check_width(96)
    with pytest.raises(ConfigError, match="groups of format int8 do not divide rows of 96 values"):
        parse_formats("dispatch=int4:g32,combine=int8").check_width(96)
