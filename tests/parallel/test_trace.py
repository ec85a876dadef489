"""The share of communication that a trace hides, on traces small enough to count by hand."""

import gzip
import json
from pathlib import Path

import pytest
from benchmarks.train.trace import draw, files, hta_overlap, without_last_combine

from fcsd.errors import BadInputError
from fcsd.parallel import trace


def event(category, name, start, end, **args):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "pid": 1, "tid": 7, "args": args}


def call(name, launched, start, end, correlation):
    """A range on the host, the launch in it, and the NCCL kernel that it launched."""
    return [
        event("user_annotation", name, launched, launched + 2),
        event("cuda_runtime", "cudaLaunchKernelExC", launched + 1, launched + 1.5, correlation=correlation),
        event("kernel", "ncclDevKernel_SendRecv", start, end, correlation=correlation),
    ]


def copied(name, launched, times, correlation):
    """A range whose rows are copied: the own ones, then to a peer and, on another stream, out of the buffer."""
    events = [event("user_annotation", name, launched, launched + 9)]
    for number, (kind, (start, end)) in enumerate(zip(("DtoD", "PtoP", "DtoD"), times, strict=True), correlation):
        events += [event("cuda_runtime", "cudaMemcpyAsync", launched + 1, launched + 2, correlation=number)]
        events += [event("gpu_memcpy", f"Memcpy {kind} (Device -> Device)", start, end, correlation=number)]
    return events


def computed(start, end, correlation):
    return [
        event("cuda_runtime", "cudaLaunchKernel", start - 1, start - 0.5, correlation=correlation),
        event("kernel", "gemm", start, end, correlation=correlation),
    ]


def write(path, events, rank=0):
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": rank}}))
    return path


# Traces that were cut to one layer, and what HolisticTraceAnalysis says of them, in per cent.
STORED = Path(__file__).parents[1] / "data"
HTA = json.loads((STORED / "hta.json").read_text())

EVENTS = [
    *call("fcsd::dispatch.fwd.L0", 0, 100, 140, 1),
    *call("fcsd::combine.fwd.L0", 10, 200, 220, 2),
    *call("fcsd::dispatch.bwd.L0", 20, 300, 310, 3),
    *computed(90, 120, 4),
    *computed(115, 130, 5),  # overlaps its neighbour: 30 µs of the dispatch are covered, not 35
    event("kernel", "ncclDevKernel_AllReduce", 120, 125, correlation=6),  # ZeRO's: outside of every range
    event("gpu_memcpy", "Memcpy DtoH", 200, 220, correlation=7),  # no computation
]


def test_hidden_and_exposed_time_of_each_kind_and_pass(tmp_path):
    found = trace.overlaps([trace.read(write(tmp_path / "t.json", EVENTS))])
    dispatch, combine = found["dispatch", "fwd"], found["combine", "fwd"]
    assert (dispatch.on_device, dispatch.hidden, dispatch.share) == (0.040, 0.030, 0.75)
    assert (combine.on_device, combine.hidden, combine.exposed) == (0.020, 0.0, 0.020)
    assert found["all", "fwd"].share == 0.5
    assert found["dispatch", "bwd"].hidden == 0.0
    assert dispatch.late is None


def test_the_last_layers_combine_can_be_left_out(tmp_path):
    found = without_last_combine([trace.read(write(tmp_path / "t.json", EVENTS))])
    assert found["all", "fwd"].share == 0.75
    assert ("combine", "fwd") not in found


def test_waiting_for_a_late_rank_is_told_from_the_wire(tmp_path):
    late = [*call("fcsd::dispatch.fwd.L0", 0, 130, 140, 1), *computed(90, 120, 4)]
    first = trace.read(write(tmp_path / "0.json", [*call("fcsd::dispatch.fwd.L0", 0, 100, 140, 1)]))
    second = trace.read(write(tmp_path / "1.json", late, rank=1))
    found = trace.overlaps([first, second])["dispatch", "fwd"]
    assert (found.calls, found.on_device, found.late) == (2, 0.050, 0.030)


