"""The capability study: its runs are recipes, its scores follow from the answers, its page from the stored lines."""

import json
import math
import os
import random
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studies.capability import border, report
from studies.capability.forks import COUNTS_WITHOUT_CUDA, ROOT, Forks
from studies.capability.jobs import Job, OutOfTimeError, together
from studies.capability.results import append, packed, read_lines, unpacked
from studies.capability.runs import KL, STARTING_VALUES, Run, Subject, fitted, recipe_of, sweeps, trial_recipe
from studies.capability.scores import fit, scores_of, tokens_to
from studies.capability.scratch import CONFIGS, scratch_results, write_config
from studies.capability.studies import TABLE_4, chosen_half, studies
from studies.capability.wirings_report import scratch, token_ids
from studies.capability.work import (
    FCSD,
    Study,
    _arguments,
    best_of,
    choose,
    do_run,
    seconds_in_steps,
    shared_gpus,
    texts_of,
    wiring_options,
)
from transformers import AutoConfig

from fcsd.config import load_recipe
from fcsd.eval.code.problems import load_evalplus
from fcsd.eval.suite import SUITES
from fcsd.models.selection import select_layers

pytestmark = pytest.mark.lab

TOKENS = 1_000_000_000
CHOSEN = {name: {**STARTING_VALUES, "objective.hidden.weight": 1e-3} for name in sweeps()}


def line_of(run: Run, quality: float, **changes: Any) -> dict[str, Any]:
    """A stored line of a model that knows each of 40 answers with a probability; answers follow from the name."""
    draw = random.Random(run.name)
    results = []
    for benchmark in SUITES["strict"]:
        level = (benchmark.chance or 0) / 100
        items = [float(draw.random() < level + quality * (1 - level)) for _ in range(40)]
        own = {"column": benchmark.column, "metric": "acc", "value": sum(items) / 40, "stderr": 0.05, "n": 40}
        results.append(own | {"chance": benchmark.chance, "items": items, "settings_sha256": "s", "data_sha256": "d"})
    texts = [[10 * (2 - quality) + draw.random(), 10] for _ in range(8)]
    loss = {"column": "Held-out loss", "metric": "nll_per_token", "value": 1.0, "stderr": 0.1, "n": 80, "chance": None}
    results.append(loss | {"items": texts, "settings_sha256": "s", "data_sha256": "d"})
    line = {"name": run.name, "run": run.to_json(), "results": [packed(result) for result in results]}
    line |= {"teacher_tokens": TOKENS, "limit": None, "device": "a GPU", "versions": {"torch": "2"}}
    if run.text:
        line |= {
            "lr": 1e-3,
            "batch_tokens": 8192,
            "seconds": 100.0,
            "scores": [[1, 0.5], [2, 0.7], [3, 0.1]],
            "steps": 3,
            "planned_steps": 9,
        }
    if run.from_scratch:
        loss = 2 + 0.01 * run.seed + 0.02 * (run.settings["init.wiring"] != "standard")
        line |= {"final_loss": loss, "parameters": 5_000_000, "metrics": {"held_out_sft": 2.5}, "results": []}
    return line | changes


def quality(run: Run) -> float:
    if not run.text:
        return 0.97 if run.method == "teacher" else 0.2
    return (0.9 if run.method.startswith("KL") else 0.7) + 0.02 * math.log10(run.share)


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    """A line for every run of every study."""
    return {run.name: line_of(run, quality(run)) for runs in studies().values() for run in runs}


def test_every_run_and_every_sweep_is_a_recipe(tmp_path: Path) -> None:
    named: dict[str, Run] = {}
    for run in [run for runs in studies().values() for run in runs]:
        assert named.setdefault(run.name, run).to_json() == run.to_json()
    path = tmp_path / "recipe.yaml"
    for run in filter(lambda run: run.text, named.values()):
        path.write_text(json.dumps(recipe_of(run, CHOSEN, TOKENS, tmp_path, "cuda")))
        recipe = load_recipe(path).recipe
        assert recipe.train.steps * recipe.train.batch_tokens == pytest.approx(run.share * TOKENS, rel=0.02)
        assert (recipe.objective.sft > 0) == run.method.startswith(("SFT", "from scratch"))
        assert (recipe.early_stop.metric == "mbpp_plus") == bool(run.early_stop)
    for name in sweeps():
        for key, values in sweeps()[name]["stages"]:
            for value in values:
                path.write_text(json.dumps(trial_recipe(name, {key: value}, CHOSEN, 50, tmp_path, "cpu")))
                assert load_recipe(path).recipe.train.steps == 50


