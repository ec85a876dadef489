"""`benchmarks.train.step`: steps of training and of distillation run on CPUs as on GPUs, beside their bound."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu_device
import pytest
import torch
from benchmarks.train.step import model, variants, workload
from benchmarks.train.step.__main__ import app
from benchmarks.train.step.distillation import Distillation
from benchmarks.train.step.table import table
from benchmarks.train.step.training import Training
from benchmarks.train.step.workload import FUSED, WITH_TEACHER, Workload
from ranks import fcsd, on_ranks
from test_levels import duplicates, expected_groups
from torch import nn
from typer.testing import CliRunner

from fcsd.errors import ConfigError
from fcsd.launch.world import join_world
from fcsd.parallel.all_reduce import host as host_sums
from fcsd.parallel.transports import host

pytestmark = pytest.mark.lab


def bench(*options, size=None):
    asked = ["tiny", "--layers", 2, "--micro-batch", 1, "--seq", 16, *options]
    return fcsd(*asked, size=size, module="benchmarks.train.step")


@pytest.mark.parametrize(("gpus", "fused"), [(True, 4), (False, 0)])
def test_the_default_variants_are_fused_where_training_fuses(monkeypatch, gpus, fused):
    monkeypatch.setattr(workload.torch.cuda, "is_available", lambda: gpus)
    assert sum(name.endswith(FUSED) for name in Workload("tiny", 2, 1, 16).variants) == fused
    assert Workload("tiny", 2, 1, 16, teacher=True).variants == WITH_TEACHER


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
    wires = ["--quantised", "int8:g16", "--quantised", "dispatch=int4:g32"]
    done = bench(*options, *wires, "--out", tmp_path, "--trace", "--json", size=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "step.json").read_text())
    assert settings.items() <= result["environment"]["settings"].items()
    assert (tmp_path / "overlapped" / "rank-1.json.gz").exists()
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
        assert {len(times["forward_backward"]) for times in found["variants"].values()} == {2}
    assert "dispatch=int4:g32: dispatch int4 (5 bits a value)" in done.stderr


def test_some_variants_of_a_recomputed_pass_without_an_engine():
    variants = ["standard-fused", "overlapped-fused"]
    options = ["--rounds", 1, "--steps", 1, "--variants", ",".join(variants), "--routers", "uniform", "--json"]
    done = bench(*options, "--recompute", "--no-optimizer")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["routers"]["uniform"]
    assert list(found["variants"]) == variants
    assert {name: held["difference"] for name, held in found["equality"].items()} == {"overlapped-fused": 0.0}


def test_the_distillation_step_is_timed_in_one_group_of_processes(tmp_path):
    done = bench(
        "--teacher", "--rounds", 2, "--steps", 1, "--quantised", "int8:g16", "--out", tmp_path, "--json", size=2
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "step.json").read_text())
    [found] = result["routers"].values()
    names = [*WITH_TEACHER, "overlapped+int8:g16"]
    assert list(found["variants"]) == names and result["batch_tokens"] == 2 * 16
    for measured in found["variants"].values():
        assert len(measured["step"]) == len(measured["data_wait"]) == 2 and math.isfinite(measured["loss"])
        assert all(0 <= share <= 1 for share in measured["data_wait"])
    assert result["full_speed"] is None and "traces" not in found  # they need a GPU
    titles = table(found["variants"], result["batch_tokens"]).splitlines()[0]
    assert titles.split() == ["step", "ms", "tokens/s", "of", "bound", "data"], "no MFU, no trace and no peak memory"


def first_losses(*sets: str, names: tuple[str, ...] = ("overlapped", "blocking")) -> dict[str, float]:
    """The loss of a step under each variant; the learning rate is too small to change a weight."""
    load = Workload("tiny", 2, 1, 16, teacher=True, sets=("optim.lr=1e-30", *sets))
    steps, found = Distillation(load, join_world()), {}
    for name in names:
        steps.choose(name)
        steps._taken = 0  # the same rows under each variant
        found[name] = steps.several(1)["loss"]
    return found | {"models": len(steps.models)}


def test_a_step_with_adapters_is_that_of_one_model_under_each_variant():
    """Adapters begin where full training does, and the teacher in the same weights is wired for the variant."""
    full, adapters, whole = on_ranks(2, losses_of_both)[0]
    assert full.pop("models") == 2 and adapters.pop("models") == whole.pop("models") == 1
    assert adapters == full and adapters["overlapped"] == adapters["blocking"] > 0
    assert whole == pytest.approx(full, rel=1e-3)  # a small difference of fp32 values


def by_host(built: dict[int, Path]) -> list[Any]:
    """The losses of both models' steps and of one model's; a variant of the step of training, and how often it sent."""
    world, calls = join_world(), []
    shared = cpu_device.sums(built)
    exchange = shared.all_to_all_uneven

    def sums_of(group: Any) -> Any:
        return SimpleNamespace(all_to_all_uneven=lambda *given: (calls.append(1), exchange(*given)))

    def now(run: Any) -> Any:
        run()
        return SimpleNamespace(wait=lambda: None)

    with pytest.MonkeyPatch.context() as patch:
        for module in (host_sums, variants):
            patch.setattr(module, "sums_of", sums_of)
        for module in (host, variants):
            patch.setattr(module, "streams", lambda: (now, now))
        found: list[Any] = [first_losses(*sets, names=("overlapped", "by-host")) for sets in ((), (RANK,))]
        steps = len(calls)
        load = Workload("tiny", 2, 1, 16, variants=("overlapped",))
        object.__setattr__(load, "variants", ("overlapped", "by-host"))  # as where there are GPUs
        equality = Training(load, world).check()["equality"]
        return [*found, equality["by-host"]["equal"], min(steps, len(calls) - steps)]


def test_steps_by_the_host_are_those_of_overlapped_ones():
    full, adapters, equal, calls = on_ranks(2, by_host, cpu_device.libraries(2))[0]
    assert full["by-host"] == full["overlapped"] == adapters["by-host"] == adapters["overlapped"] > 0
    assert equal and calls > 0


RANK = "train.adapter.rank=4"


def losses_of_both() -> list[dict[str, float]]:
    return [first_losses(), first_losses(RANK), first_losses(RANK, "parallel.ep_size=1")]


def test_the_table_divides_by_the_bound_and_by_the_peak():
    variants = {
        "stock": {"step": [200.0], "forward_backward": [150.0], "sent_bytes": 0, "peak_gib": 4.0},
        "overlapped-fused": {"step": [99.0, 100.0, 104.0], "sent_bytes": 2**20, "peak_gib": 3.0},
        "comm-free-fused": {"step": [80.0], "sent_bytes": 0, "peak_gib": 3.0},
    }
    account = {
        "total": 4.0,
        "phases": {"student": {"exposed": 1.0, "idle": 0.5}, "backward": {"exposed": 1.0, "idle": 0}},
    }
    lines = table(variants, 1000, full_speed=40_000, accounts={"overlapped-fused": account}).splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert cells["overlapped-fused"] == [
        "-", "100.0", "±", "2.5", "2.000", "10,000", "80.0%", "25.0%", "50.0%", "12.5%", "3.0", "1.0"
    ]  # fmt: skip
    assert cells["stock"][:7] == ["150.0", "±", "0.0", "200.0", "±", "0.0", "1.000"]
    assert "x std" not in lines[0], "the standard wiring was not timed"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"formats": ("int9",), "variants": ("overlapped",)}, "2 to 8 bits"),
        ({"formats": ("int8",), "variants": ("standard",)}, "--quantised needs a variant that overlaps"),
        ({"shape": "huge"}, "unknown shape 'huge'"),
        ({"shape": "huge", "teacher": True}, "huge: neither a shape"),
        ({"variants": ("fast",)}, "unknown variant 'fast'"),
        ({"variants": ("stock",), "teacher": True}, "unknown variant 'stock'"),
        ({"routers": ("random",)}, "unknown router 'random'"),
        ({"recompute": True, "teacher": True}, "are for steps without --teacher"),
        ({"dedup": "rank", "teacher": True}, "are for steps without --teacher"),
        ({"sets": ("optim.lr=1",)}, "--set and --accumulation are for steps with --teacher"),
        ({"variants": ("by-host-fused",)}, "by-host needs GPUs"),
        ({"variants": ("by-host",), "teacher": True}, "by-host needs GPUs"),
        ({"accumulation": 2}, "--set and --accumulation are for steps with --teacher"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, message, monkeypatch):
    monkeypatch.setattr(workload.torch.cuda, "is_available", lambda: False)
    given: dict[str, Any] = {"shape": "tiny", "layers": 2, "micro_batch": 1, "seq": 16}
    with pytest.raises(ConfigError, match=message):
        Workload(**given | changes)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--dedup", "twice"], "unknown dedup 'twice'"),
        (["--out", __file__], "test_bench_step.py is not a directory"),
        (["--dedup", "node"], "--node-size"),
        (["--dedup", "off", "--dedup", "node"], "--node-size"),
        (["--dedup", "off", "--dedup", "rank", "--variants", "standard"], "a second --dedup needs a variant"),
        (["--trace"], "--trace writes its files into the directory --out"),
        (["--trace", "--out", "x", "--variants", "standard"], "none of the variants overlaps"),
    ],
)
def test_options_that_it_cannot_follow_are_refused_in_one_line(options, message):
    result = CliRunner().invoke(app, ["tiny", *options])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "name"), [([], "step.json"), (["--trace"], "overlapped/rank-0.json.gz")], ids=["result", "trace"]
)
def test_what_another_measurement_has_written_stays(options, name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("former")
    found = CliRunner().invoke(app, ["tiny", *options, "--out", str(tmp_path)])
    assert found.exit_code == 2 and f"{tmp_path / name.partition('/')[0]} exists" in found.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "former"
