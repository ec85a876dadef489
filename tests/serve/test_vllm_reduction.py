"""The plugin's operators, and which sums are in flight; vLLM is doubled at its border."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fcsd.models.schedule import Step
from fcsd.parallel.all_reduce.ways import Way
from fcsd.serve.vllm import reduction

# A sum that is in flight at an attention, and those of shared experts.
ATTN = Step("attn", "start", joins=False, crosses=True)
JOINED, ALONE = (Step("shared", "start", joins, crosses=False) for joins in (True, False))


@pytest.fixture
def graphs(module: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Says that a graph of this mode is captured, or none."""

    def capture(graph: str | None) -> None:
        mode = SimpleNamespace(FULL="full", PIECEWISE="piecewise")
        context = SimpleNamespace(cudagraph_runtime_mode=graph and getattr(mode, graph))
        module("vllm.config", CUDAGraphMode=mode)
        available = {"is_forward_context_available": lambda: bool(graph)}
        module("vllm.forward_context", get_forward_context=lambda: context, **available)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph is not None)

    return capture


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[[], str]:
    """Writes a table of sums, and returns its name."""

    def write() -> str:
        decode = [(16, "symmetric", True), (32, "vllm", False)]
        prefill = [(512, "vllm", True), (1024, "vllm", False), (2048, "quantised:int8", True)]
        rows = {"decode": decode, "prefill": prefill}
        table: dict[str, Any] = {
            "version": 1,
            "user": "plugin",
            "tp": 2,
            "wiring": "ladder",
            "model": "",
            "command": "",
        }
        for step, ways in rows.items():
            table[step] = [dict(zip(("from", "reduce", "travels"), way, strict=True)) for way in ways]
        (tmp_path / "table.json").write_text(json.dumps(table))
        return str(tmp_path / "table.json")

    return write


def test_both_operators_sum_at_once_on_a_cpu(ranks, monkeypatch):
    x = torch.ones(2, 3)
    reducer = reduction.Reducer(2, "tp:0")
    started = reducer.start(x, ATTN)
    assert torch.equal(reducer.wait(started, x), torch.full((2, 3), 2.0)) and torch.equal(x, torch.ones(2, 3))
    assert reducer.now(x).summand is None and torch.equal(reducer.now(x).total, started.total)
    asked = []

    def reduce(x: torch.Tensor, group: Any, kind: str) -> Any:
        asked.append((group, kind))
        return SimpleNamespace(wait=lambda: x.mul_(3))

    monkeypatch.setattr("fcsd.parallel.all_reduce.reduce.reduce", reduce)
    own = reduction.Reducer(2, "tp:0", "quantised:int8")
    assert torch.equal(own.wait(own.start(x, ATTN), x), torch.full((2, 3), 3.0)) and torch.equal(x, torch.ones(2, 3))
    assert asked == [("the process group", "quantised:int8")]
    for alone in (reduction.Reducer(1, "tp:0"), reduction.Reducer(2, "tp:0", "none")):
        assert alone.start(x, ATTN).total is x and alone.now(x).total is x
        assert alone.wait(alone.start(x, ATTN), x) is x


def test_shared_experts_start_their_sum_with_what_is_held(ranks):
    reducer, own, x, later = reduction.Reducer(2, "tp:0"), torch.ones(2, 3), torch.full((2, 3), 4.0), torch.zeros(2, 3)
    reducer.hold(x, own)
    total = reducer.start_held(x, JOINED)
    started = reducer.held(total, own, later, JOINED)
    assert torch.equal(reducer.wait(started, total), torch.full((2, 3), 10.0)) and started.summand is own
    reducer.hold(x, None)
    alone = reducer.held(reducer.start_held(x, ALONE), None, later, ALONE)
    assert torch.equal(alone.total, torch.full((2, 3), 8.0)) and alone.summand is later
    assert torch.equal(own, torch.ones(2, 3)) and torch.equal(x, torch.full((2, 3), 4.0))
    for silent in (reduction.Reducer(1, "tp:0"), reduction.Reducer(2, "tp:0", "none")):
        silent.hold(x, own)
        assert silent.start_held(x, JOINED) is x and reduction.define_operators()._held is None
        assert torch.equal(silent.held(x, own, later, JOINED).total, own + x)
        assert silent.held(x, None, later, ALONE).total is x