def test_copies_to_peers_are_one_collective_and_no_computation(tmp_path):
    first = copied("fcsd::dispatch.fwd.L0", 0, [(100, 104), (102, 112), (140, 150)], 10) + computed(140, 155, 1)
    first += [event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 104, 106, correlation=2)]  # no range's: computation
    first += [event("gpu_memcpy", "Memcpy HtoD (Host -> Device)", 100, 160, correlation=3)]  # neither
    second = copied("fcsd::dispatch.fwd.L0", 0, [(120, 124), (122, 132), (133, 143)], 10)
    traces = [trace.read(write(tmp_path / f"{rank}.json", e, rank=rank)) for rank, e in enumerate((first, second))]
    assert [(call.start, call.end) for found in traces for call in found.calls] == [(100, 150), (120, 143)]
    assert [kernel.name[:11] for kernel in traces[0].computation] == ["Memcpy DtoD", "gemm"]
    found = trace.overlaps(traces)["dispatch", "fwd"]
    assert (found.calls, found.on_device, found.hidden) == (2, 0.073, 0.012)
    assert found.late == 0.008  # from 100 to 120, without the copies until 112


def test_a_kernel_launched_from_another_thread_is_not_in_the_range(tmp_path):
    events = call("fcsd::dispatch.fwd.L0", 0, 100, 140, 1)
    stranger = event("cuda_runtime", "cudaLaunchKernel", 1, 1.5, correlation=9) | {"tid": 8}
    events += [stranger, event("kernel", "gemm", 100, 120, correlation=9)]
    found = trace.read(write(tmp_path / "t.json", events))
    assert [kernel.name for kernel in found.computation] == ["gemm"]
    assert trace.overlaps([found])["dispatch", "fwd"].share == 0.5


def test_gzipped_traces_are_read(tmp_path):
    path = tmp_path / "t.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    assert len(trace.read(path).calls) == 3


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": 3}', "{}"])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(BadInputError, match="not a Chrome trace"):
        trace.read(tmp_path / "t.json")


def test_a_trace_without_ranges_of_ours_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="no collective of fcsd"):
        trace.read(write(tmp_path / "t.json", computed(0, 1, 1)))


def layers_of(passes, kinds, first, step):
    """Three layers whose collectives follow one another, each under a kernel."""
    events = []
    for place, layer in enumerate((0, 1, 2) if passes == "fwd" else (2, 1, 0)):
        for number, kind in enumerate(kinds):
            at = first + 100 * place + 50 * number
            key = at + step
            events += call(f"fcsd::{kind}.{passes}.L{layer}", at, at, at + 30, key)
            events += computed(at + 5, at + 40, key + 1)
    return events


@pytest.mark.lab
def test_a_layer_is_drawn(tmp_path):
    events = layers_of("fwd", ("dispatch", "combine"), 1000, 1) + layers_of("bwd", ("combine", "dispatch"), 2000, 2)
    found = trace.read(write(tmp_path / "t.json", events))
    draw(found, tmp_path / "layer.png")
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BadInputError, match="no dispatch of layer 3 in fwd"):
        draw(found, tmp_path / "no.png", 2)


@pytest.mark.parametrize("name", HTA)
def test_stored_traces_give_the_figure_of_hta_and_a_picture(tmp_path, name):
    found = trace.read(STORED / name)
    assert round(hta_overlap(STORED / name), 2) == HTA[name]
    assert {call.kind for call in found.calls} >= {"dispatch", "combine"}
    draw(found, tmp_path / "layer.png", middle_of(found))


def test_a_stored_trace_of_a_gpu_keeps_its_figures():
    found = trace.overlaps([trace.read(STORED / "h200.json.gz")])
    shares = {key: round(overlap.share, 4) for key, overlap in found.items() if key[0] in ("all", "plan")}
    assert shares == {("all", "fwd"): 0.5024, ("all", "bwd"): 0.6566, ("plan", "fwd"): 0.9908}


def middle_of(found):
    """The layer that is there whole: its neighbours only begin."""
    return sorted({call.layer for call in found.calls})[1]


def test_the_traces_of_a_run_are_found_in_its_directory(tmp_path):
    with pytest.raises(BadInputError, match="no trace in"):
        files([tmp_path])
    for name in ("rank-1.json.gz", "rank-0.json.gz", "step.json"):
        (tmp_path / name).touch()
    assert files([tmp_path]) == [tmp_path / "rank-0.json.gz", tmp_path / "rank-1.json.gz"]
    assert files([tmp_path / "step.json"]) == [tmp_path / "step.json"]
