"""``python -m benchmarks.infer --engine vllm``: what is refused, what vLLM is asked, and what its times become."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiny
import torch
from benchmarks.infer import vllm_engine
from benchmarks.infer import workload as timing
from benchmarks.infer.__main__ import app
from benchmarks.infer.table import table
from benchmarks.infer.vllm_process import Answer
from benchmarks.infer.workload import Workload
from typer.testing import CliRunner

from fcsd import extras
from fcsd.convert import convert_checkpoint
from fcsd.errors import ConfigError, FcsdError
from fcsd.models.wiring_block import Wiring

pytestmark = pytest.mark.lab

VLLM: dict[str, Any] = {"engine": "vllm", "dtype": "float32", "prompt": 8, "new": 3, "rounds": 2}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Puts a double in the place of vLLM. The function that it returns reads what the double was asked."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "doubles" / "async_vllm"))  # engines get this path, too
    monkeypatch.setenv("FCSD_DOUBLE", str(tmp_path / "asked"))
    checked: list[bool] = []
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda what, *, rewired: checked.append(rewired))

    def read(key: str) -> list[Any]:
        assert checked, "the command checks that vLLM is installed"
        return [line for line in map(json.loads, (tmp_path / "asked").read_text().splitlines()) if key in line]

    return read


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--engine", "fast"], "unknown engine 'fast'"),
        (["--wirings", "standard,sideways"], "unknown wiring 'sideways'"),
        (["--engine", "vllm", "--no-compile"], "--no-compile is for --engine own"),
        (["--engine", "vllm", "--attention", "split"], "--attention is for --engine own"),
        (["--attention", "flash"], "unknown attention 'flash'"),
        (["--bounds", "parallel"], "unknown wiring for a bound 'parallel'"),
        (["--tp", "one"], "not a list of numbers"),
        (["--engine", "vllm", "--no-nvlink"], "--no-nvlink needs --engine own"),
        (["--engine", "vllm", "--reduce", "vllm,nccl"], "unknown all-reduce backend 'nccl'"),
        (["--engine", "vllm", "--wirings", "standard,lader"], "unknown wiring 'lader'"),
        (["--engine", "vllm", "--tp", "2", "--wirings", "desync-2x"], "needs a dense architecture"),
        (["--engine", "vllm"], "python -m benchmarks.infer --engine vllm needs vllm: pip install 'fcsd[vllm]'"),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(options, said, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "vllm" else name)
    monkeypatch.setattr(vllm_engine, "started", lambda *_: pytest.fail("an engine was started"))
    found = CliRunner().invoke(app, ["tiny", *options])
    assert found.exit_code == 2
    assert said in found.stderr.splitlines()[0] and found.stderr.startswith("error: ")


def test_every_engine_has_its_own_kinds_of_reduction():
    assert Workload("tiny").kinds == ("nccl", "none") and Workload("tiny", engine="vllm").kinds == ("vllm", "none")
    with pytest.raises(ConfigError, match="unknown all-reduce backend 'vllm'"):
        Workload("tiny", reduce=("vllm",))


def test_the_phases_of_a_batch():
    answer = Answer([(0.5, 1.25), (0.75, 1.75)], preempted=0)  # the second prompt is prefilled in a later step
    assert vllm_engine.phases(answer, 5) == (750, 250)


def test_every_variant_is_an_engine_of_its_own(lines, tmp_path, capsys):
    load = Workload(
        "tiny-dense", layers=2, degrees=(1, 2), batches=(1, 4), wirings=("standard", "ladder", "desync-2x"),
        reduce=("auto", "quantised:int4", "none"), bounds=("ladder",), **VLLM,
    )  # fmt: skip
    found = vllm_engine.bench(load, tmp_path / "out")
    variants = [(1, "standard", "vllm"), (1, "ladder", "vllm"), (2, "standard", "vllm")]
    variants += [(2, "ladder", kind) for kind in ("auto", "quantised:int4", "none")]
    variants += [(2, "desync-2x", kind) for kind in ("auto", "quantised:int4")]
    assert [(chosen["tp"], chosen["wiring"], chosen["reduce"]) for chosen in found["vllm"]] == variants
    assert found["vllm"][0].items() >= {"version": "0.28.0", "runner": "v2", "graphs": "FULL", "budget": 8192}.items()

    engines = lines("arguments")
    for (degree, name, kind), engine in zip(variants, engines, strict=True):
        arguments, config = engine["arguments"], engine["config"]
        assert arguments.items() >= {
            "dtype": "float32", "load_format": "dummy", "tensor_parallel_size": degree, "enforce_eager": False,
            "enable_prefix_caching": False, "enable_expert_parallel": False, "max_model_len": 11, "max_num_seqs": 4,
        }.items()  # fmt: skip
        assert config["num_hidden_layers"] == 2
        if name == "standard":
            assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
            assert "fcsd" not in config and arguments["additional_config"] == {}
            continue
        assert (config["model_type"], config["architectures"]) == ("fcsd_llama", ["FcsdLlamaForCausalLM"])
        wiring = Wiring.from_block(config["fcsd"])
        assert (wiring.name, wiring.layers, wiring.tp_degree) == (name, (0, 1), 2 if name == "desync-2x" else 1)
        assert arguments["additional_config"] == {"fcsd": {"reduce": kind}}
        assert ended(engine["worker"]), "no process of an engine is left"
    assert len(lines("shutdown")) == 6, "the engines that started were told to end"
    asked = lines("prompt")[:3]  # a warm-up and two rounds
    assert {line["new"] for line in asked} == {3} and len({line["name"] for line in asked}) == 3
    generator = torch.Generator().manual_seed(1)  # the prompts of fcsd's engine
    assert [line["prompt"] for line in asked] == torch.randint(256, (1, 8), generator=generator).tolist() * 3

    rows = found["rows"]
    assert json.loads((tmp_path / "out" / "infer.json").read_text())["rows"] == rows
    assert (tmp_path / "out" / "infer.png").stat().st_size > 1000
    assert [(row["tp"], row["batch"], row["wiring"], row["reduce"]) for row in rows] == [
        (tp, batch, *variant) for tp in (1, 2) for batch in (1, 4) for degree, *variant in variants if degree == tp
    ]
    for row in rows:
        assert row["exact"] == (row["reduce"] != "none")
        assert row["out_of_memory"] == (row["reduce"] == "quantised:int4" or (row["tp"], row["batch"]) == (1, 4))
        if not row["out_of_memory"]:
            same = [other for other in rows if (other["tp"], other["batch"]) == (row["tp"], row["batch"])]
            assert row["decode_times_standard"] == pytest.approx(same[0]["decode_ms"] / row["decode_ms"])
            assert (row["decode_of_bound"] is not None) == (row["tp"] == 2 and row["wiring"] == "ladder")
            assert [len(times) for times in row["rounds"].values()] == [2, 2]
    printed = capsys.readouterr().err
    assert table(rows) in printed and "include its scheduler" in printed


def test_a_checkpoint_is_timed_with_its_weights(lines, tmp_path):
    tiny.model("qwen3_moe").save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "wired", wiring="farskip", layers="1-2", check=False)
    before = (tmp_path / "wired" / "config.json").read_text()
    load = Workload(
        str(tmp_path / "wired"), wirings=("standard", "own", "ladder"), experts="whole", graphs=False, **VLLM
    )
    found = vllm_engine.bench(load)
    assert [row["wiring"] for row in found["rows"]] == ["standard", "own", "ladder"]
    standard, own, ladder = (engine["config"] for engine in lines("arguments"))
    assert (
        standard["architectures"] == ["Qwen3MoeForCausalLM"] and "fcsd" not in standard and "auto_map" not in standard
    )
    assert Wiring.from_block(own["fcsd"]) == Wiring("farskip", (1, 2))
    assert Wiring.from_block(ladder["fcsd"]).layers == tuple(range(ladder["num_hidden_layers"]))
    assert own["model_type"] == ladder["model_type"] == "fcsd_qwen3_moe"
    weights = str((tmp_path / "wired" / "model.safetensors").resolve())
    for engine in lines("arguments"):
        assert engine["files"]["model.safetensors"] == weights
        arguments = engine["arguments"]
        assert arguments["load_format"] == "auto" and arguments["enable_expert_parallel"] and arguments["enforce_eager"]
    assert (tmp_path / "wired" / "config.json").read_text() == before


def test_a_failure_of_vllm_names_its_cause_and_leaves_what_was_measured(lines, tmp_path, capsys):
    load = Workload("tiny-dense", layers=2, degrees=(2,), reduce=("symmetric",), **VLLM)
    with pytest.raises(FcsdError, match=r"^vLLM failed: ValueError: no window$"):
        vllm_engine.bench(load, tmp_path / "out")
    assert "RuntimeError: a worker failed" in capsys.readouterr().err
    with pytest.raises(FcsdError, match=r"^vLLM failed: its process ended$"):
        vllm_engine.bench(replace(load, wirings=("ladder",), reduce=("quantised:int5",)))
    (row,) = json.loads((tmp_path / "out" / "infer.json").read_text())["rows"]
    assert row["wiring"] == "standard" and row["decode_ms"] > 0
    assert all(ended(engine["worker"]) for engine in lines("arguments"))


def test_the_table_names_the_bits_of_quantised_kinds() -> None:
    load = Workload("tiny-dense", reduce=("nccl", "quantised:int2:sr"))
    times = {"prefill": [2.0], "decode": [1.0]}
    rows = [timing.row(load, 2, 1, "standard", kind, times) for kind in load.kinds]
    for one in rows:
        timing.compare(one, rows)
    assert table(rows).splitlines()[-1] == "on the wire: int2:sr 4 bits per value"
    assert "on the wire" not in table(rows[:1])


def test_a_model_that_does_not_exist_is_refused():
    found = CliRunner().invoke(app, ["nothing"])
    assert found.exit_code == 2 and "neither a shape nor a checkpoint" in found.stderr


def test_attention_that_the_model_cannot_have_is_refused(tmp_path, repo):
    tiny.model("gpt_oss").save_pretrained(tmp_path)
    command = [sys.executable, "-m", "benchmarks.infer", str(tmp_path), "--attention", "split"]
    done = subprocess.run(command, cwd=repo, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "cannot use --attention split: its attention is eager" in done.stderr