@pytest.fixture
def streams(module: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[str]]:
    """Doubles of the main stream and of a second one, which is the current one; and what happens on streams."""
    events: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Any) -> None:
            events.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event: Any) -> None:
            events.append(f"{self.name} waits for {event.name}")

    current, side = [Stream("main"), Stream("second")], Stream("sums")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        events.append(f"sum on {current[-1].name}")
        return torch.empty(x.shape)

    ranks = SimpleNamespace(_all_reduce_out_place=all_reduce, device_group=None)
    parallel_state = module("vllm.distributed.parallel_state", _groups={"tp:0": lambda: ranks})
    module("vllm.distributed", parallel_state=parallel_state)
    monkeypatch.setattr(reduction.InFlight, "side", lambda self: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None, name="the sum"))
    return current, events


@pytest.fixture
def operators() -> reduction.InFlight:
    """What a process has in flight, apart from that of this process's operators."""
    return reduction.InFlight(torch.library.Library("fcsd_test", "FRAGMENT"))


@pytest.mark.parametrize("travels", [True, False])
def test_a_sum_of_shared_experts_starts_on_the_stream_that_computed_them(streams, operators, monkeypatch, travels):
    """vLLM may compute them beside the routed experts. Tensors have no content."""
    current, events = streams
    monkeypatch.setattr(reduction, "way_of", lambda *given: Way("vllm", travels))
    own, x = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    operators.hold(x, own)
    total = operators.start_held(x, True, 1, "tp:0", "vllm", 0, False)
    current.pop()
    if travels:
        assert any(isinstance(kept, torch.Tensor) for kept in operators.sums[1].wait.args), "what is summed stays"  # pyright: ignore[reportFunctionMemberAccess]
    operators.wait(total, own, x, 1)
    in_flight = ["sums waits for second", "sum on sums", "main waits for the sum"]
    assert events == (in_flight if travels else ["sum on second"]) and not operators.sums


@pytest.mark.parametrize("pieces", [True, False])
def test_in_a_piece_a_sum_that_crosses_an_attention_is_made_behind_the_one_in_flight(
    streams, operators, graphs, pieces
):
    """The sums of ``ladder``: the attention's, and the MLP's before the first is awaited."""
    current, events = streams
    current.pop()
    graphs("PIECEWISE")
    x = torch.empty(2, 3, device="meta")
    attn = operators.start(x, 0, "tp:0", "vllm", 2048, pieces)
    mlp = operators.start(x, 1, "tp:0", "vllm", 2048, False)
    operators.wait(mlp, x, x, 1)
    operators.wait(attn, x, x, 0)
    within = ["sums waits for main", "sum on sums", "main waits for sums", "sum on main", "main waits for the sum"]
    assert events == (within if pieces else ["sum on main", "sum on main"]) and not operators.sums


def test_a_sum_that_was_copied_in_flight_or_never_awaited_is_an_error(streams, operators, monkeypatch):
    """Each sum is known by its slot; what is awaited has to be the memory in which it arrives."""
    current, events = streams
    current.pop()
    monkeypatch.setattr(reduction, "way_of", lambda *given: Way("vllm", True))
    x = torch.empty(2, 3, device="meta")
    first, second = (operators.start(x, slot, "tp:0", "vllm", 0, False) for slot in (0, 1))
    with pytest.raises(RuntimeError, match="sum 1 was not awaited"):
        operators.start(x, 1, "tp:0", "vllm", 0, False)
    events.clear()
    operators.wait(second, x, x, 1)
    operators.wait(second, x, x, 1)  # a sum that was complete when it started has nothing to wait for
    assert events == ["main waits for the sum"] and [*operators.sums] == [0]
    with pytest.raises(RuntimeError, match="copied a sum"):
        operators.wait(first.clone(), x, x, 0)