def test_the_batch_changes_at_an_equal_number_of_steps(tmp_path: Path) -> None:
    rows = {run.method: run for run in studies()["table-2"] if run.text}
    made = {method: recipe_of(run, CHOSEN, TOKENS, tmp_path, "cuda")["train"] for method, run in rows.items()}
    assert made["KL, 4x batch"]["batch_tokens"] == 4 * made["KL"]["batch_tokens"]
    assert made["KL, 0.25x batch"]["batch_tokens"] == made["KL"]["batch_tokens"] / 4
    assert len({train["steps"] for train in made.values()}) == 1


def test_a_short_budget_takes_a_smaller_batch_and_rate() -> None:
    chosen = {"train.batch_tokens": 65536, "optim.lr": 1e-3}
    assert fitted(chosen, 65536 * 600) == chosen
    assert fitted(chosen, 65536 * 150) == {"train.batch_tokens": 16384, "optim.lr": 5e-4}
    assert fitted(chosen, 1000)["train.batch_tokens"] == 8192


def test_jobs_start_when_what_they_need_is_done_and_a_failure_stops_only_what_needs_it() -> None:
    order: list[tuple[str, int]] = []

    def job(name: str, *needs: str, fails: bool = False) -> Job:
        def do(gpu: int) -> None:
            order.append((name, gpu))
            if fails:
                raise RuntimeError(name)

        return Job(name, needs, do)

    jobs = [job("run", "sweep"), job("lost", "bad"), job("later", "lost"), job("bad", fails=True), job("sweep", "text")]
    assert not together([*jobs, job("text")], at_once=1, gpus=2)
    assert order == [("bad", 0), ("text", 0), ("sweep", 0), ("run", 0)]


def test_a_stage_takes_what_the_stage_before_it_chose(tmp_path: Path) -> None:
    given = ["table-1", "--work", str(tmp_path), "--new", str(tmp_path / "new.jsonl"), "--teacher-tokens", str(TOKENS)]
    study = Study(_arguments().parse_args([*given, "--device", "cpu"]))
    study.clock.stop()
    (_, batches), (_, rates) = sweeps()["sft-same"]["stages"]
    assert best_of(study, "sft-same", 0) == {}
    for stage, key, values in ((0, "train.batch_tokens", batches), (1, "optim.lr", rates)):
        for number, value in enumerate(values):
            trial = best_of(study, "sft-same", stage) | {key: value}
            study.trials["sft-same", stage, number] = {"values": trial, "value": abs(number - 1)}
    choose(study, "sft-same")
    line = read_lines([study.args.new])["sft-same"]
    assert line["chosen"] == {"train.batch_tokens": batches[1], "optim.lr": rates[1]} and len(line["trials"]) == 7


def test_models_at_work_are_spread_over_the_gpus() -> None:
    both, seen = threading.Barrier(2, timeout=60), set[int]()

    def do(gpu: int) -> None:
        both.wait()  # both jobs are at work
        seen.add(gpu)

    assert together([Job("one", (), do), Job("two", (), do)], at_once=2, gpus=2) and seen == {0, 1}


def test_models_go_to_the_gpu_with_the_fewest_tokens_to_train_on() -> None:
    all_at_work, seen = threading.Barrier(4, timeout=60), dict[str, int]()

    def job(name: str, load: float) -> Job:
        def do(gpu: int) -> None:
            seen[name] = gpu
            all_at_work.wait()

        return Job(name, (), do, load)

    assert together([job("long", 0.1), job("a", 0.01), job("b", 0.01), job("c", 0.01)], at_once=4, gpus=2)
    assert seen == {"long": 0, "a": 1, "b": 1, "c": 1}


