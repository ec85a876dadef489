"""The goals of sums through the host: what has no raw file was not run, and what misses its goal says so."""

import json
from pathlib import Path

import pytest
from benchmarks.comm import goals

pytestmark = pytest.mark.lab


def test_rows_are_reached_missed_or_not_run(tmp_path: Path) -> None:
    def row(what: str) -> str:
        return next(line for line in goals.goals(tmp_path).splitlines() if what in line)

    (tmp_path / goals.RESULTS).mkdir(parents=True)
    assert "Reached 0, missed 0" in goals.goals(tmp_path) and "not run" in row("random sums")
    file = tmp_path / goals.RESULTS / "host_sums_stress_2xh200.json"
    for content, met in (({"sums": 1_000_000, "wrong values": 0}, "yes"), ({"sums": 999_600, "wrong values": 0}, "no"),
                         ({"sums": 2_000_000, "wrong values": 1}, "no")):  # fmt: skip
        file.write_text(json.dumps(content))
        assert met in row("random sums")


def test_a_kind_counts_if_an_engine_ended_and_all_its_answers_are_nccls() -> None:
    alone = {"equal answers": 3, "of": 3, "largest difference": 0.0}
    other = {**alone, "largest difference": 0.01}
    kinds = {
        "dense": {"graphs": {"NCCL": {"alone": other}, "host": {"alone": alone}, "NCCL again": {"alone": other}}},
        "experts": {"graphs": {"host": {"alone": alone}}, "eager": {"host": {"alone": other}}},
        "drafts": {"graphs": {"NCCL": {"alone": alone}, "host": {"failed": "no time"}}},
        "latent": {"graphs": {"host": {"alone": alone}}, "eager": {"host": {"failed": "no time"}}},
    }
    assert goals._right({"kinds": kinds}) == 2


def test_what_ran_several_times_is_reached_by_all_runs_or_not(tmp_path: Path) -> None:
    folder = tmp_path / goals.RESULTS
    folder.mkdir(parents=True)
    for file, ms, met in ((goals._RUNS[0], 8.0, "yes"), (goals._RUNS[2], 9.0, "no")):
        steps = {name: {what: [time] for what in (*goals._STEPS, *goals._TOKENS)} for name, time in
                 {"stock": 10.0, "stock, host sums": ms, "stock, host sums in int8": ms, "ladder, host sums": ms,
                  "ladder, host sums in int8": ms, "stock with NVLink": 9.0, "bound": 7.0}.items()}  # fmt: skip
        (folder / file).write_text(json.dumps({"milliseconds": steps}))
        row = next(line for line in goals.goals(tmp_path).splitlines() if "stock 8B, two ranks: step of 1 " in line)
        assert met in row
    assert "1.25, 1.11x NCCL" in row
    assert goals._shown(0.996, 1.0) == "0.996" and goals._shown(1.004, 1.0) == "1.00", (
        "a near miss does not look reached"
    )


def test_training_is_beside_its_bound_and_the_best_of_standard(tmp_path: Path) -> None:
    folder = tmp_path / goals.RESULTS
    folder.mkdir(parents=True)
    ways = {"standard, blocking": 300, "standard, by-host": 270, "standard, bound": 1, "ladder, by-host": 200}
    shards = {name: {"ms": [time, time]} for name, time in {**ways, "ladder, bound": 180}.items()}
    experts = {name: {"step": [time, 9 * time, time]} for name, time in {"by-host": 200, "comm-free": 190}.items()}
    (folder / goals._SHARDED).write_text(json.dumps({"variants": shards}))
    (folder / goals._EXPERTS).write_text(json.dumps({"routers": {"uniform": {"variants": experts}}}))
    rows = [line.split(" | ") for line in goals.goals(tmp_path).splitlines() if "[raw]" in line]
    told = [(row[2].split("x")[0], row[3].strip()) for row in rows]
    assert told == [("1.35", "yes"), ("0.90", "yes"), ("0.95", "yes")]
