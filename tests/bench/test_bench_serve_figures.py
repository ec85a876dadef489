"""What ``fcsd bench serve`` makes of its times: ratios, percentiles, the verdict, the break-even; and its choices."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fcsd.bench.serve import choice, figures, table
from fcsd.bench.serve.figures import PEAK, Answer
from fcsd.bench.serve.measure import stored
from fcsd.bench.serve.running import Server, error_behind, last_error
from fcsd.bench.serve.under_vllm import _options, _without_graphs, read_link
from fcsd.bench.serve.variants import PAIRS, Machine, Missing, Variant, alternatives, core, groups, room_for
from fcsd.bench.serve.workload import Workload
from fcsd.parallel.all_reduce.ways import Way
from fcsd.serve.vllm.reduction import OVERLAP_FROM

# Two requests: the second is sent 0.5 s later, and has its first token when the first one has its third.
ANSWERS = [Answer(0.0, 1.0, 3.0, 5, 1), Answer(0.5, 1.5, 3.5, 5, 1)]


def test_the_times_of_a_batch() -> None:
    assert figures.first_token_ms(ANSWERS) == 1250
    assert figures.step_ms(ANSWERS) == pytest.approx(1e3 * (4.0 - 2.0) / 4)
    assert figures.request_ms(ANSWERS) == 2000
    # Two tokens that came with the first one are no steps, and an answer that came at once has none.
    assert figures.step_ms([ANSWERS[0], Answer(0.5, 1.5, 3.5, 5, 3)]) is None
    assert figures.step_ms([ANSWERS[0], Answer(0.5, 1.5, 3.5, 6, 3)]) == pytest.approx(1e3 * 2 / 3)
    assert figures.step_ms([*ANSWERS, Answer(0.5, 3.5, 3.5, 5, 5)]) is None


def test_percentiles_lie_between_neighbours() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [figures.percentile(values, p) for p in (0, 50, 100)] == [1.0, 2.5, 4.0]
    assert figures.percentile(range(101), 99) == 99 and figures.percentile([7.0], 99) == 7
    with pytest.raises(ValueError, match="no values"):
        figures.percentile([], 50)


def test_times_under_load() -> None:
    found = figures.under_load([*ANSWERS, Answer(1.0, 2.0, 2.0, 5, 5)])  # a burst has no time per token
    assert found == {"first_p50": 1500, "token_p50": 500}, "three values have no 99th percentile"
    assert figures.under_load([*ANSWERS, *[Answer(1.0, 2.0, 2.0, 5, 5)] * 3]) == {"first_p50": 2000}
    many = figures.under_load([Answer(0.0, 1.0, 2.0 + n, 11, 1) for n in range(100)])
    assert many["first_p99"] == 1000 and many["token_p99"] == pytest.approx(100 * (1 + 98.01))
    others = [found, {"first_p50": 1000.0, "first_p99": 1.0}]
    assert figures.load_ratios({"first_p50": 500.0, "token_p50": 250.0, "rate": 1.0}, others) == {
        "first_p50": 2.0,
        "token_p50": 2.0,
    }
    ratios = dict(zip(figures.LOAD, (1.3, 1.2, 1.1, 1.0), strict=True))
    assert figures.load_verdict("ladder under load 0.6", {"requests": 350, "rate": 23.44}, ratios) == (
        "ladder under load 0.6 (350 requests, 23.4 a second): first token 1.30x median, 1.20x p99; "
        "step 1.10x median, 1.00x p99"
    )
    passes = [{"first_p50": 10.0, "token_p50": 2.0}, {"first_p50": 11.0, "token_p50": 3.0}]
    again = {"requests": 350, "rate": 23.44, "passes": passes}
    told = figures.load_verdict("ladder", again, ratios, [{"passes": [{"first_p50": 4.0}, {"first_p50": 1.0}]}])
    assert told is not None and told.endswith("; a median differs between two passes by up to 300 %")
    assert figures.apart([again]) == 1.5 and figures.apart([{"passes": passes[:1]}, {}]) is None
    few = figures.load_verdict("ladder", {"requests": 24, "rate": 2.0}, {"first_p50": 1.3})
    assert (
        few == "ladder (24 requests, 2 a second): first token 1.30x median; too few requests for a p99, which needs 100"
    )


def test_arrivals_are_random_and_the_same_for_all() -> None:
    at = figures.arrivals(2000, rate=4.0, seed=1)
    assert at == figures.arrivals(2000, rate=4.0, seed=1) and at[0] == 0 and at == sorted(at)
    assert at[-1] == pytest.approx(500, rel=0.1)


ORIGINALS = {
    "original": {("decode", 1): [10.0, 30.0, 20.0], ("decode", 16): [20.0], ("prefill", 512): [100.0], PEAK: [50.0]},
    "original, async TP": {("decode", 1): [40.0], ("decode", 16): [10.0]},
}


def test_a_ratio_is_to_the_fastest_original_of_each_figure() -> None:
    assert figures.best(ORIGINALS)["decode", 1] == (20.0, "original")
    own = {("decode", 1): [10.0], ("decode", 16): [20.0, 20.0], ("prefill", 512): [80.0], ("prefill", 9): [1.0]}
    assert figures.ratios(own, ORIGINALS) == {("decode", 1): 2.0, ("decode", 16): 0.5, ("prefill", 512): 1.25}


def test_the_verdict_is_one_sentence() -> None:
    found = {("decode", 1): 1.02, ("decode", 16): 1.31, ("prefill", 2048): 1.44, PEAK: 1.1}
    assert figures.verdict("ladder", found) == (
        "ladder is 1.31x at batch 16, 1.02x at batch 1; prefill 1.44x at 2048 tokens; throughput 1.10x at full load: "
        "faster in part, and nowhere slower"
    )
    assert figures.verdict("ladder", {}) == "ladder has no figure that can be compared with the original"
    said = {figures.judged({("decode", n): ratio for n, ratio in enumerate(ratios)}) for ratios in [(1.1, 1.2)]}
    assert said == {"faster everywhere"}
    assert figures.judged({("decode", 1): 1.1, ("decode", 2): 0.9}) == "faster in part, and slower elsewhere"
    assert figures.judged({("decode", 1): 1.01, ("decode", 2): 0.9}) == "converting does not pay here"
    assert figures.judged({PEAK: 1.0}) == "no difference, converting does not pay here"


def test_the_break_even_is_what_the_gpus_save() -> None:
    assert figures.break_even_days(350, 1.10, 8) == pytest.approx(20, abs=0.1)
    assert figures.break_even(350, 1.10, 8) == (
        "350 GPU-hours of healing are won back after 20 days of serving by 8 GPUs at 1.10x"
    )
    assert math.isinf(figures.break_even_days(350, 1.0, 8)) and "never" in figures.break_even(350, 0.9, 8)
    assert figures.overall({PEAK: 1.2, ("decode", 1): 3.0}) == 1.2
    assert figures.overall({("decode", 1): 4.0, ("decode", 2): 1.0}) == pytest.approx(2) and figures.overall({}) is None


AT_ONCE, ROUNDED = Way("vllm", False), Way("quantised:int8")


def test_a_table_has_the_fastest_way_for_each_number_of_tokens() -> None:
    load = Workload("tiny-dense", tp=2, arrivals=1)
    figures_ = [("decode", 1), ("decode", 16), ("decode", 64), ("prefill", 512), ("prefill", 2048), PEAK]
    times = {
        Way("vllm"): [2.0, 1.0, 1.0, 10.0, 90.0, 1.0],
        AT_ONCE: [1.0, 2.0, 2.0, 10.1, 99.0, 1.0],  # sums in flight of a step without a graph are work for the host
        ROUNDED: [9.0, 0.99, 3.0, 9.95, 70.0, 1.0],  # 1 % is not worth what it changes
    }
    known = {way: {f: [t + 9, t, t - 9] for f, t in zip(figures_, ts, strict=True)} for way, ts in times.items()}
    ways = choice.choose(load, known)
    assert ways.decode == ((1, AT_ONCE), (16, Way("vllm")))
    assert ways.prefill == ((512, AT_ONCE), (2048, ROUNDED)) and ways.rest == AT_ONCE
    chosen = figures.medians(choice.by_table(load, known))
    assert list(chosen.values()) == [1.0, 1.0, 1.0, 10.1, 70.0], "and nothing for the peak, which has many sizes"
    assert choice.choose(load, {ROUNDED: {}}).decode == ()


def test_the_line_of_a_table_has_times_of_rounds_that_did_not_choose() -> None:
    load = Workload("tiny-dense", tp=2, options=("--max-num-batched-tokens", "8192"))
    two = {Way("vllm"): [1.0, 5.0], AT_ONCE: [4.0, 2.0]}
    for rounds, by_table, told in ((2, [4.0, 5.0], "which the other rounds chose"), (1, [1.0], "flatters the table")):
        variants = {
            str(way): {"role": role, "wiring": "ladder", **way._asdict(), "rounds": {("decode", 1): times[:rounds]}}
            for role, (way, times) in zip(("wired", "way"), two.items(), strict=True)
        }
        found: dict[str, Any] = {"variants": variants, "missing": {}, "notes": []}
        choice.add_tables(load, found)
        assert found["variants"]["ladder, by its table"]["rounds"] == {("decode", 1): by_table}
        found["variants"]["original"] = {"role": "original", "wiring": None, "rounds": {("decode", 1): [1.0]}}
        assert told in table.text(found)


def test_vllm_reads_prompts_in_steps_of_its_budget() -> None:
    load = Workload("tiny-dense", tp=2, arrivals=4, options=("--seed", "1", "--max-num-batched-tokens=4096"))
    plain, at_once = Way("vllm"), Way("vllm", False)
    known = {
        plain: {("prefill", 512): [5.0], ("prefill", 1024): [9.0], ("prefill", 2048): [9.0]},
        at_once: {("prefill", 512): [4.0], ("prefill", 1024): [8.0], ("prefill", 2048): [11.0]},
    }
    # The two longer prompts have steps of the same size, and one way for both.
    assert choice.choose(load, known).prefill == ((2048, at_once), (4096, plain))
    # Sums of the first size that travel do so in the shorter steps as well, in which its prompts were read.
    known[at_once][("prefill", 512)] = [6.0]
    load = dataclasses.replace(load, arrivals=16, options=("--max-num-batched-tokens", "8192"))
    assert choice.choose(load, known).prefill == ((OVERLAP_FROM, plain),)
    # A size between two that were timed, below which the first step of several prompts may be much shorter.
    short = {
        plain: {("prefill", 32): [5.0], ("prefill", 64): [7.0], ("prefill", 512): [9.0]},
        at_once: {("prefill", 32): [4.0], ("prefill", 64): [8.0], ("prefill", 512): [11.0]},
    }
    assert choice.choose(load, short).prefill == ((512, at_once), (8192, plain))
    # A prompt that comes alone is one step, so its own size is known; 1 % is not worth the work for the host.
    load = dataclasses.replace(load, arrivals=1)
    assert choice.choose(load, known).prefill == ((512, plain), (1024, at_once), (2048, plain))
    known[at_once][("prefill", 512)] = [5.05]
    assert choice.choose(load, known).prefill == ((512, at_once), (2048, plain))


def offered(
    version: str = "0.28.0",
    installed: tuple[str, ...] = (),
    tp: int = 4,
    fits: bool | None = True,
    peers: bool = True,
    options: tuple[str, ...] = (),
    moe: bool = True,
) -> tuple[list[Variant], dict[str, str]]:
    """The alternatives, and why the others are missing."""
    load, machine = Workload("tiny", tp=tp, options=options), Machine(version, installed.__contains__, tp, fits, peers)
    found, missing = alternatives(machine, load, hidden=4096, moe=moe)
    return found, {name: one.why for name, one in missing.items()}


def test_alternatives_depend_on_the_version_and_on_what_is_installed() -> None:
    found, missing = offered(installed=("flashinfer", "deep_ep"))
    assert not missing and [variant.name.partition(", ")[2] for variant in found] == [
        "one replica a GPU", "pipeline stages", "fused all-reduce and norm", "async TP", "symmetric memory by NCCL",
        "no custom all-reduce", "data-parallel attention",
        "dual batch overlap, high throughput", "dual batch overlap, low latency",
    ]  # fmt: skip
    assert {variant.role for variant in found} == {"original"} and found[0].replicas == 4
    assert [variant for variant in found if variant.alone] == [*found[:2], *found[6:]]

    found, missing = offered("0.32.0", moe=False)
    assert "up to 0.31" in missing["async TP"] and missing["fused all-reduce and norm"] == "flashinfer is not installed"
    assert "experts" in missing["dual batch overlap, low latency"]
    assert len(found) + len(missing) == 9
    _, missing = offered(fits=False)
    assert missing["one replica a GPU"] == "all layers of the model do not fit into one GPU"
    assert missing["dual batch overlap, low latency"] == "deep_ep is not installed"
    found, _ = offered(tp=1)
    assert not found, "one rank sums nothing"


def test_what_vllm_would_leave_out_in_silence_is_not_run() -> None:
    """By vLLM 0.24's ``all_reduce_utils.py`` and ``sequence_parallelism.py``."""
    found, missing = offered(tp=2)
    assert "leaves it out at 2" in missing["symmetric memory by NCCL"]
    (chosen,) = [variant.options[1] for variant in found if variant.name == "original, async TP"]
    # vLLM turns async TP off for hidden sizes below 8192, unless it is told from how many tokens on it is wanted.
    assert '"sp_min_token_num": 2048' in chosen
    _, missing = offered(options=("--max-num-batched-tokens", "4096"))
    assert missing["async TP"] == "it begins at 4096 tokens, and a step has at most 4096"
    found, missing = offered(
        peers=False, options=("--disable-custom-all-reduce",), moe=False, installed=("flashinfer",)
    )
    names = ["original, one replica a GPU", "original, pipeline stages", f"original, {PAIRS}"]
    assert [variant.name for variant in found] == names
    assert found[1].options[-1] == "2048" and found[2].environment and found[2].alone
    given, _ = offered(peers=False, options=("--max-num-batched-tokens=8k",))
    assert not any(variant.options for variant in given if variant.stages), "what the user says holds for stages, too"
    pairs = _options(Workload("tiny", tp=4), found[2])
    assert pairs[:2] == ["--tensor-parallel-size", "2"] and pairs[-2:] == ["--pipeline-parallel-size", "2"]
    assert all("peer access" in missing[name] for name in ("async TP", "symmetric memory by NCCL"))
    assert missing["no custom all-reduce"] == "every variant is without it"