def test_a_wait_stays_behind_another_tensor_than_the_one_it_completes(ranks):
    """The operator writes to the sum; an operator may not read through one argument what it writes through another."""
    behind = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.fcsd.reduce_wait.default:
                total, _, after, *_ = args
                behind.append((after, total))
            return func(*args, **(kwargs or {}))

    reducer, x, newest = reduction.Reducer(2, "tp:0"), torch.ones(2, 3), torch.ones(4)
    with Watch():
        for latest in (newest, None):
            started = reducer.start(x, ATTN)
            reducer.wait(started, started.total if latest is None else latest)
    (first, _), (second, total) = behind
    assert first is newest and second is x and second.data_ptr() != total.data_ptr()


@pytest.mark.parametrize(
    ("graph", "tokens", "overlap_from", "expected"),
    [
        (None, 2047, reduction.OVERLAP_FROM, False),
        (None, 2048, reduction.OVERLAP_FROM, True),
        (None, 1, 0, True),
        ("FULL", 1, reduction.OVERLAP_FROM, True),
        ("PIECEWISE", 8192, 0, False),
    ],
)
def test_a_sum_is_in_flight_where_that_pays(graphs, graph, tokens, overlap_from, expected):
    graphs(graph)
    summand: Any = SimpleNamespace(device=torch.device("cuda"), shape=(tokens, 16))
    for within in (False, True):
        travels = expected or (within and graph == "PIECEWISE")
        assert reduction.way_of(summand, "vllm", overlap_from, within) == ("vllm", travels)
        assert not reduction.way_of(torch.ones(tokens, 1), "vllm", overlap_from, within).travels, "on a CPU nothing is"


@pytest.mark.parametrize(
    ("graph", "tokens", "expected"),
    [
        ("FULL", 8, ("vllm", False)),  # before the first row
        ("FULL", 16, ("symmetric", True)),
        ("FULL", 32, ("vllm", False)),
        ("PIECEWISE", 4096, ("quantised:int8", False)),  # of the other steps, and in a piece never in flight
        ("PIECEWISE", 1024, ("vllm", False)),
        (None, 32, ("vllm", False)),
        (None, 4096, ("quantised:int8", True)),
    ],
)
def test_a_table_chooses_for_the_one_size_of_a_graph(graphs, write_table, graph, tokens, expected):
    graphs(graph)
    summand: Any = SimpleNamespace(device=torch.device("cuda"), shape=(tokens, 16))
    for within in (False, True):
        assert reduction.way_of(summand, write_table(), 0, within) == expected
    graphs("PIECEWISE")
    for size in (512, 256):  # a row that lets sums travel, and below the first row, where it is as without a table
        summand.shape = (size, 16)
        ways = [reduction.way_of(summand, write_table(), 0, within) for within in (False, True)]
        assert ways == [("vllm", False), ("vllm", True)]
    assert not reduction.way_of(summand, "symmetric", 0, True).travels


def test_what_a_table_chooses_sums_and_is_made_before_a_graph_is_captured(ranks, write_table, monkeypatch):
    made, asked = [], []
    monkeypatch.setattr("fcsd.parallel.all_reduce.reduce.Reduction", lambda group, kind, layer: made.append(kind))

    def reduce(x: torch.Tensor, group: Any, kind: str) -> Any:
        asked.append(kind)
        return SimpleNamespace(wait=lambda: x.mul_(2))

    monkeypatch.setattr("fcsd.parallel.all_reduce.reduce.reduce", reduce)
    by_table, plain = reduction.Reducer(2, "tp:0", write_table(), 0), reduction.Reducer(2, "tp:0")
    for tokens in (3, 4096):
        x = torch.ones(tokens, 2)
        assert torch.equal(by_table.wait(by_table.start(x, ATTN), x), plain.wait(plain.start(x, ATTN), x))
    assert made == ["symmetric", "quantised:int8"] and asked == ["quantised:int8"], "each once, with the first sum"
