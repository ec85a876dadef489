"""The README is true: its tour runs as printed, its two commands are what CI runs."""

import json
import re
import shlex

import pytest
import ranks
from studies.real import page

from fcsd import recipes


@pytest.fixture(scope="module")
def readme(repo):
    return (repo / "README.md").read_text()


def test_the_tour_runs(readme, repo, tmp_path):
    (tmp_path / "assets").symlink_to(repo / "assets")
    (tour,) = re.findall(r"```console\n(.*?)```", readme, re.DOTALL)
    assert readme[: readme.index("```console")].count("\n") < 30, "the commands are on the first screen"
    commands = [line.removeprefix("$ ") for line in tour.splitlines()]
    assert len(commands) == 5 and all(command.startswith("fcsd ") for command in commands)
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


def test_the_figures_of_the_first_screen_follow_from_the_raw_files(readme, repo):
    rows = {line.split(" | ")[0].strip("| "): line for line in readme.splitlines() if line.startswith("| ")}

    def raw(name):
        return json.loads((repo / f"benchmarks/results/{name}.json").read_text())

    def says(row, *figures):
        assert [figure for figure in figures if figure not in rows[row]] == [], rows[row]

    own, vllm = (raw(f"serve_{engine}_slow_2xh100")["ratios"] for engine in ("own", "vllm"))
    points = ["prefill 512", "prefill 2048"], [f"decode {batch}" for batch in (1, 16, 64)]
    for found, words in (
        (vllm["ladder"], "2048 tokens {}, a step of 1, 16 and 64 answers {}."),
        (own["ladder, by its table"], "INT4 included: {} and {};"),
        (own["ladder"], "under the standard wiring {}** and {}"),
    ):
        says("serving without NVLink", words.format(*(", ".join(f"{found[key]:.2f}x" for key in of) for of in points)))
    scout = raw("vllm_first_tokens_scout_2xh200")["time-1"]["rows"]
    gained = [f"{row['mean_ms_times_original']:.2f}x" for row in scout if row["role"] == "converted"]
    says("serving over NVLink", *gained)
    healed, before = raw("real_smollm2_converted_2xh100"), raw("real_smollm2_100m_2xh100")
    lower = {
        found["model"]: "{:.1f} ± {:.1f}".format(*map(abs, page.mean_difference(file, found["model"])))
        for file in (healed, before)
        for found in file["differences"]
    }
    scored = [100 * healed["scores"]["original"][task]["value"] for task in page.informative(healed)]
    half, most = "half-converted-125m", "far-converted-85m"
    hellaswag = [
        next(-task["points"] for task in found["tasks"] if task["column"] == "HS")
        for name in (half, most)
        for found in healed["differences"]
        if found["model"] == name
    ]
    says(
        "capability kept",
        f"({sum(scored) / len(scored):.1f}) is {lower[half]} points lower",
        f"and {lower[most]} with 28 of 30",
        "(**{:.1f} and {:.1f}**)".format(*hellaswag),
    )
    names = ("ladder-half-both-41m", "farskip-auto-both-100m")
    says("capability kept", "untrained {} and {} lower".format(*(lower[f"{n}-untrained"].split(" ")[0] for n in names)))
