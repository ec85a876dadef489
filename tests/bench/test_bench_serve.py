"""``fcsd bench serve``: servers of a double of vLLM are asked over HTTP and ended."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ranks
import tiny
from ranks import start as start_process
from typer.testing import CliRunner

from fcsd.bench import runner
from fcsd.bench.serve import client, table, under_vllm
from fcsd.bench.serve.client import ask
from fcsd.bench.serve.model import cache_bytes, config_of, prompts_of, usual_wirings, weight_bytes, wiring_for
from fcsd.bench.serve.running import write_directory
from fcsd.bench.serve.variants import HOST_SUMS, Missing
from fcsd.bench.serve.workload import Workload
from fcsd.cli.command import ended_by_signals
from fcsd.cli.main import app, main
from fcsd.convert import convert_checkpoint
from fcsd.errors import ConfigError, FcsdError
from fcsd.models.build import unwired
from fcsd.models.wiring_block import Wiring
from fcsd.parallel.all_reduce.ways import read_ways
from fcsd.serve.vllm.communicator import ASKED

SMALL: dict[str, Any] = {
    "prompts": (8, 16),
    "arrivals": 2,
    "answer": 3,
    "batches": (1, 2),
    "loads": (0.5,),
    "rounds": 2,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repo: Path) -> Any:
    """Puts the double in the place of vLLM. The function that it returns reads what its servers were given."""
    double = repo / "tests/doubles/http_vllm"
    monkeypatch.syspath_prepend(str(double))
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("PYTHONPATH", str(double))
    monkeypatch.setenv("FCSD_DOUBLE", str(tmp_path / "asked"))
    monkeypatch.setattr(under_vllm, "require_vllm", lambda what, *, rewired: None)
    monkeypatch.setattr(under_vllm, "LOAD_SECONDS", 0)
    monkeypatch.setattr(under_vllm, "LEAST", 4)
    monkeypatch.setattr(under_vllm, "ENOUGH", 0)
    monkeypatch.setattr(client, "_TOGETHER", -1)  # the client of a busy host reads tokens of several steps at once
    asked = tmp_path / "asked"
    # In the order in which they were started, by the numbers of their processes, which begin anew after the largest;
    # those that start together write in any order.
    most, before = int(Path("/proc/sys/kernel/pid_max").read_text()), psutil.Popen(["true"])
    before.wait()

    def started(server: dict[str, Any]) -> int:
        return (server["processes"][0] - before.pid) % most

    yield lambda: sorted(map(json.loads, asked.read_text().splitlines()), key=started)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def ended(pid: int) -> bool:
    """Whether a process ends within 20 seconds. One that was killed lives on until the kernel has dealt with it."""
    try:
        process = psutil.Process(pid)
        for _ in range(200):
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.1)
    except psutil.NoSuchProcess:
        return True
    return False


def run(load: Workload, memory: int | None = None, write: Any = lambda found: None) -> dict[str, Any]:
    return under_vllm.bench(load, config_of(load.model, load.layers), memory, write)


def test_every_variant_is_a_server_that_is_timed_in_turns(asked, monkeypatch):
    started, await_answers = [], under_vllm.await_answers
    monkeypatch.setattr(
        under_vllm,
        "await_answers",
        lambda servers, until: started.append(list(servers)) or await_answers(servers, until),
    )
    loaded: list[int] = []  # the first port of each variant that gets a load

    def spy(ports: list[int], prompts: Any, new: int, at: Any = None, limit: float = 300) -> Any:
        loaded.extend(ports[:1] if at else [])
        return ask(ports, prompts, new, at, limit)

    monkeypatch.setattr(under_vllm, "ask", spy)
    budget = ("--max-num-batched-tokens", "300000")  # async TP of so small a model begins at 262144 tokens
    written: list[Any] = []  # what the file has of the load of ladder, whenever it is written

    def write(found: dict[str, Any]) -> None:
        written.append(found["variants"].get("ladder", {}).get("loads", {}).get("0.5", {}).get("requests"))

    monkeypatch.setattr(under_vllm, "_GRAPHED", 8)
    found = run(Workload("tiny-dense", 2, tp=4, options=budget, **SMALL), 80 << 30, write)
    assert any("--prompt-tokens 8 --concurrency 2" in note for note in found["notes"])
    variants, servers = found["variants"], asked()
    # The replicas are four servers and run alone, after those that share the GPUs.
    names = ["original", "ladder", "bound", "ladder, sums at once", "original, async TP"]
    names += ["original, symmetric memory by NCCL", "original, no custom all-reduce", "original, one replica a GPU"]
    names += ["original, pipeline stages"]
    assert list(variants) == names and len(servers) == 12
    ports = [server["arguments"][server["arguments"].index("--port") + 1] for server in servers]
    assert len(set(ports[:4])) == 4, "those that run at once have ports of their own"
    assert started[0] == names[:4], "those that share the GPUs start together"
    for name in ("original", "ladder", "bound", "ladder, sums at once", "original, one replica a GPU"):
        rounds = variants[name]["rounds"]
        turns = 2 if name == "original" else 1  # it takes turns with the alternatives, too
        assert {figure: len(times) for figure, times in rounds.items()} == {
            ("decode", 1): 2 * turns, ("decode", 2): 2 * turns, ("prefill", 8): 2 * turns, ("prefill", 16): 2 * turns,
            ("peak", 0): turns,
        }  # fmt: skip
        assert all(time > 0 for times in rounds.values() for time in times)
    under = {name: row["loads"].get("0.5") for name, row in variants.items()}
    assert under["ladder"].keys() == {"first_p50", "token_p50", "rate", "requests", "passes"}, "four have no p99"
    assert under["ladder"]["requests"] == 4 and len(under["ladder"]["passes"]) == 2
    assert list(dict.fromkeys(written)) == [None, 2, 4], "a run that is stopped leaves the passes that all had"
    order = [ports.index(str(port)) for port in loaded[:4]]
    assert order == [0, 1, 1, 0], "in turns, so that what the host does at a time hits no variant alone"
    replicas = under["original, one replica a GPU"]
    assert [replicas[key] for key in ("rate", "requests")] == [under["ladder"][key] for key in ("rate", "requests")]
    assert under["bound"] is under["ladder, sums at once"] is None, "another way to sum has no load, nor the bound"
    assert variants["original, no custom all-reduce"]["failed"] == "ValueError: no way to sum"
    assert variants["original, async TP"]["failed"] == "torch.OutOfMemoryError: no memory"
    symmetric = variants["original, symmetric memory by NCCL"]
    assert symmetric["failed"].startswith("vLLM left it out: Failed to compile NCCL") and not symmetric["rounds"]
    assert found["missing"]["fused all-reduce and norm"] == Missing("flashinfer is not installed")
    assert found["vllm"] == "0.28.0"

    original, ladder, bound = (server["config"] for server in servers[:3])
    assert original["architectures"] == ["LlamaForCausalLM"] and "fcsd" not in original
    assert Wiring.from_block(ladder["fcsd"]).layers == (0, 1) and ladder["model_type"] == bound["model_type"]
    arguments = servers[2]["arguments"]
    assert arguments[arguments.index("--additional-config") + 1] == '{"fcsd": {"reduce": "none"}}'
    assert {"--load-format", "dummy", "--skip-tokenizer-init", "--kv-cache-memory-bytes"} <= set(arguments)
    told = json.loads(servers[3]["arguments"][servers[3]["arguments"].index("--additional-config") + 1])
    assert told["fcsd"]["reduce"].endswith("/at-once-vllm.json")
    assert "--additional-config" not in servers[1]["arguments"]
    assert [variants[name].get("travels") for name in names[:4]] == [None, True, None, False]
    degrees = [server["arguments"][server["arguments"].index("--tensor-parallel-size") + 1] for server in servers]
    assert degrees == ["4"] * 7 + ["1"] * 5
    assert servers[-1]["arguments"][servers[-1]["arguments"].index("--pipeline-parallel-size") + 1] == "4"
    assert {server["config"]["max_position_embeddings"] for server in servers} == {4096}
    assert servers[5]["settings"]["VLLM_USE_NCCL_SYMM_MEM"] == "1"
    assert all(ended(pid) for server in servers for pid in server["processes"]), "no process is left"


def test_without_room_the_servers_run_one_after_the_other_and_time_bounds_them(asked, monkeypatch):
    monkeypatch.setattr(under_vllm, "alternatives", lambda machine, load, **_: ([], {}))
    more = {"loads": (), "options": ("--quantization", "fp8")}
    load = Workload("tiny", 2, wirings=("farskip",), tp=2, ep=True, **{**SMALL, **more})
    found = run(load)
    assert any("one after the other" in note for note in found["notes"])
    assert ("peak", 0) not in found["variants"]["farskip"]["rounds"]
    arguments = [server["arguments"] for server in asked()]
    assert all(words[words.index("--quantization") + 1] == "fp8" for words in arguments)
    assert all("--enable-expert-parallel" in words and "--kv-cache-memory-bytes" not in words for words in arguments)
    routed = [server["settings"]["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] for server in asked()]
    assert routed == ["uniform_random"] * 4, "all variants route alike"

    found = run(Workload("tiny", 2, **{**SMALL, "minutes": 1e-9, "arrivals": 1}))
    assert not found["variants"] and found["missing"]["original"].why.startswith("no time was left")
    assert not found["missing"]["original"].needless and found["missing"]["farskip"].needless, "it is no alternative"
    assert "farskip, always in flight" in found["missing"], "a prompt that comes alone is a step of its own"


def test_without_peer_access_sums_through_the_host_are_compared(asked, monkeypatch):
    prepared: list[int] = []
    fits = {ASKED: "host:int8:g64"}  # the model's rows have 64 values
    monkeypatch.setitem(HOST_SUMS, "host sums in int8", fits)
    monkeypatch.setattr(under_vllm, "through_host", lambda: True)
    monkeypatch.setattr(under_vllm, "prepare", prepared.append)
    monkeypatch.setattr(under_vllm, "alternatives", lambda machine, load, **_: ([], {}))
    found = run(Workload("tiny-dense", 2, tp=2, **{**SMALL, "loads": ()}), memory=80 << 30)
    assert prepared == [2], "the ways are timed before any server has the GPUs"
    wanted = {", host sums": "host", ", host sums in int8": "host:int8:g64"}
    for model in ("original", "ladder"):
        for told, way in wanted.items():
            assert found["variants"][f"{model}{told}"]["environment"]["FCSD_ALL_REDUCE"] == way
    settings = [server["settings"].get("FCSD_ALL_REDUCE") for server in asked()]
    assert sorted(filter(None, settings)) == ["host", "host", *["host:int8:g64"] * 2] and settings.count(None) == 4
    assert found["variants"]["original, host sums"]["role"] == "original", "a conversion is compared with it, too"
    assert "ladder, host sums" in table.ratios_of(found)


def test_sums_through_the_host_that_cannot_be_timed_keep_nothing_else_from_it(asked, monkeypatch):
    def prepare(ranks: int) -> None:
        raise ConfigError("the ways to sum cannot be timed: no NVRTC")

    monkeypatch.setattr(under_vllm, "through_host", lambda: True)
    monkeypatch.setattr(under_vllm, "prepare", prepare)
    monkeypatch.setattr(under_vllm, "alternatives", lambda machine, load, **_: ([], {}))
    found = run(Workload("tiny-dense", 2, tp=2, **{**SMALL, "loads": ()}), memory=80 << 30)
    assert "the ways to sum cannot be timed: no NVRTC" in found["notes"] and found["variants"]["original"]["rounds"]
    assert any("their groups do not divide rows of 64 values" in note for note in found["notes"])
    assert "original, host sums" in found["variants"] and "original, host sums in int8" not in found["variants"]


def test_tokens_that_come_in_one_burst_have_no_time(asked, monkeypatch):
    monkeypatch.setattr(under_vllm, "alternatives", lambda machine, load, **_: ([], {}))
    monkeypatch.setenv("FCSD_DOUBLE_BURST", "ladder")
    load = Workload("tiny-dense", 2, tp=2, **{**SMALL, "answer": 8})
    found = run(load, memory=80 << 30)
    original, ladder = found["variants"]["original"], found["variants"]["ladder"]
    assert ("decode", 1) in original["rounds"] and ("decode", 1) not in ladder["rounds"]
    assert ("prefill", 8) in ladder["rounds"], "the first token has its time"
    assert "token_p50" in original["loads"]["0.5"] and "token_p50" not in ladder["loads"]["0.5"]
    assert "ladder: decode 1 was not measured, because its tokens came in bursts" in table.text(found)
    assert "ladder: steps under load 0.5 were not measured" in table.text(found)
    assert ("decode", 1) not in table.ratios_of(found)["ladder"]


def test_imitated_slow_links_leave_no_other_way_for_sums(asked, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    load = Workload("tiny-dense", 2, tp=2, **{**SMALL, "minutes": 1e-9})
    with pytest.raises(ConfigError, match="leaves vLLM's custom all-reduce") as error:
        run(load)
    assert error.value.hint == "Add -- --disable-custom-all-reduce."
    load = replace(load, options=("--disable-custom-all-reduce",))
    with pytest.raises(ConfigError, match="--all-reduce symmetric is between 2 to 8 GPUs of one host"):
        run(replace(load, sums=("vllm", "symmetric")))
    missing = run(load)["missing"]
    assert "imitates GPUs" in missing["async TP"].why and "without it" in missing["no custom all-reduce"].why


def test_a_server_that_refuses_or_is_slow_is_an_error(asked, monkeypatch, tmp_path):
    from fcsd.bench.serve.running import await_answers, start, stop
    from fcsd.bench.serve.variants import Variant

    config_of("tiny-dense", 1).save_pretrained(tmp_path / "model")
    server = start(Variant("original", "original"), tmp_path / "model", [], tmp_path, [])
    try:
        ((_, outcome),) = await_answers({"original": server}, time.monotonic() - 1)
        assert isinstance(outcome, str) and "did not answer in time" in outcome
        ((name, seconds),) = await_answers({"original": server}, time.monotonic() + 60)
        assert name == "original" and isinstance(seconds, float) and seconds > 0
        first, second = ask(server.ports, prompts_of(2, 4, 99, seed=0), 3, at=[0.0, 0.05])
        assert (
            first.tokens == second.tokens == 3
            and first.early == second.early == 1
            and 0 < first.first < first.last
            and second.sent >= 0.05
        )
        monkeypatch.setattr(client, "_TOGETHER", 60)
        assert ask(server.ports, [[1]], 3)[0].early == 3, "events that follow each other at once are a burst, too"
        with pytest.raises(FcsdError, match=r"^the server answered 400: .*too long"):
            ask(server.ports, [[1] * 901], 2)
        with pytest.raises(FcsdError, match="were not answered within 0 s"):
            ask(server.ports, [[1]], 200, limit=0.05)
    finally:
        stop(server)
    with pytest.raises(FcsdError, match="closed the connection"):
        ask(server.ports, [[1]], 2)


def serve_for_long(double: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without it
    sys.path.insert(0, double)
    under_vllm.require_vllm = lambda what, *, rewired: None
    with ended_by_signals():
        under_vllm.bench(Workload("tiny-dense", 1, answer=30000), config_of("tiny-dense", 1), None, lambda found: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_no_process(asked, tmp_path, number):
    process = start_process(serve_for_long, os.environ["PYTHONPATH"])
    until = time.monotonic() + 120
    while not (tmp_path / "asked").is_file() and time.monotonic() < until:
        time.sleep(0.05)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(120)
    assert process.exitcode not in (0, None)
    assert all(ended(pid) for server in asked() for pid in server["processes"])


def stopped_after_a_figure(double: str, options: list[str], said: Path) -> None:
    real = runner.write

    def write(result: Any, *rest: Any) -> None:
        real(result, *rest)
        if any(row["rounds"] for row in result["variants"].values()):
            signal.raise_signal(signal.SIGTERM)

    sys.path.insert(0, double)
    under_vllm.require_vllm = lambda what, *, rewired: None
    client._TOGETHER = -1
    runner.write, sys.argv = write, ["fcsd", "bench", "serve", "tiny-dense", *options]
    with said.open("w") as sys.stderr:
        main()


def test_a_figure_is_written_at_once_and_kept_when_the_run_starts_again(asked, tmp_path):
    options = ["--depth=1", "--prompt-tokens=8", "--concurrency=1", "--answer=2", "--batches=1", "--rounds=1"]
    options += ["--loads=none", f"--out={tmp_path}"]
    for kept in (["serve.json"], ["serve.1.json", "serve.json"]):
        told = os.environ["PYTHONPATH"], options, tmp_path / "said"
        assert ranks.exit_code(stopped_after_a_figure, *told) == 143
        assert (tmp_path / "said").read_text().splitlines()[-1:] == ["error: stopped by SIGTERM"]
        assert sorted(path.name for path in tmp_path.glob("*.json")) == kept
        for name in kept:
            stored = json.loads((tmp_path / name).read_text())
            assert stored["complete"] is False and list(stored["variants"]["original"]["rounds"]) == ["decode 1"]


def test_the_whole_command_writes_its_result_its_picture_and_a_table(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(under_vllm, "alternatives", lambda machine, load, **_: ([], {}))
    words = ["bench", "serve", "tiny-dense", "--depth=2", "--prompt-tokens=8,16", "--concurrency=2", "--answer=3"]
    words += ["--batches=1,2", "--loads=none", "--gpus=2", "--rounds=1", "--heal-hours=1", "--json"]
    words += ["--all-reduce=vllm,quantised:int8:g64", "--out", str(tmp_path), "--table", str(tmp_path / "table.json")]
    words += ["--", "--max-num-batched-tokens", "8192"]
    monkeypatch.setattr(sys, "argv", ["fcsd", *words])
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.stderr
    stored = json.loads((tmp_path / "serve.json").read_text())
    assert stored["complete"] and stored["verdicts"]["ladder"].startswith("ladder ")
    wired = {"ladder", "ladder, by its table"}
    assert json.loads(found.stdout)["ratios"] == stored["ratios"] and stored["break_even_days"].keys() == wired
    keys = {"decode 1", "decode 2", "prefill 8", "prefill 16"}
    assert {name: row["rounds"].keys() for name, row in stored["variants"].items()} == dict.fromkeys(
        ("original", "ladder", "bound", "ladder, sums at once", "ladder, quantised:int8:g64",
         "ladder, quantised:int8:g64, sums at once", "ladder, by its table"), keys,
    )  # fmt: skip
    ways = read_ways(str(tmp_path / "table.json"), 2)
    assert ways.to_rows() == stored["tables"]["ladder"]
    assert ways.decode[0][0] == 1 and ways.prefill[0][0] == 16, "the tokens of a step"
    assert stored["command"].startswith("fcsd ") and stored["environment"]["packages"]["torch"]
    assert {"fcsd", "commit"} <= stored["environment"].keys()
    written = [(tmp_path / name).read_text() for name in ("serve.json", "table.json")]
    assert all(str(tmp_path) not in text and "--table table.json" in text for text in written), "names alone"
    assert (tmp_path / "serve.png").stat().st_size > 1000


def test_a_config_alone_is_enough_and_chooses_the_wiring(tmp_path):
    for arch, wiring in (("llama", "ladder"), ("qwen3_moe", "farskip")):
        model = tiny.model(arch)
        model.config.save_pretrained(tmp_path / arch)
        load = Workload(str(tmp_path / arch))
        config = config_of(load.model, None)
        assert usual_wirings(load, config) == (wiring,)
        assert weight_bytes(config) == 2 * sum(parameter.numel() for parameter in model.parameters())
    per_layer = tiny.config("gemma4_text")  # two heads of 16, or one of 32
    assert cache_bytes(per_layer, 10, 1) == 10 * 4 * 4 * 32 and cache_bytes(per_layer, 10, 2) == 10 * 4 * 2 * (32 + 64)
    config = config_of("tiny-dense", 1)
    path = write_directory("tiny-dense", config, wiring_for("ladder", config, 2), tmp_path / "m", 9)
    assert json.loads((path / "config.json").read_text())["max_position_embeddings"] == 4096
    path = write_directory(str(path), config, unwired(), tmp_path / "n", 5000)
    fields = json.loads((path / "config.json").read_text())
    assert fields["max_position_embeddings"] == 5000 and "fcsd" not in fields
    tiny.model("llama").save_pretrained(tmp_path / "base")
    convert_checkpoint(tmp_path / "base", tmp_path / "wired", wiring="ladder", layers="1-2", check=False)
    load = Workload(str(tmp_path / "wired"))
    assert usual_wirings(load, config_of(load.model, None)) == ("own",)
    with pytest.raises(ConfigError, match="own is the wiring of a converted model"):
        wiring_for("own", config, 2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["nothing"], "neither a shape nor a directory"),
        (["tiny", "--wirings", "lader"], "unknown wiring 'lader'"),
        (["tiny", "--loads", "2"], "a share of the peak"),
        (["tiny", "--loads", "half"], "not a list of numbers"),
        (["tiny", "--minutes", "0"], "--minutes is above 0"),
        (["tiny"], "fcsd bench serve needs vllm"),
        (["tiny", "--all-reduce", "nccl"], "unknown all-reduce backend 'nccl'"),
        (["tiny", "--all-reduce", "none"], "--all-reduce none gives wrong results"),
        (["tiny", "--out", __file__], "test_bench_serve.py is not a directory"),
        (["tiny", "--table", "t.txt"], "--table t.txt does not end in .json"),
        (["tiny", "--table", "no/t.json"], "--table no/t.json has no directory"),
        (["tiny", "--wirings", "ladder,farskip", "--table", "t.json"], "--table is the table of one wiring"),
        (["tiny", "--table", "t.json"], "how many tokens a step of vLLM has"),
        (["tiny", "--table", "t.json", "--", "--max-num-batched-tokens=8k"], "how many tokens a step of vLLM has"),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(options, said):
    found = CliRunner().invoke(app, ["bench", "serve", *options])
    assert found.exit_code == 2 and said in found.stderr.splitlines()[0]


@pytest.mark.parametrize("name", ["serve.json", "serve.png"])
def test_what_another_measurement_has_written_stays(name, tmp_path):
    (tmp_path / name).write_text("former")
    found = CliRunner().invoke(app, ["bench", "serve", "tiny", "--out", str(tmp_path)])
    assert found.exit_code == 2 and f"{tmp_path / name} exists" in found.stderr
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]
    assert (tmp_path / name).read_text() == "former"


def test_under_data_parallel_attention_there_is_no_bound(asked, monkeypatch):
    with pytest.raises(ConfigError, match="divided experts alone"):
        run(Workload("tiny", 2, dp=2, **SMALL))
    monkeypatch.setattr(under_vllm, "alternatives", lambda machine, load, **_: ([], {}))
    found = run(Workload("tiny", 2, dp=2, ep=True, **{**SMALL, "loads": ()}), memory=80 << 30)
    assert list(found["variants"]) == ["original", "farskip"]
    told = [server["arguments"] for server in asked()]
    assert len(told) == 2
    assert all(words[words.index("--data-parallel-size") + 1] == "2" for words in told)


def test_replicas_divide_experts_alone():
    config = config_of("tiny", 2)
    whole, both, divided = (weight_bytes(config, *given) for given in ((), (2,), (2, True)))
    assert both == 2 * whole and whole < divided < both