def test_a_run_that_waits_for_its_text_keeps_a_place() -> None:
    order, long_began = list[str](), threading.Event()

    def do(name: str, until: threading.Event | None = None) -> Callable[[int], None]:
        def act(gpu: int) -> None:
            order.append(name)
            if until is not None:
                assert until.wait(60)

        return act

    def long(gpu: int) -> None:
        order.append("long")
        long_began.set()

    jobs = [Job("text", (), do("text")), Job("long", ("text",), long, 0.1)]
    jobs += [Job(name, (), do(name, long_began), 0.05) for name in ("short", "last")]
    assert together(jobs, at_once=3, gpus=1) and order.index("long") < order.index("last")


def test_a_fork_does_what_a_process_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(*next(iter(COUNTS_WITHOUT_CUDA.items())))  # the environment of the tests is restored
    forks, log, env = Forks(dict(os.environ), "fcsd.cli.main"), tmp_path / "log", {**os.environ, "COLUMNS": "60"}
    for words, code in ((["--version"], 0), (["recipes", "list"], 0), (["recipes", "show", "no-such"], 2)):
        log.unlink(missing_ok=True)
        process = subprocess.run([*FCSD, *words], env=env, cwd=ROOT, stdout=-1, stderr=subprocess.STDOUT, check=False)
        assert forks.start(words, log, env).wait() == process.returncode == code
        assert log.read_bytes() == process.stdout
    assert forks.work("cpu", log, env) and not forks.work("no-such-device", log, env)
    assert not Forks(dict(os.environ), "no_such_module").work("cpu", log, env)
    assert "No module named 'no_such_module'" in log.read_text()


def test_the_gpu_is_named_by_its_own_number_before_mps_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    for name, answer in (("nvidia-smi", "NVIDIA H200"), ("nvidia-cuda-mps-control", "")):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(f'#!/bin/sh\necho {name} "$@" $CUDA_VISIBLE_DEVICES >> {asked}\necho {answer}\n')
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    given = ["text", "--work", str(tmp_path), "--new", str(tmp_path / "new.jsonl"), "--teacher-tokens", str(TOKENS)]
    study = Study(_arguments().parse_args(given))
    study.clock.stop()
    with shared_gpus(study):
        study.store({"name": "a"})
        assert study.gpus == ["0", "1"]  # what the clients of MPS see
    assert read_lines([study.args.new])["a"]["device"] == "NVIDIA H200"
    about, *mps = asked.read_text().splitlines()
    assert about.startswith("nvidia-smi --id=2 ") and mps[0] == "nvidia-cuda-mps-control -d 2,3"
    assert not any(line.startswith("nvidia-smi") for line in mps)


def test_only_long_runs_take_the_settings_for_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["table-2", "--work", str(tmp_path), "--new", str(tmp_path / "new.jsonl"), "--set", "train.graph=true"]
    study = Study(_arguments().parse_args([*given, "--device", "cpu", "--teacher-tokens", str(TOKENS)]))
    study.clock.stop()
    study.lines = {name: {"chosen": values} for name, values in CHOSEN.items()}
    asked: list[list[str]] = []

    def fcsd(words: list[str], log: str, gpu: int) -> None:
        asked.append(words)
        raise OutOfTimeError

    monkeypatch.setattr(study, "fcsd", fcsd)
    for share, words in ((0.05, ["--set", "train.graph=true"]), (0.03, [])):
        with pytest.raises(OutOfTimeError):
            do_run(study, Run("KL", "same", share, settings=KL), 0)
        assert asked[-1][0] == "distill" and asked[-1][2:] == words


