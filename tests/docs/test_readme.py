"""The README is true: its tour runs as printed, its two commands are what CI runs."""

import json
import re
import shlex
from statistics import median

import pytest
import ranks
from studies.capability.models import Models, pm
from studies.capability.results import read_lines

from fcsd import recipes


@pytest.fixture(scope="module")
def readme(repo):
    return (repo / "README.md").read_text()


def test_the_tour_runs(readme, repo, tmp_path):
    (tmp_path / "assets").symlink_to(repo / "assets")
    (tour,) = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    commands = [line.removeprefix("$ ") for line in tour.splitlines()]
    assert len(commands) > 5 and all(command.startswith("fcsd ") for command in commands)
    for command in commands:
        done = ranks.fcsd(*shlex.split(command)[1:], cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet)
    done = ranks.script(tmp_path / "snippet.py")
    assert done.returncode == 0, done.stderr


def test_the_two_commands_are_what_ci_runs(readme, repo):
    (block,) = re.findall(r"```bash\n(.*?)```", readme, re.DOTALL)
    commands = [line.split()[0] for line in block.splitlines()]
    assert commands == ["scripts/test.sh", "scripts/quickstart.sh"]
    ci = (repo / ".ci/run").read_text().splitlines()
    for command in commands:
        assert command in ci and (repo / command).stat().st_mode & 0o111


def test_the_large_runs_name_recipes_that_exist(readme):
    """They need GPUs and the hub; Slurm's script and several nodes' commands are made here."""
    (block,) = re.findall(r"```sh\n(.*?)```", readme, re.DOTALL)
    commands = [shlex.split(line.split(" #")[0].split(" >")[0]) for line in block.splitlines()]
    named = [
        words[words.index(next(w for w in ("plan", "--recipe", "--sweep") if w in words)) + 1] for words in commands
    ]
    assert len(named) > 3 and set(named) <= set(recipes.names())
    slurm = next(words for words in commands if "--slurm" in words)
    done = ranks.fcsd(*slurm[1:])
    assert done.returncode == 0 and done.stdout.startswith("#!") and "#SBATCH --nodes=4" in done.stdout


def test_the_figures_of_the_first_table_follow_from_the_raw_files(readme, repo):
    rows = {line.split(" | ")[0].strip("| "): line for line in readme.splitlines() if line.startswith("| ")}

    def raw(name):
        return json.loads((repo / f"benchmarks/results/{name}.json").read_text())

    def says(row, *figures):
        assert [figure for figure in figures if figure not in rows[row]] == [], rows[row]

    steps = {
        name: median(of["step"])
        for name, of in raw("train_v2lite_copies_4xh200")["routers"]["uniform"]["variants"].items()
    }
    ours, bound = steps["copies-fused"], steps["comm-free-fused"]
    says("training step", f"{steps['stock'] / ours:.2f}x as fast", f"{100 * bound / ours:.1f} % of the speed")
    says("training step", f"of the {steps['stock'] / ours:.2f}x, {steps['standard-fused'] / ours:.2f}x is gained")
    stored = raw("distill_v2lite_turns_4xh200")
    ours, bound = (median(stored["variants"][name]["seconds"]) for name in ("overlapped", "comm-free"))
    speed = stored["batch_tokens"] / ours
    says("distillation step", f"{100 * bound / ours:.1f} %", f"{speed:,.0f} tokens/s".replace(",", " "))
    says("distillation step", f"{100 * speed / stored['full_speed']:.1f} % of the GPUs' peak")

    def turns(name, side):
        return median(turn["seconds"] for turn in raw(name)["turns"] if turn["side"] == side)

    dense, moe = (
        {side: turns(f"baselines_{kind}_1xh200", side) for side in ("fcsd", "trl")} for kind in ("dense", "moe")
    )
    says("distillation on one GPU", f"{dense['trl'] / dense['fcsd']:.2f}x and {moe['trl'] / moe['fcsd']:.2f}x")
    today = [f"baselines_{kind}_one_launch_1xh200" for kind in ("dense", "moe")]
    ratios = [f"{turns(name, 'loop-liger') / turns(name, 'fcsd'):.2f}x" for name in today]
    says("distillation on one GPU", f"{' and '.join(ratios)} the speed of a plain loop")
    says("distillation on one GPU", f"becomes {turns('baselines_dense_before_1xh200', 'trl') / dense['fcsd']:.2f}x")
    memory = raw("memory_v2lite_4xh200")
    says("memory", *(f"{memory[of]['peak'] / 2**30:.{digits}f}" for of, digits in (("measured", 2), ("predicted", 1))))
    models = Models(read_lines([repo / "benchmarks/results/capability.jsonl"]))
    annealed = "KL, annealed over 0.25"
    told = {
        "capability": [("KL", "same", 0.1), ("KL", "same", 0.01), ("SFT", "same", 0.1)],
        "capability on other text": [("KL", "other", 0.1), ("SFT", "other", 0.1)],
        "annealed wiring": [(annealed, "same", 0.03), ("KL", "same", 0.03), (annealed, "same", 0.1)],
    }
    for row, method, text, share in [(row, *model) for row, trained in told.items() for model in trained]:
        lines = models.seeds(method, text, share, stop="best" if share == 0.1 else "")
        assert len(lines) == 3
        says(row, pm(models.scores(lines).of_teacher, 100))
    for name in ("", "_llama", "_qwen3_moe"):
        sibling = Models(read_lines([repo / f"benchmarks/results/capability{name}.jsonl"]))
        for method in ("KL", "SFT"):
            lines = sibling.seeds(method, "same-tokens", 0.1, stop="best")
            says("capability on token ids", pm(sibling.scores(lines).of_teacher, 100))
    says("capability", f"{pm(models.scores([models.untrained]).of_teacher, 100)} % untrained")
