"""The plan against the runs on H200s in benchmarks/results/plan_runs.json: memory, speed, and the fit of its constants.

Targets: tokens per second within 15 %, memory within 5 %. A run that misses one has its own bound in that file.
"""

import json
import re
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fcsd.bench.shapes import SHAPES
from fcsd.models.build import converted_config
from fcsd.models.wiring import Wiring
from fcsd.plan import Hardware, Setup, of_one_rank, plan_setup
from fcsd.plan.memory import shard
from fcsd.plan.model import MetaModel, of_rank
from fcsd.plan.setup import GIB, with_parts
from fcsd.plan.speed import (
    BUS,
    LAUNCH,
    MASKED_ATTENTION,
    MICRO_BATCH,
    PEAK,
    SHARE,
    TRAFFIC,
    UPDATE,
    UPDATE_ALONE,
    WIDE_SHARE,
    attention_flops,
    layer_passes,
    step_seconds,
    update_seconds,
    work_per_token,
)

REPO = Path(__file__).parents[2]
RESULTS = REPO / "benchmarks/results"
LISTED = json.loads((RESULTS / "plan_runs.json").read_text())
NAMES = [entry["run"] for entry in LISTED["runs"]]
SPEED, MEMORY = 0.15, 0.05


@dataclass(frozen=True)
class Run:
    """A stored run: what was run, and the medians of what was measured.

    Attributes:
        listed: its entry in the list.
        step: seconds of a whole step, or of forward and backward passes where no optimizer ran.
        update: seconds of the optimizer; None where it was not timed.
        peak: bytes that torch had allocated; None where no optimizer ran, whose states most memory is.
    """

    listed: dict[str, Any]
    model: MetaModel
    setup: Setup
    step: float
    update: float | None
    peak: float | None

    @property
    def kind(self) -> str:
        """The key of its constant in ``LAUNCH``."""
        return "divided experts" if self.setup.ep_size > 1 else "experts" if self.model.numbers.experts else "dense"

    @property
    def captured(self) -> bool:
        """Whether its passes were captured as CUDA graphs, so that the host did not limit it."""
        return self.listed.get("captured", False)

    @property
    def updated(self) -> int:
        """Parameters that a GPU updates."""
        return sum(shard(self.model.numbers, self.setup).partition)

    @property
    def passes(self) -> float:
        """Forward passes of a layer in a step."""
        return sum(layer_passes(self.model.numbers, self.model.numbers, self.setup)) * self.setup.accumulation

    @property
    def values(self) -> float:
        """Values of the residual stream that pass through a layer of a GPU in a step."""
        passes = sum(layer_passes(self.model.numbers, self.model.numbers, self.setup))
        return passes * self.model.numbers.hidden * self.setup.batch_tokens / self.setup.world

    @property
    def ideal(self) -> float:
        """Seconds of a step's forward and backward passes at the GPU's peak."""
        per_gpu = self.setup.batch_tokens / self.setup.world
        return work_per_token(self.model.numbers, self.model.numbers, self.setup) * per_gpu / PEAK["bf16"]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


@cache
def meta(shape: str, layers: int | None) -> MetaModel:
    if layers is None:
        return MetaModel(str(REPO / shape), rewired=True)
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[shape](layers).save_pretrained(folder)
        return MetaModel(folder, rewired=True)


@cache
def stored(name: str) -> Run:
    listed = LISTED["runs"][NAMES.index(name)]
    raw, units = read(listed["file"]), listed["units"]
    setup = Setup(**{key: tuple(value) if key == "terms" else value for key, value in listed["setup"].items()})

    def median(key: str) -> Any:
        value: Any = raw
        for part in listed["measured"][key]:
            value = value[part]
        if isinstance(value, list):  # `benchmarks.train.memory` stores its first step, which warms up, with the others
            value = statistics.median(value[1:] if listed["measured"][key][0] == "measured" else value)
        return value

    found = {key: median(key) for key in listed["measured"]}
    if "tokens_per_second" in found:
        step = setup.batch_tokens / found["tokens_per_second"]
    else:
        step = found.get("step", found.get("passes")) * units["seconds"]
    update = found.get("update")
    if update is None and {"step", "passes"} <= found.keys():
        update = found["step"] - found["passes"]
    peak = found["peak"] * units["bytes"] if "peak" in found else None
    seconds = None if update is None else update * units["seconds"]
    return Run(listed, meta(listed["model"], listed.get("layers")), setup, step, seconds, peak)


