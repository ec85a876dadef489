"""The benchmark of training steps runs on CPUs as it does on GPUs, and its ceilings follow from cover and wire."""

import gzip
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from benchmarks.infer import workload as infer
from benchmarks.train import scaling
from benchmarks.train.ceilings import Window, ceiling
from ranks import fcsd
from torch import nn
from typer.testing import CliRunner

from fcsd.bench.training import model
from fcsd.bench.training.table import headline
from fcsd.bench.training.workload import FUSED, Workload, usual_variants
from fcsd.cli import bench as cli
from fcsd.cli.main import app
from fcsd.config import load_recipe
from fcsd.errors import ConfigError
from fcsd.parallel import trace
from fcsd.parallel.cost import expected_groups
from fcsd.parallel.expert.levels import duplicates


def bench(*options, command=("train", "tiny"), size=None):
    return fcsd("bench", *command, "--layers", 2, "--micro-batch", 1, "--seq", 16, *options, size=size)


@pytest.mark.parametrize(("gpus", "fused"), [(True, 4), (False, 0)])
def test_the_default_variants_are_fused_where_training_fuses(monkeypatch, gpus, fused):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    assert sum(name.endswith(FUSED) for name in usual_variants()) == fused
    assert Workload("tiny", 2, 1, 16, variants=usual_variants()).fused is gpus


def test_a_ceiling_counts_what_fits_under_the_cover():
    windows = [
        Window("dispatch", "fwd", 0, cover=2.0, wire=1.0),  # hidden whole
        Window("combine", "fwd", 0, cover=0.5, wire=1.0),  # by half
        Window("dispatch", "fwd", 1, cover=2.0, wire=1.0),
        Window("combine", "fwd", 1, cover=0.0, wire=1.0),  # nothing follows it
        Window("combine", "bwd", 1, cover=0.0, wire=4.0),
    ]
    assert ceiling(windows, "fwd") == 2.5 / 4
    assert ceiling(windows, "fwd", without_last=True) == 2.5 / 3
    assert ceiling(windows, "bwd") == 0.0


def test_the_headline_names_the_ceiling_beside_the_share():
    found = trace.read(Path(__file__).parents[1] / "data" / "random.json.gz")
    text = headline([found], {"fwd": (0.9, 0.95), "bwd": (0.8, 0.85)})
    share = trace.overlaps([found])["all", "fwd"].share
    assert text.startswith(f"fwd: {share:.1%} hidden, at most 90.0% can be")
    assert "bwd: " in text and "of at most 85.0%" in text


class Router(nn.Module):
    """Chooses expert 0 for everything."""

    def __init__(self, experts: int, top_k: int) -> None:
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.zeros(experts)), top_k

    def forward(self, tokens: int) -> tuple[torch.Tensor, ...]:
        chosen = torch.zeros(tokens, self.top_k, dtype=torch.long)
        return chosen.float(), chosen, torch.zeros(len(self.weight), dtype=torch.long)


@pytest.mark.parametrize("experts, top_k, tokens", [(64, 6, 1024), (128, 8, 1000)])
def test_the_even_router_has_as_many_duplicates_as_a_random_one(experts, top_k, tokens, monkeypatch):
    router = Router(experts, top_k)
    block = SimpleNamespace(router=router, placement=SimpleNamespace(experts=experts))
    monkeypatch.setattr(model, "expert_blocks", lambda _: {"mlp": block})
    with model.evenly_routed(router):
        _, chosen, counts = router(tokens)
        assert router(tokens)[1] is chosen  # it is computed once
    assert chosen.flatten().bincount(minlength=experts).tolist() == counts.tolist()
    assert counts.max() - counts.min() <= top_k and all(len(set(token)) == top_k for token in chosen.tolist())
    for groups in (2, 4, 8):
        random = 1 - expected_groups(experts, top_k, groups) / top_k
        assert duplicates(chosen, experts, groups) == pytest.approx(random, abs=0.02)


