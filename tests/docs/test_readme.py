"""The README is true: its tour runs as printed, its two commands are what CI runs."""

import json
import re
import shlex
from statistics import median

import pytest
import ranks
from studies.real import page

from fcsd import recipes
from fcsd.bench.serve.figures import load_ratios


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
        done = ranks.fcsd(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
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
    """The ranges of speed are over everything that the files have of vLLM and its first setting of the plugin."""
    screen = readme[: readme.index("\n## ")]
    cells = [
        re.split(r" *\| *", line.replace("**", "").strip("| ")) for line in screen.splitlines() if line[:2] == "| "
    ]
    figures = {what: figure for what, figure, _ in cells}
    assert len(figures) == 4, "a row of names, and three figures with one condition each"

    def raw(name):
        return json.loads((repo / f"benchmarks/results/{name}.json").read_text())

    def span(found):
        ratios = list(found)
        return f"{min(ratios):.2f}x to {max(ratios):.2f}x"

    def slow(*names):
        return [
            (figure, ratio)
            for name in names
            for wiring, ratios in raw(f"serve_vllm_{name}slow_2xh100")["ratios"].items()
            for figure, ratio in ratios.items()
            if wiring in ("ladder", "desync-4x", "farskip, shared experts beside")
            or (wiring == "farskip" and name in ("v2lite_27_layers_", "v2lite_fp8_", "scout_fp8_", "qwen3_16_layers_"))
        ]

    def first(found):
        return f"{min(ratio for figure, ratio in found if 'prefill' in figure):.2f}x"

    plain_sums, wide = slow("", "quantised_"), slow("70b_")
    eight = plain_sums + slow("by_table_8b_")
    files = [json.loads(file.read_text()) for file in (repo / "benchmarks/results").glob("serve_vllm_*slow_*.json")]
    imitated = {(file["link"], file["environment"]["settings"]["NCCL_P2P_DISABLE"]) for file in files}
    assert imitated == {("NV18", "1")}
    assert "is imitated in all that was measured, by `NCCL_P2P_DISABLE=1`" in " ".join(screen.split())
    serving = " ".join((repo / "docs/serving.md").read_text().split())
    assert "the H100s have NVLink, and `NCCL_P2P_DISABLE=1`" in serving
    together = raw("serve_vllm_load_slow_2xh100")["variants"]
    plain, ladder, replicas = (together[name] for name in ("original", "ladder", "original, one replica a GPU"))
    arrivals = load_ratios(ladder["loads"]["0.6"], [plain["loads"]["0.6"]])
    every = [*(ratio for _, ratio in eight), *arrivals.values()]
    assert len(every) == 21 and figures["speed of serving, GPUs without NVLink"] == span(every)
    told, ratios = " ".join(readme.split()), raw("serve_vllm_load_slow_2xh100")["ratios"]["ladder"]
    least, most = min(every), max(every)
    said = f"{most:.2f}x: the original takes {most:.2f} times as long. {least:.2f}x: the original is faster."
    assert said in told and f"{most:.2f}x needs sums in 4 bits" in told
    assert most == raw("serve_vllm_by_table_8b_slow_2xh100")["ratios"]["ladder"]["prefill 8192"]
    others = slow("v2lite_", "v2lite_27_layers_", "scout_fp8_", "qwen3_16_layers_", "qwen3_32b_12_layers_")
    assert f"DeepSeek-V2-Lite in fp8 had {first(slow('v2lite_fp8_'))} to the first word" in told
    assert float(first(eight + wide + others)[:-1]) > 1, "no other model was slower to the first word"
    least = min(ratio for figure, ratio in eight + wide + others + slow("v2lite_fp8_") if "decode" in figure)
    assert f"a step of Qwen3-30B-A3B {least:.2f}x." in told
    assert least == raw("serve_vllm_qwen3_16_layers_slow_2xh100")["ratios"]["farskip"]["decode 1"]
    steps = span(ratio for figure, ratio in wide if "decode" in figure)
    assert f"the first word was {first(wide)} and more, and a step {steps}; by fcsd's engine" in told
    assert f"without them the best figure is {max(ratio for _, ratio in plain_sums):.2f}x." in told
    whole_model = raw("serve_vllm_8b_replicas_slow_2xh100")["variants"]
    longer = [
        median(served["ladder"]["rounds"][key]) / median(served["original, one replica a GPU"]["rounds"][key])
        for served in (together, whole_model)
        for key in ("prefill 512", "prefill 2048")
    ] + [1 / load_ratios(ladder["loads"]["0.6"], [replicas["loads"]["0.6"]])["first_p50"]]
    needed = f"and needed {min(longer):.1f} to {max(longer):.1f} times as long"
    gain = f"{ratios['peak 0']:.2f}x of their throughput, {needed}"
    own, staged = (whole_model[name]["rounds"] for name in ("ladder", "original, pipeline stages"))
    sizes = ("prefill 512", "prefill 2048", "decode 1", "decode 16")
    beside = [f"{median(staged[key]) / median(own[key]):.2f}x" for key in sizes]
    assert "had {} and {} of their speed to the first word, and {} and {} in steps.".format(*beside) in told
    assert gain in told and f"slower**: {arrivals['first_p50']:.2f}x to the first word" in told
    quiet = raw("serve_vllm_load_alone_slow_2xh100")["variants"]
    slower = load_ratios(quiet["ladder"]["loads"]["0.6"], [quiet["original"]["loads"]["0.6"]])["first_p50"]
    assert f"on a busy host, {slower:.2f}x on a quieter one" in told
    fast = [
        row[of]
        for name in ("scout", "v2lite")
        for row in raw(f"vllm_first_tokens_{name}_2xh200")["time-1"]["rows"]
        for of in ("mean_ms_times_original", "step_ms_times_original")
        if row["role"] == "converted" and of in row
    ]
    assert len(fast) > 5 and figures["speed of serving, GPUs with NVLink"] == span(fast)
    assert f"{span(fast)} under vLLM." in serving.replace("**", "")
    half, whole = raw("real_smollm2_converted_2xh100"), raw("real_smollm2_all_layers_longer_1xh100")
    lower = ["{:.1f} ± {:.1f}".format(*map(abs, page.best([file])[0]["lost"])) for file in (half, whole)]
    assert figures["quality after healing"] == "{} and {} points lower".format(*lower)
    assert all(len(page.informative(file)) == 4 for file in (half, whole))