def from_file(file: str) -> Run:
    """The first run that the list takes from a file."""
    return stored(next(entry["run"] for entry in LISTED["runs"] if entry["file"] == file))


@dataclass(frozen=True)
class Constants:
    """Those of ``fcsd.plan.speed`` that depend on measured runs."""

    share: dict[bool, float]
    micro_batch: float
    update: float
    launch: dict[str, float]
    traffic: float


def updating(run: Run, update: float) -> float:
    """Seconds of the optimizer: as measured, or by the seconds of a parameter."""
    if run.update is not None:
        return run.update
    return (UPDATE if "step" not in run.listed["measured"] else update) * run.updated


def fit(runs: list[Run]) -> Constants:
    """The constants from ``runs``. Without a run that the host limits, a pass takes at most its shortest time."""

    def used(name: str, *more: Callable[[Run], bool]) -> list[Run]:
        return [run for run in runs if name in run.listed["fitted"] and all(one(run) for one in more)]

    mean = statistics.geometric_mean
    update = mean([run.update / run.updated for run in used("update") if run.update is not None])

    def passes(run: Run) -> float:
        if run.listed["measured"].keys() <= {"passes"}:
            return run.step
        if run.update is not None:
            return run.step - run.update
        return run.step - (UPDATE_ALONE if run.setup.zero_stage and not run.setup.zero else update) * run.updated

    series: dict[str, dict[int, float]] = {}
    for run in used("micro-batch"):
        series.setdefault(run.listed["file"], {})[run.setup.micro_batch_size] = run.step
    micro_batch = mean([(steps[1] - steps[8]) / 7 for steps in series.values()])  # eight micro-batches, or one
    share = {
        divided: mean(
            [
                run.ideal / (passes(run) - run.setup.accumulation * micro_batch)
                for run in used("share", lambda run, divided=divided: (run.setup.ep_size > 1) == divided)
            ]
        )
        for divided in (True, False)
    }
    launch = {}
    for kind in LAUNCH:
        limited = [passes(run) / run.passes for run in used("launch", lambda run, kind=kind: run.kind == kind)]
        others = [passes(run) / run.passes for run in runs if run.kind == kind and not run.captured]
        launch[kind] = mean(limited) if limited else min(others, default=0.0)
    traffic = [(passes(run) - run.setup.accumulation * micro_batch) / run.values for run in used("traffic")]
    return Constants(
        share,
        micro_batch,
        update,
        launch,
        mean(traffic) if traffic else TRAFFIC,
    )


def predicted(run: Run, constants: Constants) -> float:
    """Seconds of the step."""
    setup = run.setup
    device = max(run.ideal / constants.share[setup.ep_size > 1], constants.traffic * run.values)
    device += setup.accumulation * constants.micro_batch
    seconds = max(device, 0.0 if run.captured else run.passes * constants.launch[run.kind])
    if "step" not in run.listed["measured"] and "tokens_per_second" not in run.listed["measured"]:
        return seconds
    alone = setup.zero_stage and not setup.zero
    if run.listed.get("own_update"):  # by an optimizer that was removed since
        assert run.update is not None
        return seconds + run.update
    return seconds + (UPDATE_ALONE if alone else constants.update) * run.updated


def shipped() -> Constants:
    share = {divided: SHARE[divided, "bf16"] for divided in (True, False)}
    return Constants(share, MICRO_BATCH, UPDATE, LAUNCH, TRAFFIC)


