"""Sweeps of real runs: stages, choices, kills, failures, and the full run that grows out of the chosen trial."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs

from fcsd.config import ResolvedRecipe, load_recipe
from fcsd.distill import loop
from fcsd.distill.run import checkpoints
from fcsd.distill.run.report import read_metrics
from fcsd.distill.sweep import process
from fcsd.distill.sweep.process import Exit
from fcsd.distill.sweep.report_table import to_text
from fcsd.distill.sweep.search import require_complete, sweep
from fcsd.distill.sweep.trials import all_trials, points
from fcsd.errors import ConfigError, FcsdError, PreemptedError
from fcsd.models.build import load_model

TWO_STAGES = {
    "stages": [{"train.batch_tokens": [64, 128]}, {"optim.lr": [1e-3, 2e-3]}],
    "steps": 4,
    "window": 2,
}


def recipe(folder: Path, out: Path, plan: dict[str, Any], **changes: Any) -> ResolvedRecipe:
    return runs.resolved(folder, output_dir=str(out), sweep=plan, train__steps=6, **changes)


def distilled(path: Path) -> None:
    try:
        loop.distill_model(load_recipe(path))
    except FcsdError as error:
        os._exit(error.exit_code)


def launch(path: Path) -> Exit:
    code = ranks.exit_code(distilled, path)
    assert code is not None
    return Exit(code, f"exit code {code}" if code else "")


def recorded(launches: list[str]) -> Callable[[Path], Exit]:
    def launch_and_record(path: Path) -> Exit:
        launches.append(path.stem)
        return launch(path)

    return launch_and_record


def weights(model: Path) -> str:
    return hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def test_two_stages_share_a_run_and_the_chosen_one_becomes_the_full_run(folder: Path, tmp_path: Path) -> None:
    out, launches = tmp_path / "sweep", []
    record = sweep(recipe(folder, out, TWO_STAGES), recorded(launches))
    require_complete(record)
    losses = {name: entry["value"] for name, entry in record["trials"].items()}
    assert len(losses) == 3 and launches == [*losses, "full"], "three runs and the full one: the stages share one"
    first, second = (stage["trials"] for stage in record["stages"])
    assert len(first) == len(second) == 2 and len(set(first) & set(second)) == 1
    best, chosen = (min(names, key=losses.__getitem__) for names in (first, second))
    assert [stage["chosen"] for stage in record["stages"]] == [best, chosen] and best in second
    for name, entry in record["trials"].items():
        lines = [line for line in read_metrics(Path(entry["run"])) if line["step"] <= 4]
        assert entry["value"] == pytest.approx((lines[-1]["loss"] + lines[-2]["loss"]) / 2)
        assert entry["tokens"] == 4 * entry["values"]["train.batch_tokens"] == lines[-1]["tokens"]
        assert len(checkpoints.checkpoints(Path(entry["run"]) / "checkpoints")) == 2
        assert name in (out / "table.md").read_text() or str(entry["values"]["optim.lr"]) in to_text(record)
    assert (out / "sweep.png").stat().st_size > 10_000
    assert json.loads((out / "sweep.json").read_text()) == record

    full = Path(record["run"])
    assert full == out / "trials" / chosen
    values = record["trials"][chosen]["values"]
    alone = runs.resolved(
        folder,
        output_dir=str(tmp_path / "alone"),
        train__steps=6,
        train__batch_tokens=values["train.batch_tokens"],
        optim__lr=values["optim.lr"],
    )
    assert ranks.on_ranks(1, loop.distill_model, alone) == [tmp_path / "alone"]
    numbers = [[(m["step"], m["loss"], m["lr"]) for m in read_metrics(run)] for run in (full, tmp_path / "alone")]
    assert numbers[0] == numbers[1], "a trial and its continuation are one run of six steps"
    assert weights(full / "final") == weights(tmp_path / "alone" / "final")

    launches.clear()
    assert sweep(recipe(folder, out, TWO_STAGES), recorded(launches)) == record
    assert launches == ["full"], "nothing is run twice; the full run sees for itself that it is finished"

    with pytest.raises(ConfigError, match=r"optim\.weight_decay was 0\.0 and is now 0\.5"):
        sweep(recipe(folder, out, TWO_STAGES, optim__weight_decay=0.5), recorded(launches))


def ended_after_two_steps(path: Path) -> None:
    """A run that is asked to end when its second step is saved."""
    finish = loop.finish_step

    def finish_and_end(run: Any, tools: Any, duties: Any, step: int, *rest: Any) -> None:
        finish(run, tools, duties, step, *rest)
        if step == 2:
            raise PreemptedError("step 2 was the last")

    loop.finish_step = finish_and_end
    distilled(path)


@pytest.mark.parametrize(
    ("key", "choices", "fixed"),
    [
        ("train.adapter.rank", [1, 8], {"train__adapter": {"alpha": 8.0}, "optim__train": ["norms"]}),
        pytest.param("optim.train", [["norms"], ["converted"]], {}, marks=pytest.mark.nightly),
    ],
)
def test_what_trains_and_learning_rates_are_chosen_and_a_trial_that_was_ended_goes_on(
    folder: Path, tmp_path: Path, key: str, choices: list[Any], fixed: dict[str, Any]
) -> None:
    plan = {"stages": [{key: choices}, {"optim.lr": [1e-3, 4e-3]}], "steps": 4, "window": 1}
    out, launches = tmp_path / "sweep", []
    resolved = recipe(folder, out, plan, **fixed)

    def end_the_second(path: Path) -> Exit:
        launches.append(path.stem)
        run = ended_after_two_steps if len(launches) == 2 else distilled
        return Exit(ranks.exit_code(run, path))

    with pytest.raises(PreemptedError):
        sweep(resolved, end_the_second)
    ended = out / "trials" / launches[1]
    assert [line["step"] for line in read_metrics(ended)] == [1, 2]
    record = sweep(resolved, recorded(launches))
    require_complete(record)
    losses = {name: entry["value"] for name, entry in record["trials"].items()}
    assert len(losses) == 3 and launches == [*list(losses)[:2], *list(losses)[1:], "full"]
    for stage in record["stages"]:
        assert stage["chosen"] == min(stage["trials"], key=losses.__getitem__)
    assert len(set(losses.values())) == 3
    values = record["trials"][ended.name]["values"]
    alone = {**fixed, key.replace(".", "__"): values[key]}
    runs.train(runs.resolved(folder, output_dir=str(tmp_path), train__steps=6, optim__lr=values["optim.lr"], **alone))
    numbers = [[(m["loss"], m["grad_norm"]) for m in read_metrics(run)][:4] for run in (ended, tmp_path)]
    assert numbers[0] == numbers[1], "a trial that was ended and went on is a run without interruption"
    assert read_metrics(Path(record["run"]))[-1]["step"] == 6
    assert load_model(Path(record["run"]) / "final").config.model_type == "fcsd_deepseek_v2"


def test_a_trial_that_fails_is_in_the_table_and_alone_repeated(folder: Path, tmp_path: Path) -> None:
    late, out, launches = tmp_path / "late.jsonl", tmp_path / "sweep", []
    plan = {"stages": [{"data.sources.0.path": [str(late), str(folder / "corpus.jsonl")]}], "steps": 2}
    plan |= {"then": "stop", "horizon": "trial", "metric": "kl"}
    found = sweep(recipe(folder, out, plan), recorded(launches))
    statuses = [entry["status"] for entry in found["trials"].values()]
    assert statuses == ["failed", "done"] and len(launches) == 2, "one failure does not keep the others from running"
    assert "failed: exit code 3" in to_text(found) and "failed: exit code 3" in (out / "table.md").read_text()
    with pytest.raises(FcsdError, match="1 of 2 trials failed"):
        require_complete(found)
    late.write_text((folder / "corpus.jsonl").read_text())
    found = sweep(recipe(folder, out, plan), recorded(launches))
    require_complete(found)
    assert launches[2:] == launches[:1]
    one, two = found["trials"].values()
    assert one["value"] == two["value"] and found["stages"][0]["chosen"] == launches[0] and found["run"] is None


@pytest.mark.nightly
def test_a_grid_with_a_learning_rate_that_diverges(folder: Path, tmp_path: Path) -> None:
    plan = {"stages": [{"optim.lr": [1e-3, 1e30], "objective.temperature": [1.0, 2.0]}], "steps": 4, "metric": "sft"}
    plan |= {"horizon": "trial"}
    found = sweep(recipe(folder, tmp_path / "sweep", plan), launch)
    require_complete(found)
    statuses = [entry["status"] for entry in found["trials"].values()]
    assert statuses == ["done", "done", "diverged", "diverged"]
    assert Path(found["run"]) == tmp_path / "sweep" / "full"
    assert [line["step"] for line in read_metrics(tmp_path / "sweep" / "full")] == [1, 2, 3, 4, 5, 6]
    trial = read_metrics(Path(found["trials"][found["stages"][0]["chosen"]]["run"]))
    assert trial[-1]["lr"] == 0, "with horizon: trial, a trial has a schedule to itself"


@pytest.mark.nightly
@pytest.mark.timeout(3600)  # it starts eleven processes one after the other, each of which imports everything anew
def test_the_command_killed_and_started_again(folder: Path, tmp_path: Path) -> None:
    recipe(folder, tmp_path / "sweep", TWO_STAGES)
    command = [sys.executable, "-m", "fcsd", "distill", "--sweep", str(folder / "recipe.yaml"), "--json"]
    with (tmp_path / "stderr").open("w") as stderr:
        first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            while not list((tmp_path / "sweep").glob("trials/batch_tokens-128*/checkpoints/step-2")):
                assert first.poll() is None, (tmp_path / "stderr").read_text()
                time.sleep(0.05)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    before = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    # On a busy machine the second trial may have ended as well before the kill.
    assert next(iter(before["trials"])) == "batch_tokens-64_lr-0.001" and len(before["trials"]) < 3
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    for name, entry in before["trials"].items():
        assert found["trials"][name] == entry
        assert f"trial {name}\n" not in again.stderr, "a finished trial is not run again"
    whole = sweep(recipe(folder, tmp_path / "whole", TWO_STAGES), launch)
    assert [stage["chosen"] for stage in found["stages"]] == [stage["chosen"] for stage in whole["stages"]]
    for name, entry in whole["trials"].items():
        assert (entry["value"], entry["tokens"]) == (found["trials"][name]["value"], found["trials"][name]["tokens"])
    assert weights(Path(found["run"]) / "final") == weights(Path(whole["run"]) / "final")

    terminated = subprocess.Popen([*command, "--output-dir", str(tmp_path / "third")], stderr=subprocess.DEVNULL)
    while not list((tmp_path / "third").glob("trials/*/checkpoints/step-2")):
        assert terminated.poll() is None
        time.sleep(0.05)
    terminated.terminate()
    assert terminated.wait(300) == 143


LAST_STEP = "import os, signal as s; s.pthread_sigmask(s.SIG_BLOCK, {s.SIGTERM}); os.kill(os.getppid(), s.SIGTERM); "
LAST_STEP += "s.sigwait({s.SIGTERM})"


def test_a_signal_in_the_last_step_of_a_trial_ends_the_sweep(tmp_path: Path) -> None:
    assert process._run(tmp_path, [sys.executable, "-c", LAST_STEP]).terminated, "although the trial ended with 0"


def test_an_interrupt_of_the_sweep_alone_reaches_its_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither lost, nor taken for the end of the trial, whose last step it met. The sweep says it, not the trial."""
    monkeypatch.setattr(process, "_ALONE", 0.0)
    before = signal.getsignal(signal.SIGINT)
    says = "; import sys; print('error: interrupted', 'after', sep='\\n', file=sys.stderr)"
    assert process._run(tmp_path, [sys.executable, "-c", LAST_STEP.replace("SIGTERM", "SIGINT") + says]).interrupted
    assert capsys.readouterr().err == "after\n"
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_between_two_trials_ends_the_sweep() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), process.ends_on_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.nightly
def test_trials_divide_the_experts_with_communication_in_flight(tmp_path: Path) -> None:
    runs.write_models(tmp_path, "qwen3_moe")
    plan = {"stages": [{"train.batch_tokens": [128, 256], "optim.lr": [1e-3, 2e-3]}], "steps": 2, "then": "stop"}
    recipe(tmp_path, tmp_path / "sweep", plan, parallel__ep_size=2, parallel__overlap="on")
    command = [sys.executable, "-m", "fcsd", "distill", "--sweep", str(tmp_path / "recipe.yaml"), "--json"]
    done = subprocess.run([*command, "--gpus", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [trial["status"] for trial in found["trials"].values()] == ["done"] * 4
    alone = runs.resolved(tmp_path, output_dir=str(tmp_path / "alone"), train__steps=2, optim__horizon=6)
    runs.train(alone)  # one process that holds all experts
    twin = found["trials"]["batch_tokens-256_lr-0.001"]
    losses = [line["loss"] for line in read_metrics(tmp_path / "alone")]
    assert twin["value"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def refused(folder: Path, out: Path, plan: dict[str, Any], **changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        sweep(recipe(folder, out, plan, **changes), launch)
    assert not out.exists()
    return f"{caught.value} {caught.value.hint}"


def test_a_sweep_that_cannot_be_is_refused_before_its_first_run(folder: Path, tmp_path: Path) -> None:
    def plan(stage: dict[str, list[Any]], **more: Any) -> dict[str, Any]:
        return {"stages": [stage], "steps": 4} | more

    out = tmp_path / "sweep"
    assert "unknown key 'train.lrr'; did you mean 'optim.lr'" in refused(folder, out, plan({"train.lrr": [1e-3]}))
    assert "sweep, optim.lr -1.0" in refused(folder, out, plan({"optim.lr": [1e-3, -1.0]}))
    assert "the full run has 6" in refused(folder, out, plan({"optim.lr": [1e-3]}, steps=7))
    assert "it has loss, kl, sft, held_out_kl, held_out_sft" in refused(
        folder, out, plan({"optim.lr": [1e-3]}, metric="perplexity")
    )
    assert "'kl' is not measured by kl-0" in refused(folder, out, plan({"objective.kl": [1.0, 0.0]}, metric="kl"))
    assert "two trials would be called" in refused(folder, out, plan({"model": ["a/b", "a b"]}))
    with pytest.raises(ConfigError, match=r"output_dir .*: is the directory of a model"):
        sweep(recipe(folder, folder / "student", TWO_STAGES), launch)
    with pytest.raises(ConfigError, match="has no `sweep:` section"):
        sweep(runs.resolved(folder), launch)


def test_a_dry_run_says_what_would_be_run_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    found = sweep(recipe(folder, tmp_path / "sweep", TWO_STAGES), launch, dry_run=True)
    assert to_text(found).count("planned") == 2 and not (tmp_path / "sweep").exists()


def test_a_directory_of_another_sweep_is_left_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    resolved = recipe(folder, out, TWO_STAGES)
    trial = all_trials(resolved)[0]
    (out / "trials").mkdir(parents=True)
    (out / "trials" / f"{trial.name}.yaml").write_text(trial.resolved.to_yaml())
    with pytest.raises(ConfigError, match=r"holds another sweep: in trial .*, seed was 0 and is now 1"):
        sweep(recipe(folder, out, TWO_STAGES, seed=1), launch)


def test_each_batch_size_has_the_steps_that_the_budget_in_tokens_gives_it(folder: Path, tmp_path: Path) -> None:
    resolved = runs.resolved(
        folder, output_dir=str(tmp_path), sweep=TWO_STAGES, train__tokens=5000, train__steps=None, optim__horizon=None
    )
    for trial in all_trials(resolved):
        short, steps = trial.resolved.recipe, -(-5000 // trial.values["train.batch_tokens"])
        assert (short.train.steps, short.schedule_steps, trial.full.recipe.train.steps) == (4, steps, steps)


def test_all_combinations_of_a_stage_are_tried() -> None:
    assert list(points({"a": [1, 2], "b": ["x", "y"]})) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