def test_all_variants_are_timed_under_both_routers_on_two_ranks(tmp_path, monkeypatch):
    settings = {"NCCL_MAX_CTAS": "8", "TORCH_NCCL_HIGH_PRIORITY": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "16"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    options = ["--rounds", 1, "--steps", 2, "--dedup", "rank", "--dedup", "off"]
    wires = ["--wire", "int8:g16", "--wire", "dispatch=int4:g32"]
    done = bench(*options, *wires, "--out", tmp_path, "--trace", "--json", size=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "train.json").read_text())
    [point] = scaling.read([tmp_path / "train.json"])[1]
    assert (point.world, point.micro_batch) == (2, 1)
    assert settings.items() <= result["environment"]["settings"].items()
    assert (tmp_path / "rank-1.json.gz").exists()
    assert list(result["routers"]) == ["initialised", "uniform"]
    for found in result["routers"].values():
        wired = ["overlapped+int8:g16", "overlapped+dispatch=int4:g32"]
        plain = ["overlapped+off", *(name.replace("+", "+off+") for name in wired)]
        same = {"difference": 0.0, "spread": 0.0, "equal": True}  # gloo's order
        assert found["equality"] == dict.fromkeys(["overlapped", *wired, *plain], same)
        assert set(found["rows"]) == {"off", "rank"} and found["rows"]["rank"][0] < found["rows"]["off"][0]
        usual = ["stock", "standard", "eager-sync", "overlapped", "comm-free"]
        assert list(found["variants"]) == [*usual, *wired, *plain]
        sent = {name: times["sent_bytes"] for name, times in found["variants"].items()}
        assert sent["stock"] == sent["comm-free"] == 0  # stock does not count its bytes
        assert 0 < sent["overlapped+int8:g16"] < sent["overlapped+dispatch=int4:g32"] < sent["overlapped"]
        assert sent["overlapped+off"] > sent["overlapped"], "a row for each expert, and not for each rank"
        assert 0 < sent["overlapped+off+int8:g16"] < sent["overlapped+off+dispatch=int4:g32"] < sent["overlapped+off"]
        assert {len(times["step"]) for times in found["variants"].values()} == {2}
        calls = {(window["kind"], window["passes"], window["layer"]) for window in found["windows"]}
        kinds, passes = ("dispatch", "combine"), ("fwd", "bwd")
        assert calls == {(kind, each, k) for kind in kinds for each in passes for k in (0, 1)}
        assert set(found["ceiling"]) == set(passes)
    printed = done.stderr
    assert printed.index("can be hidden in fwd") < printed.index("of bound")
    assert "dispatch=int4:g32: dispatch int4 (5 bits a value)" in printed


def test_some_variants_of_a_recomputed_pass_without_an_engine():
    variants = ["standard-fused", "overlapped-fused"]
    options = ["--rounds", 1, "--steps", 1, "--variants", ",".join(variants), "--routers", "uniform", "--json"]
    done = bench(*options, "--recompute", "--no-optimizer")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["routers"]["uniform"]
    assert list(found["variants"]) == variants
    assert {name: held["difference"] for name, held in found["equality"].items()} == {"overlapped-fused": 0.0}


def test_one_command_takes_a_step_and_reads_its_traces(tmp_path):
    done = bench("--out", tmp_path, command=("trace", "--run", "tiny"), size=2)
    for rank in range(2):
        events = json.loads(gzip.decompress((tmp_path / f"rank-{rank}.json.gz").read_bytes()))["traceEvents"]
        ranges = {event["name"] for event in events if event["name"].startswith("fcsd::")}
        assert ranges >= {f"fcsd::{kind}.{each}.L1" for kind in ("dispatch", "combine") for each in ("fwd", "bwd")}
    [found] = json.loads((tmp_path / "train.json").read_text())["routers"].values()
    assert list(found["variants"]) == ["overlapped"]
    # The report is the one that files get: a CPU's trace has nothing on a device.
    assert done.returncode == 3, done.stderr
    assert f"{tmp_path / 'rank-0.json.gz'}: no collective of fcsd ran on a device" in done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "name either traces or"),
        (["t.json", "--run", "tiny"], "name either traces or"),
        (["--run", "tiny", "--gpus", "2"], "--trace writes its files into the directory --out"),
    ],
)
def test_a_trace_is_either_read_or_taken(words, message):
    result = CliRunner().invoke(app, ["bench", "trace", *words])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "wires, variants, message",
    [(("int9",), ("overlapped",), "2 to 8 bits"), (("int8",), ("standard",), "--wire needs a variant that overlaps")],
)
def test_a_wire_needs_a_known_format_and_a_variant(wires, variants, message):
    with pytest.raises(ConfigError, match=message):
        Workload("tiny", 2, 1, 16, wires=wires, variants=variants)