def test_servers_share_the_gpus_where_they_fit() -> None:
    ways: dict[Way, str | None] = {Way("vllm"): None, Way("vllm", False): "t.json", Way("symmetric"): "symmetric"}
    _, default, always, _, last, symmetric = core(("ladder",), ways, {"always in flight": {"overlap_from": 0}})
    assert always.options[1] == '{"fcsd": {"overlap_from": 0}}' and not default.options
    assert always.way == default.way, "a table holds the times of more steps in flight"
    assert (last.name, symmetric.name) == ("ladder, sums at once", "ladder, symmetric")
    assert last.options == ("--additional-config", '{"fcsd": {"reduce": "t.json"}}') and last.role == "way"
    one, two, three, four = [*core(("ladder",), {Way("vllm"): None}), Variant("other", "original")]
    assert [one.name, two.name, three.name] == ["original", "ladder", "bound"]
    alone, first = Variant("replicas", "original", replicas=2), [one, two, three]
    assert groups(first, [alone, four], 4) == [[one, two, three], [one, four], [alone]]
    assert groups(first, [four], 2) == [[one, two], [one, three], [one, four]]
    assert groups(first, [alone, four], 1) == [[one], [two], [three], [four], [alone]]
    gib = 1 << 30
    assert room_for(80 * gib, 16 * gib, 8 * gib, ranks=2) == 4  # 12 of weights and cache, 6 of everything else
    assert room_for(24 * gib, 140 * gib, 8 * gib, ranks=8) == 1