def test_constants_are_the_fit() -> None:
    runs = [stored(name) for name in NAMES]
    found = fit(runs)
    constants = [found.micro_batch, found.update, found.traffic]
    assert constants == pytest.approx([MICRO_BATCH, UPDATE, TRAFFIC], rel=0.02)
    assert found.share == pytest.approx(shipped().share, rel=0.01) and found.launch == pytest.approx(LAUNCH, rel=0.02)
    for run in runs:  # the formula of this file is that of the plan
        if run.peak is not None:
            assert predicted(run, shipped()) == pytest.approx(
                step_seconds(run.model.numbers, run.model.numbers, run.setup, run.setup.world)
            )

    factors = []
    masked = [run for run in runs if "mask" in run.listed["fitted"]]
    for one in masked:
        packed = next(run for run in runs if f"{run.listed['run']}, mask" == one.listed["run"])
        setup = one.setup
        causal = 4 * attention_flops(one.model.numbers, setup.seq_len) * setup.batch_tokens / setup.world
        whole = causal / PEAK["bf16"] / SHARE[True, "bf16"]  # seconds of rows that are one document, both models
        factors.append((one.step - packed.step) / whole + 1024 / setup.seq_len)
    assert len(factors) == 2 and statistics.geometric_mean(factors) == pytest.approx(MASKED_ATTENTION, rel=0.02)


def test_constants_of_the_update_are_measured() -> None:
    by_moments = {name: from_file(f"memory_qwen3_24_layers_{name}_4xh200") for name in ("fp32", "moments")}
    seconds = {name: run.update or 0.0 for name, run in by_moments.items()}
    updated = by_moments["fp32"].updated
    assert 8 * updated / (seconds["moments"] - seconds["fp32"]) == pytest.approx(BUS, rel=0.02)

    alone = []
    for name in ("baselines_dense_one_launch_1xh200", "baselines_moe_one_launch_1xh200"):
        traced = next(turn for turn in read(name)["turns"] if turn["side"] == "fcsd" and turn["kernels"])
        kernel = sum(milliseconds for kernel, _, milliseconds in traced["kernels"] if kernel == "_update_kernel")
        alone.append(kernel / 1e3 / from_file(name).updated)
    assert statistics.geometric_mean(alone) == pytest.approx(UPDATE_ALONE, rel=0.02)


@pytest.mark.parametrize("name", NAMES)
def test_speed_and_memory_of_a_stored_run(name: str) -> None:
    run = stored(name)
    misses = run.listed.get("misses", {})
    step = predicted(run, shipped())
    assert run.step == pytest.approx(step, rel=misses.get("speed", SPEED))
    assert "speed" not in misses or run.step != pytest.approx(step, rel=SPEED), "the target is met again"
    if run.peak is not None:
        planned = plan_setup("run", run.model, run.model.numbers, run.setup, Hardware(gpus=run.setup.world))
        peak = planned.memory.peak.total
        assert peak == pytest.approx(run.peak, rel=misses.get("memory", MEMORY))
        assert "memory" not in misses or peak != pytest.approx(run.peak, rel=MEMORY), "the target is met again"


@pytest.mark.parametrize("family", sorted({entry["family"] for entry in LISTED["runs"]}))
def test_runs_of_a_family_are_predicted_from_the_other_families(family: str) -> None:
    """Constants that are from one model each stay: masks and small models."""
    constants = fit([run for run in map(stored, NAMES) if run.listed["family"] != family])
    for run in map(stored, NAMES):
        if run.listed["family"] == family:
            misses = run.listed.get("misses", {})
            within = misses.get("left_out", misses.get("speed", SPEED))
            assert run.step == pytest.approx(predicted(run, constants), rel=within), run.listed["run"]