def test_an_untrained_conversion_has_the_wiring_of_its_recipe(tmp_path: Path) -> None:
    (two,) = [run for run in studies()["distance"] if run.method == "untrained, distance 2"]
    assert wiring_options(two, Subject()) == ["--wiring", "farskip", "--layers", "all", "--distance", "2"]
    found = [run for run in studies()["desync"] if "desync-4x at degree 2" in run.method]
    options = wiring_options(found[0], Subject("/models/dense", "ladder"))
    assert options == ["--wiring", "desync-4x", "--layers", "all", "--tp-degree", "2"] and not found[0].text
    for run in found[1:]:
        init = recipe_of(run, CHOSEN, TOKENS, tmp_path, "cuda", Subject("/models/dense", "ladder"))["init"]
        assert init == {"wiring": "desync-4x", "layers": "all", "tp_degree": 2} and run.export


def test_a_model_from_scratch_has_a_config_and_its_loss_is_that_of_the_last_steps(tmp_path: Path) -> None:
    for model in CONFIGS:
        write_config(model, tmp_path)
    for run in studies()["scratch"]:
        recipe = recipe_of(run, {}, TOKENS, tmp_path, "cuda")
        assert recipe["init"]["weights"] == "random" and run.from_scratch
        if not run.model:
            assert recipe["model"] == "bundled:teacher"
        else:
            config = AutoConfig.from_pretrained(recipe["model"])
            assert config.num_key_value_heads % recipe["init"].get("tp_degree", 1) == 0
    found = scratch_results([{"loss": float(n)} for n in range(200)] + [{"score": 1.0}], ROOT / "assets/teacher")
    assert found["final_loss"] == sum(range(150, 200)) / 50 and found["parameters"] > 1_000_000


def test_losses_from_scratch_are_compared_within_a_seed(lines: dict[str, dict[str, Any]]) -> None:
    rows = scratch(report.Models(lines)).splitlines()
    (moe,) = [row for row in rows if row.startswith("| MoE ") and "farskip" in row]
    assert [cell.strip() for cell in moe.split("|")[4:8]] == [
        "2.0300 ± 0.0058",
        "+0.0200 ± 0.0000",
        "2.5000 ± 0.0000",
        "3",
    ]
    assert sum(row.startswith("| llama-") for row in rows) == 10