def test_a_failure_is_named_by_its_cause(tmp_path: Path) -> None:
    messages = (
        "INFO 11-22 02:46:00 [core.py:9] starts\n"
        "(EngineCore pid=7) ERROR 11-22 02:46:00 [core.py:9] torch.OutOfMemoryError: CUDA out of memory\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_error(messages) == "torch.OutOfMemoryError: CUDA out of memory"
    assert last_error("Segmentation fault\n\n") == "Segmentation fault" and last_error("") == ""
    log = tmp_path / "log"
    log.write_text(messages + "EngineDeadError: EngineCore encountered an issue. See stack trace (above)\nINFO ends\n")
    running = Server([], [], [log], 0.0, [])
    assert error_behind(running) == "torch.OutOfMemoryError: CUDA out of memory"
    log.write_text("INFO 11-22 02:46:00 [core.py:9] starts\n")
    assert error_behind(running) is None


def test_the_link_is_read() -> None:
    matrix = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n"
    assert read_link(matrix, ["0", "1"]) == "NV18" and read_link(matrix, ["0", "2"]) is None
    assert read_link(matrix, ["0"]) is None and read_link("", ["0", "1"]) is None
    four = "\tGPU0 GPU1 GPU2 GPU3 NIC0\nGPU0 X SYS NV4 PIX SYS\nGPU2 NV4 SYS X PHB SYS\n"
    assert read_link(four, ["2", "3"]) == "PHB", "the GPUs of this run"


def test_a_figure_says_nothing_where_the_bound_is_slower_than_the_original() -> None:
    def rounds(*steps: float) -> dict[figures.Figure, list[float]]:
        return {("decode", n): [9 * ms, ms, ms] for n, ms in zip((1, 16, 64), steps, strict=True)}

    steps = {"original": (2.48, 3.25, 4.89), "ladder": (2.65, 3.67, 3.97), "bound": (2.95, 3.26, 3.28)}
    roles = {"original": "original", "ladder": "wired", "bound": "bound"}
    variants = {name: {"role": roles[name], "wiring": None, "rounds": rounds(*ms)} for name, ms in steps.items()}
    found = {"variants": variants, "missing": {}, "notes": []}
    assert table.says_nothing(found) == {("decode", 1): pytest.approx(0.84, abs=5e-3)}, "2 % slower is no difference"
    told = table.text(found).splitlines()
    assert told[0] == "ladder is 1.23x at batch 64, 0.89x at batch 16: faster in part, and slower elsewhere"
    assert told[1].startswith("step, batch 1: the bound, which sends nothing, is slower than the original here (0.84x)")
    assert "2.65 (0.94x)" in table.table(found), "the table has every figure"
    replicas = {"role": "original", "wiring": None, "rounds": rounds(3.6, 3.6, 3.0)}
    beside = {**found, "variants": {**variants, "original, one replica a GPU": replicas}}
    assert table.says_nothing(beside) == table.says_nothing(found), "replicas, which sum nothing, may beat the bound"
    assert "0.76x at batch 64" in table.text(beside).splitlines()[0]
    kept = stored(found, heal_hours=24, gpus=2)
    assert kept["verdicts"]["ladder"] == told[0] and kept["says_nothing"].keys() == {"decode 1"}
    assert kept["ratios"]["ladder"].keys() == {"decode 1", "decode 16", "decode 64"}
    assert kept["break_even_days"]["ladder"] == pytest.approx(
        figures.break_even_days(24, math.sqrt(4.89 / 3.97 * 3.25 / 3.67), 2)
    )


def test_the_text_begins_with_the_verdict() -> None:
    def row(role: str, step: float, **more: object) -> dict[str, object]:
        under = {"first_p50": 10 * step, "rate": 3.0, "requests": 30}
        return {"role": role, "wiring": None, "rounds": {("decode", 1): [step]}, "loads": {"0.5": under}, **more}

    variants = {
        "original": row("original", 2.0),
        "ladder": row("wired", 1.0, wiring="ladder"),
        "bound": row("bound", 0.5),
        "broken": {"role": "original", "wiring": None, "rounds": {}, "failed": "ValueError: no"},
    }
    one_rank = alternatives(
        Machine("0.33.0", lambda name: False, 1, None), Workload("tiny-dense"), hidden=64, moe=False
    )[1]
    no_time, worded_alike = Missing("no time", needless=True), Missing("there is one other")
    missing = {**one_rank, "ladder, sums at once": no_time, "async TP": worded_alike}
    found = {"variants": variants, "missing": missing, "notes": ["a note"]}
    lines = table.text(found, heal_hours=24, gpus=2).splitlines()
    assert lines[0] == "ladder is 2.00x at batch 1: faster everywhere"
    assert lines.pop(1) == "not compared with (reasons below): async TP; broken", "beside the ratio"
    assert lines[1] == "ladder: 24 GPU-hours of healing are won back after 1 days of serving by 2 GPUs at 2.00x"
    assert {"broken failed: ValueError: no", "not run: async TP: there is one other"} <= {*lines}
    assert lines[-1] == "a note"
    assert stored(found, None, 2)["missing"]["async TP"] == "there is one other", "a sentence in the file"
    cells = {line.split("  ")[0]: line for line in lines[2:]}
    assert cells["ladder"].endswith("1 (2.00x)") and cells["bound (wrong results)"].endswith("0.5 (4.00x)")
    assert cells["0.5, ladder"].split()[-3:] == ["10", "(2.00x)", "30"] and "20 (1.00x)" in cells["0.5, original"]
    assert lines[2].startswith("ladder under load 0.5 (30 requests, 3 a second): first token 2.00x median; too few")


def test_arrivals_of_prompts_without_graphs_are_told_which_graphs_they_lack() -> None:
    load = Workload("tiny-dense", tp=2, prompts=(512, 2048), batches=(1, 16), loads=(0.6,))
    note = _without_graphs(load)
    assert note is not None and "--prompt-tokens 512 --concurrency 16" in note
    sizes = json.loads(note.split("--compilation-config '")[1].rstrip("'"))["cudagraph_capture_sizes"]
    assert any(512 < size <= 512 + 16 for size in sizes)
    for changes in ({"loads": ()}, {"prompts": (128,)}, {"options": ("--compilation-config", "{}")}):
        assert _without_graphs(dataclasses.replace(load, **changes)) is None