def test_the_table_of_the_page_is_the_prediction() -> None:
    """Steps in ms, speeds in per cent, peaks in GiB; the last digit may be off, which depends on torch's version."""
    text = (REPO / "benchmarks/results/plan.md").read_text().split("### How far the plan is from measured runs")[1]
    rows = re.findall(r"^\|.*\|$", text, re.MULTILINE)[2 : 2 + len(NAMES)]
    for name, row in zip(NAMES, rows, strict=True):
        run, cells = stored(name), [cell.strip(" *").removesuffix(" %") for cell in row.split("|")[2:-1]]
        others = fit([other for other in map(stored, NAMES) if other.listed["family"] != run.listed["family"]])
        step, without = predicted(run, shipped()), predicted(run, others)
        expected: list[float | None] = [1e3 * run.step, 1e3 * step, 100 * (run.step / step - 1)]
        expected.append(None if run.captured else 100 * (run.step / without - 1))
        if run.peak is not None:
            planned = plan_setup("run", run.model, run.model.numbers, run.setup, Hardware(gpus=run.setup.world))
            expected += [run.peak / GIB, planned.memory.peak.total / GIB]
        for cell, value, unit in zip(cells, expected, (1, 1, 1, 1, 0.1, 0.1), strict=False):
            assert cell[-1:].isdigit() == (value is not None), (name, row)  # a dash stands for none
            assert value is None or float(cell) == pytest.approx(value, abs=1.1 * unit), (name, row)


def test_a_run_that_no_stored_run_resembles() -> None:
    """``benchmarks/distill/resume.sh 2 3`` was not used for the fit: 3 layers, EP 2, ZeRO-2, KL and cross-entropy."""
    text = (REPO / "benchmarks/results/distillation.md").read_text()
    told = re.search(r"steps with one row per GPU\s+reached ([\d ]+) to ([\d ]+)\.", text)
    assert told is not None
    slowest, fastest = (int(number.replace(" ", "")) for number in told.groups())
    model = meta("deepseek-v2-lite", 3).numbers
    setup = Setup(
        **dict(world=2, ep_size=2, micro_batch_size=1, seq_len=4096, batch_tokens=4 * 4096, tokens=10 * 4 * 4096),
        **dict(terms=("kl", "sft"), teacher="sharded", zero_stage=2, imbalance=1.0),
    )
    speed = setup.batch_tokens / step_seconds(model, model, setup, 2)
    assert speed == pytest.approx((slowest + fastest) / 2, rel=0.2)


def test_every_run_has_its_command_and_machine_and_a_file() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for entry in LISTED["runs"]:
        assert read(entry["file"]) and entry["command"] and entry["gpus"] == entry["setup"]["world"]
        assert re.fullmatch("[0-9a-f]{7}", entry["commit"]) and "torch" in entry["software"]
        assert (entry["code"] == "today") or entry["kept"], entry["run"]
        assert set(entry.get("misses", {})) <= {"speed", "memory", "left_out"}
    # No stored run of training or distillation is passed over in silence.
    kinds = ("baselines_", "distill_", "memory_", "small_runs_", "step_", "trace_", "train_")
    stored_runs = {path.stem for path in RESULTS.glob("*.json") if path.stem.startswith(kinds)}
    listed = {entry["file"] for entry in LISTED["runs"] + LISTED["not_used"]}
    assert stored_runs == listed, stored_runs ^ listed
    unused = {entry["file"] for entry in LISTED["not_used"]}
    assert all(read(name) for name in unused) and not unused & {entry["file"] for entry in LISTED["runs"]}


def test_groups_without_a_bound_took_more_memory_in_an_earlier_version() -> None:
    """Six layers of Qwen3-30B-A3B, in which an earlier version made one group of all parameters for the optimizer."""
    measured = read("memory_qwen3_fp32_1xh200")["measured"]
    model = meta("qwen3-30b-a3b", 6)
    setup = Setup(
        **dict(world=1, micro_batch_size=1, seq_len=4096, batch_tokens=4 * 4096, tokens=2**20, recompute=True),
        **dict(teacher="replicated", document=1024, fused=False, alone=False),
    )
    planned = plan_setup("qwen3", model, model.numbers, setup, Hardware(gpus=1)).memory
    peak = planned.peak
    for name in ("weights", "teacher", "optimizer"):
        assert peak.parts[name] == pytest.approx(measured[name], rel=0.01), name
    assert peak.total == pytest.approx(measured["backward"], rel=0.03) and peak.name == "gradient reduction"
    (step,) = (moment.total for moment in planned.moments if moment.name == "optimizer step")
    # ZeRO copied the gradients of the one group in bf16 and in fp32.
    own = shard(model.numbers, setup)
    assert step + 6 * (sum(own.partition) - max(own.groups)) == pytest.approx(measured["step"], rel=0.01)
    for name, width in (("bf16", 4), ("moments", 4)):
        run = read(f"memory_qwen3_{name}_1xh200")
        assert run["cap"] == 75
        size = re.search(r"Tried to allocate ([\d.]+) GiB", run["measured"]["out_of_memory"])
        assert size and float(size[1]) == pytest.approx(width * sum(own.partition) / GIB, rel=0.01), "the copy in fp32"