@pytest.mark.parametrize("field, name", [("shape", "huge"), ("variants", "fast"), ("routers", "random")])
def test_what_it_does_not_know_is_refused(field, name):
    given: dict[str, Any] = {"shape": "tiny", "layers": 2, "micro_batch": 1, "seq": 16}
    with pytest.raises(ConfigError, match=f"unknown {field.removesuffix('s')} '{name}'"):
        Workload(**given | {field: name if field == "shape" else (name,)})


@pytest.mark.parametrize(
    "options, message",
    [
        (["twice"], "unknown dedup 'twice'"),
        (["node"], "--node-size"),
        (["off", "--dedup", "node"], "--node-size"),
        (["off", "--dedup", "rank", "--variants", "standard"], "a second --dedup needs a variant that overlaps"),
    ],
)
def test_deduplication_that_it_cannot_do_is_refused(options, message):
    result = CliRunner().invoke(app, ["bench", "train", "tiny", "--dedup", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_the_script_of_all_cases_gives_commands_that_are_taken(tmp_path):
    stand_in = tmp_path / "python3"
    stand_in.write_text('#!/bin/sh\nshift 4\necho "$@"\n')
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    script = Path(__file__).parents[2] / "benchmarks/train/overlap.sh"
    said = subprocess.run([script, "4"], env=environment, capture_output=True, text=True, check=True).stdout
    train = typer.main.get_group(cli.app).commands["train"]
    for line in said.splitlines():
        given = train.make_context("train", line.split()).params
        load = Workload(given["shape"], given["layers"], 1, 1, variants=tuple(given["variants"].split(",")))
        assert (given["gpus"], given["trace"]) == (4, "slow_link" not in line) and load.overlapped[-1:] != ()
    assert len(said.splitlines()) == 7


def test_the_script_of_wires_gives_commands_that_are_taken(tmp_path):
    stand_in = tmp_path / "python3"
    stand_in.write_text(
        '#!/bin/sh\necho "$@"\n[ "$3" = distill ] || exit 0\ncp "$4" "$OUT"\n'
        'run=$(sed -n "s/^output_dir: //p" "$4")\nmkdir -p "$run"\ntouch "$run/metrics.jsonl"\n'
    )
    stand_in.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    root = Path(__file__).parents[2]
    done = subprocess.run([root / "benchmarks/comm/quantised.sh", "4"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    commands = typer.main.get_group(cli.app).commands
    modules = []
    for line in done.stdout.splitlines():
        words = line.split()
        if words[:3] == ["-m", "fcsd", "bench"]:
            given = commands[words[3]].make_context(words[3], words[4:]).params
            if words[3] == "train":
                load = Workload(
                    given["shape"], 1, 1, 1, variants=tuple(given["variants"].split(",")), wires=tuple(given["wires"]),
                    dedup=given["dedup"][0], more_dedups=tuple(given["dedup"][1:]),
                )  # fmt: skip
                assert {name.partition("+")[2] for name in load.changed} >= {"rank", "int8", "rank+int8"}
            else:
                kinds = tuple(given["reduce"].split(","))
                assert "quantised:int2:sr" in infer.Workload(given["model"], reduce=kinds).kinds
        elif "fcsd.bench." in line:
            (module,) = [word for word in words if word.startswith("fcsd.bench.")]
            modules.append(module.removeprefix("fcsd.bench."))
            path = root / module.replace(".", "/")
            text = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            options = [word for word in words[words.index(module) :] if word.startswith("--")]
            assert all(f'"{option}"' in text for option in options), line
    assert modules == ["hierarchy", "hierarchy", "transports", "all_reduce", "random_checkpoint", "formats"]
    for link in ("nvlink", "slow"):
        assert (tmp_path / f"swaps_{link}.jsonl").exists()
        recipe = load_recipe(str(tmp_path / f"{link}.yaml")).recipe
        assert recipe.parallel.placement.every == 10 and recipe.objective.kl == 0
    asked = subprocess.run(
        [root / "benchmarks/comm/quantised.sh", "4", "nothing"], env=environment, capture_output=True
    )
    assert asked.returncode == 2
