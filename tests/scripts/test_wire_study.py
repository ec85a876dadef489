"""The study of training through the wire: its commands are recipes, and its table follows from the ended runs."""

import json
from pathlib import Path

from scripts.wire_study import collect, folder, settings, table
from typer.testing import CliRunner

from fcsd.cli.main import app


def _ended(out: Path, name: str, seed: int, kl: float) -> None:
    run = folder(out, name, seed)
    (run / "final").mkdir(parents=True)
    lines = [{"step": 1, "held_out_kl": 9.0}, {"step": 2, "held_out_kl": kl}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_format_is_free_within_the_spread_of_bf16(tmp_path: Path) -> None:
    for seed, (exact, int8, int4) in enumerate([(0.10, 0.11, 0.20), (0.12, 0.12, 0.21)]):
        for name, kl in (("bf16", exact), ("int8", int8), ("int4:g128", int4)):
            _ended(tmp_path, name, seed, kl)
    folder(tmp_path, "int4:g128", 2).mkdir()  # a run that was cut off
    found = collect(tmp_path, ["bf16", "int8", "int4:g128", "int5"], [0, 1, 2])
    assert found["int4:g128"] == {"0": 0.20, "1": 0.21} and found["int5"] == {}
    _, _, bf16, int8, int4 = table(found).splitlines()
    assert bf16 == "| bf16 | 16 | 0.10000, 0.12000 | 0.11000 | - | - |"
    assert int8.endswith("| 8.25 | 0.11000, 0.12000 | 0.11500 | +0.00500 | yes |")
    assert int4.endswith("| 4.25 | 0.20000, 0.21000 | 0.20500 | +0.09500 | no |")


def test_every_run_is_a_recipe_that_is_taken(tmp_path: Path, repo: Path) -> None:
    for name, stochastic in (("bf16", "off"), ("int4", "gradients"), ("int8", "off")):
        words = settings("tiny", repo / "assets/teacher", tmp_path / "run", name, 1, stochastic)
        words[words.index("--output-dir") : words.index("--output-dir") + 2] = []
        result = CliRunner().invoke(app, ["recipes", "show", *words[1:]])
        assert result.exit_code == 0, result.output
        assert (f"dispatch: {name}" in result.stdout) == (name != "bf16")
        assert (f"stochastic: {stochastic}" in result.stdout) or name == "bf16" or stochastic == "off"