def divided_runs() -> dict[str, dict[str, float]]:
    """What ``divide_70b_2xh200.txt`` has of each way: its fastest steps in order, by ``GROUP: WAY``."""
    found: dict[str, dict[str, float]] = {}
    group = ""
    for line in (RESULTS / "divide_70b_2xh200.txt").read_text().splitlines():
        if named := re.match(r"(\S+): exit codes", line):
            group = named[1]
        if told := re.match(r"  (.+?)  +([\d.]+) ms .* ([\d,]+) tokens/s per GPU.* peak ([\d.]+) GiB", line):
            speed = float(told[3].replace(",", ""))
            found[f"{group}: {told[1]}"] = {"seconds": float(told[2]) / 1e3, "speed": speed, "peak": float(told[4])}
    return found


def test_shards_and_whole_layers_of_70b_are_planned_as_they_ran() -> None:
    """Six layers of its width on two H200s, the last three ladder and trained alone, the teacher shared."""
    config, wiring = SHAPES["llama3-70b"](6), Wiring("ladder", (3, 4, 5))
    config.vocab_size = 9600
    block = wiring.to_block(base_model="random", base_revision=None, base_sha256=None)
    with tempfile.TemporaryDirectory() as folder:
        converted_config(config, block).save_pretrained(folder)
        model = MetaModel(folder)
    plain = Setup(
        **dict(world=2, micro_batch_size=2, seq_len=4096, batch_tokens=16384, tokens=2**20, recompute=True),
        **dict(teacher="replicated", document=4096),
    )
    whole = with_parts(plain, model.parts(None, ["converted"], wiring))
    cases = {"zero1-on: as set": whole, "tp-on: ladder, on, nccl": replace(whole, tp_size=2, micro_batch_size=4)}
    measured = divided_runs()
    shares = []
    for name, setup in cases.items():
        planned = plan_setup(name, model, model.numbers, setup, Hardware(gpus=2))
        assert planned.speed.tokens_per_second / 2 == pytest.approx(measured[name]["speed"], rel=0.02), name
        assert planned.memory.peak.total / GIB == pytest.approx(measured[name]["peak"], rel=MEMORY), name
        own, parts = of_rank(model.numbers, setup.tp_size), of_one_rank(setup)
        work = work_per_token(own, own, parts) * setup.micro_batch_size * setup.seq_len / PEAK["bf16"]
        shares.append(work / (measured[name]["seconds"] - update_seconds(own, parts, 2) - MICRO_BATCH))
    assert statistics.geometric_mean(shares) == pytest.approx(WIDE_SHARE, rel=0.01)
    alone = [measured[name]["seconds"] for name in ("tp-on: ladder, off, none", "zero1-on: bound")]
    assert alone[0] == pytest.approx(alone[1], rel=0.02), "without communication, shards compute as whole layers do"


def test_12_layers_of_8b_reach_what_lies_between() -> None:
    """The run with ZeRO-1 on two H100s; its first step is slow, and the last one was traced."""
    took = statistics.median(read("memory_zero1_12_layers_2xh100")["measured"]["seconds"][1:-1])
    setup = Setup(
        **dict(world=2, micro_batch_size=1, seq_len=4096, batch_tokens=4 * 4096, tokens=2**20, recompute=True),
        **dict(teacher="replicated", document=4096),
    )
    numbers = meta("llama3-8b", 12).numbers
    assert step_seconds(numbers, numbers, setup, 2) == pytest.approx(took, rel=0.05)