def test_token_ids_differ_from_text_in_the_data_alone(lines: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    runs = {run.text: run for run in studies()["tokens"] if run.method == "KL" and run.seed == 1}
    one, other = (recipe_of(run, CHOSEN, TOKENS, tmp_path, "cpu") for run in runs.values())
    assert {key for key in one if one[key] != other[key]} == {"name", "output_dir", "data"}
    (source,) = other["data"]["sources"]
    assert list(runs) == ["same", "same-tokens"] and source["token_ids"] == "token_ids"
    assert Path(source["path"]).parent.name == "same-tokens-10pct"
    rows = [row.split("|")[1:3] for row in token_ids(report.Models(lines)).splitlines() if row.startswith("| KL")]
    assert [name.strip() for name, _ in rows] == ["KL, as text", "KL, as token ids"]
    assert all(len(scores.split(",")) == 3 for _, scores in rows)


def test_programs_that_fail_are_sorted_by_what_was_added_to_the_prompt(repo: Path) -> None:
    problems = load_evalplus(repo / "assets/mirror/evalplus/HumanEvalPlus.jsonl")[:4]
    prompts = [problem.prefix.strip() + "\n" for problem in problems]
    added = ["", '"""\n', "    return 1\n", "    return 2\n"]
    programs = [prompt + text for prompt, text in zip(prompts, added, strict=True)]
    counts = border.sorted_out(problems, programs, [False, False, False, True])
    assert counts == {"nothing": 1, "quotes again": 1, "another program": 1, "pass": 1}
    assert border.of_model(repo / "assets/teacher", problems, "cpu")["newline"] == {"pass": 4}


def test_a_text_is_long_enough_and_runs_have_it_in_common(tmp_path: Path) -> None:
    runs = [Run("KL", "same", 0.01), Run("SFT", "same", 0.005), Run("KL", "same", 0.2), Run("teacher")]
    assert texts_of(runs, ["sft-other"]) == [("other", 0.01), ("same", 0.01), ("same", 0.1)]
    written = [Run("KL", "student-written", 0.01), Run("KL", "teacher-written", 0.01)]  # they continue another text
    assert texts_of(written, [])[0] == ("same", 0.01) and {run.values_from for run in written} == {"kl-same"}
    for run in runs[:3]:
        recipe = recipe_of(Run(run.method, run.text, run.share), CHOSEN, TOKENS, tmp_path, "cuda")
        (source,) = recipe["data"]["sources"]
        assert Path(source["path"]).parent.name == {0.2: "same-10pct"}.get(run.share, "same-1pct")


def test_the_time_of_a_resumed_run_is_that_of_all_its_parts() -> None:
    assert seconds_in_steps([{"seconds": s} for s in (1.0, 5.0, 9.0, 2.0, 4.0)]) == 13


def test_lines_keep_the_answers(tmp_path: Path) -> None:
    line = line_of(Run("teacher"), 0.5)
    append(tmp_path / "a.jsonl", line)
    append(tmp_path / "a.jsonl", line | {"device": "another"})
    found = read_lines([tmp_path / "a.jsonl", tmp_path / "none.jsonl"])
    assert list(found) == [line["name"]] and found[line["name"]]["device"] == "another"
    first = line["results"][0]
    assert set(first["items"]) == {"0", "1"} and unpacked(first)["items"] == [float(digit) for digit in first["items"]]


def test_scores_are_paired_and_corrected_for_chance() -> None:
    teacher, untrained = line_of(Run("teacher"), 1.0), line_of(Run("untrained"), 0.0)
    same = scores_of([teacher], teacher, untrained)
    assert same.below["Avg"][0] == 0 and same.above_chance[0] == same.of_teacher[0] == 1
    floor = scores_of([untrained], teacher, untrained)
    assert floor.won_back is not None and floor.won_back[0] == 0 and floor.loss_won_back == (0, 0)
    assert abs(floor.above_chance[0]) < 0.1 < floor.of_teacher[0]  # guessing is worth nothing above chance
    seeds = [line_of(Run("KL", "same", 0.1, seed), 0.8) for seed in range(3)]
    three, one = scores_of(seeds, teacher, untrained), scores_of(seeds[:1], teacher, untrained)
    assert three.seeds == 3 and three.above_chance[0] == pytest.approx(0.8, abs=0.08)
    means = [scores_of([line], teacher, untrained).below["Avg"][0] for line in seeds]
    assert three.below["Avg"][0] == pytest.approx(sum(means) / 3)
    assert 0 < three.above_chance[1] < one.above_chance[1]
    other = json.loads(json.dumps(untrained))
    other["results"][0]["data_sha256"] = "x"
    with pytest.raises(ValueError, match="different questions"):
        scores_of([other], teacher, untrained)


def test_a_power_law_is_found_again() -> None:
    points = [(10.0**n, (1 - 0.5 * 10 ** (-0.3 * (n - 5)), 0.01)) for n in range(5, 9)]
    found = fit(points)
    value, low, high = found.at(1e10)
    assert found.b == pytest.approx(-0.3) and value == pytest.approx(1 - 0.5 * 10**-1.5)
    assert low < value < high <= 1
    assert tokens_to(0.9, [(1e6, 0.8), (1e8, 1.0)]) == pytest.approx(1e7)
    assert tokens_to(0.9, [(1e6, 0.95)]) == 1e6 and tokens_to(0.99, [(1e6, 0.8), (1e8, 0.98)]) is None


def test_the_page_has_every_study(lines: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    sweep = {"kl-same": {"name": "kl-same", "chosen": STARTING_VALUES, "trials": {}}}
    text = report.page(lines | sweep, tmp_path / "capability.png")
    assert (tmp_path / "capability.png").stat().st_size > 10_000
    studied = ("Table 1", "The text", "Recovery over", "Table 2", "Figure 3", "Early stopping", "Annealed wiring")
    studied += ("Chosen layers", "Ladder Table 4", "Chosen values")
    studied += ("Distance 2", "Desync from", "From scratch", "Text of the models")
    for heading in studied:
        assert f"\n## {heading}" in text
    assert "Not run" not in text
    (last,) = [row for row in text.splitlines() if row.startswith("| KL, last 50% ")]
    found = scores_of(
        [line for line in lines.values() if line["run"]["method"] == "KL, last 50%"],
        lines["teacher-all"],
        lines["untrained-all"],
    )
    assert f"{100 * found.above_chance[0]:.1f} ± {100 * found.above_chance[1]:.1f}" in last
    assert last.split("|")[-2].strip() == "3"  # seeds
    assert "best score is 70.0, first at step 2, its last one 10.0 at step 3. It stopped at step 3 of 9" in " ".join(
        text.split()
    )


def test_the_page_says_what_was_not_run_and_refuses_trials(lines: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    few = {name: line for name, line in lines.items() if line["run"]["method"] in ("teacher", "untrained")}
    text = report.page(few, tmp_path / "none.png")
    assert "Table 1" not in text.replace("of FarSkip Table 1", "") and "- table-1: 12 of 14 runs" in text
    assert not (tmp_path / "none.png").exists()
    with pytest.raises(ValueError, match="trials"):
        report.page(few | {"x": line_of(Run("KL", "same", 0.1), 0.5, limit=5)}, tmp_path / "none.png")
    with pytest.raises(ValueError, match="different teachers"):
        report.page(few | {"x": line_of(Run("KL", "same", 0.1), 0.5, teacher_tokens=7)}, tmp_path / "none.png")


@pytest.mark.parametrize("suffix", ["", "_llama", "_qwen3_moe"])
def test_the_stored_page_is_that_of_the_stored_results(suffix: str, repo: Path, tmp_path: Path) -> None:
    text = report.page(read_lines([repo / f"benchmarks/results/capability{suffix}.jsonl"]), tmp_path / "capability.png")
    assert text == (repo / f"studies/capability/CAPABILITY{suffix.upper()}.md").read_text(encoding="utf-8")


def test_the_search_chose_half_of_the_layers() -> None:
    assert len(set(select_layers(chosen_half(), 10))) == 5


def test_another_teacher_and_wiring_are_in_every_recipe(tmp_path: Path) -> None:
    subject = Subject("/models/dense", "ladder")
    runs = [run for run in studies()["table-4"] if run.text]
    made = {run.name: recipe_of(run, CHOSEN, 580_000_000, tmp_path, "cuda", subject) for run in runs}
    assert len(made) == len(runs) == 24  # two choices of layers, two losses, two sets of values, three seeds
    for run in runs:
        recipe = made[run.name]
        assert recipe["model"] == "/models/dense"
        assert recipe["init"] == {"wiring": "ladder", "layers": run.layers}
        assert recipe["data"]["sources"][0]["path"].endswith("other-1pct/train.jsonl")  # read twice
        tokens = recipe["train"]["steps"] * recipe["train"]["batch_tokens"]
        assert tokens == pytest.approx(TABLE_4 * 580_000_000, rel=0.01)
        published = {"lr": 5e-6, "warmup_steps": 200}
        assert (recipe["optim"] == published) == ("published" in run.method)
    assert trial_recipe("kl-other", {}, CHOSEN, 5, tmp_path, "cpu", subject)["init"]["wiring"] == "ladder"
    assert texts_of(runs, []) == [("other", 0.01)]


def test_the_page_of_a_sibling_names_it_and_its_own_studies(tmp_path: Path) -> None:
    runs = {run.name: run for run in [*studies()["table-4"], *studies()["table-1"]] if run.method != "KL"}
    lines = {name: line_of(run, quality(run), teacher="llama", wiring="ladder") for name, run in runs.items()}
    text = report.page(lines, tmp_path / "none.png")
    assert "on the teacher `llama`, with the wiring ladder, and its benchmarks" in " ".join(text.split())
    assert "## Ladder Table 4" in text and "| SFT, published values, layers 62.5% " in text
    assert "- table-1: 6 of 14 runs" in text and "figure-3" not in text
