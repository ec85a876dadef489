"""studies/real/checkpoint.sh: its commands are ones that fcsd has, and the whole of it runs on a tiny random model."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import texts
import tiny
import typer

from fcsd.cli.main import app
from fcsd.config import load_recipe

pytestmark = pytest.mark.lab


def script(repo: Path, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with this environment's fcsd, in another folder than the checkout."""
    settings = {**os.environ, "FCSD": f"{sys.executable} -m fcsd", "PYTHONPATH": str(repo), "HF_HUB_OFFLINE": "1"}
    command = [str(repo / "studies/real/checkpoint.sh"), *args]
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, timeout=1500)


@pytest.mark.parametrize("options", [[], ["--held-out", "h.jsonl", "--tokens", "2e6", "--limit", "5", "--gpus", "2"]])
def test_a_dry_run_prints_a_recipe_and_commands_that_parse(repo: Path, tmp_path: Path, options: list[str]) -> None:
    done = script(repo, "org/model", "my out", "--dry-run", *options, "--set", "optim.lr=1e-5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    text, _, printed = done.stdout.partition("\n\n")
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "recipe.yaml", ["optim.lr=1e-5"]).recipe
    assert (recipe.model, recipe.output_dir) == ("my out/converted", "my out/run")
    assert recipe.train.tokens == (2_000_000 if options else 50_000_000)
    assert (recipe.data.held_out is not None) == bool(options)
    commands = [shlex.split(line) for line in printed.splitlines() if not line.startswith("#")]
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    names = []
    for command in commands:
        name, *rest = command[command.index("fcsd") + 1 :]
        group.commands[name].make_context(name, rest)  # type: ignore[attr-defined]  # raises a usage error
        names.append(name)
    assert names == ["inspect", "convert", "plan", "distill", "eval", "export"]
    assert not (tmp_path / "my out").exists()


def test_downloads_are_listed_for_what_is_not_here(repo: Path, tmp_path: Path) -> None:
    listed = script(repo, "org/model", "out", "--downloads", cwd=tmp_path).stdout
    assert "hf download org/model " in listed and "HuggingFaceFW/fineweb-edu" in listed and "allenai/ai2_arc" in listed
    (tmp_path / "model").mkdir()
    (tmp_path / "text.jsonl").touch()
    here = script(repo, "model", "out", "--downloads", "--data", "text.jsonl", "--tasks", "piqa", cwd=tmp_path).stdout
    assert [line.split()[2] for line in here.splitlines()] == ["baber/piqa"]


@pytest.mark.parametrize("args", [[], ["model"], ["model", "out", "--tokns", "1"], ["model", "out", "--tokens"]])
def test_a_wrong_call_prints_the_usage(repo: Path, tmp_path: Path, args: list[str]) -> None:
    done = script(repo, *args, cwd=tmp_path)
    assert done.returncode == 2 and "Usage: studies/real/checkpoint.sh MODEL OUT" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("arch", ["olmoe", "qwen3_moe"])
def test_a_model_of_random_weights_goes_all_the_way(repo: Path, tmp_path: Path, arch: str) -> None:
    """From a local mirror of the layout on the hub; then the same command again, which repeats nothing that is done."""
    tiny.model(arch).save_pretrained(tmp_path / "model", max_shard_size="300KB")
    texts.tokenizer().save_pretrained(tmp_path / "model")
    lines = [f"line {n}: " + "the quick brown fox " * (n % 7 + 1) for n in range(200)]
    texts.write_jsonl(tmp_path / "corpus.jsonl", lines)
    texts.write_jsonl(tmp_path / "held_out.jsonl", lines[:20])
    args = ["model", "out", "--data", "corpus.jsonl", "--held-out", "held_out.jsonl", "--tokens", "1024"]
    args += ["--seq-len", "64", "--batch-tokens", "256", "--tasks", "piqa", "--limit", "4"]
    args += ["--data-mirror", str(repo / "assets/mirror")]
    for setting in ("train.dtype=fp32", "optim.warmup_steps=1", "train.sample_tokens=0"):
        args += ["--set", setting]
    done = script(repo, *args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    out = tmp_path / "out"
    assert json.loads((out / "exported/config.json").read_text())["model_type"] == f"fcsd_{arch}"
    assert "PIQA" in (out / "run/eval/table.md").read_text()
    assert len((out / "run/metrics.jsonl").read_text().splitlines()) >= 1
    again = script(repo, *args, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before") == 5, "all but the evaluation, which finds its results"
    other = script(repo, *args, "--tokens", "2048", cwd=tmp_path)
    assert other.returncode == 2 and "was begun with other options" in other.stderr
