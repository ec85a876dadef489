"""``fcsd advise``: what it weighs, what it chooses, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fcsd.advise import measure, sums
from fcsd.advise.cards import card_of
from fcsd.advise.host import host_of
from fcsd.advise.losses import losses, nearest
from fcsd.advise.speed import STANDARD, Load, Served, server_of
from fcsd.advise.verdict import Way, _command, _nowhere_slower, advise, to_text
from fcsd.bench.shapes import SHAPES
from fcsd.cli.main import app
from fcsd.errors import ConfigError, DoesNotFitError
from fcsd.models.selection import select_layers
from fcsd.models.wiring_block import Wiring
from fcsd.plan import Hardware, plan_setup
from fcsd.plan.model import MetaModel
from fcsd.plan.setup import Setup, with_parts

LOAD = Load()


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a Llama-3 70B."""
    folder = tmp_path_factory.mktemp("large")
    SHAPES["llama3-70b"](80).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config of a Llama-3 8B."""
    folder = tmp_path_factory.mktemp("small")
    SHAPES["llama3-8b"](32).save_pretrained(folder)
    return str(folder)


def quantised(model: str, folder: Path, **config: object) -> str:
    fields = json.loads(Path(model, "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return str(folder)


def test_a_model_that_fits_one_gpu_is_copied(small: str) -> None:
    found = advise(small, host_of(2, "H100", None), LOAD)
    assert found.chosen.kind == "replicas" and found.command.endswith("--data-parallel-size 2")


def test_without_peer_access_sums_through_the_host_are_a_trial(large: str, tmp_path: Path) -> None:
    packed = quantised(large, tmp_path, quant_method="gptq", bits=8, group_size=128)
    found = advise(packed, host_of(2, "L40S", None), LOAD)
    assert found.chosen.kind == "stock" and found.trial is not None
    assert found.trial.endswith(
        f"--gpus 2 --all-reduce host --prompt-tokens {LOAD.prompt_tokens} --concurrency {LOAD.concurrency}"
    ) and "Worth a trial" in to_text(found)
    assert any(way.kind == "conversion" and way.gain > found.chosen.gain for way in found.ways)


def test_sums_whose_groups_do_not_divide_the_rows_are_no_way(tmp_path: Path) -> None:
    SHAPES["gpt-oss-20b"](24).save_pretrained(tmp_path)
    names = {way.name for way in advise(str(tmp_path), host_of(2, "L40S", None), LOAD).ways}
    assert "sums by host" in names and "sums by host:int8" not in names


def test_over_nvlink_stock_is_kept(large: str) -> None:
    found = advise(large, host_of(2, "H200", None), LOAD)
    assert found.chosen.kind == "stock" and found.trial is None and all("sums by" not in way.name for way in found.ways)


def test_a_speed_that_is_asked_for_names_the_simplest_way(large: str, tmp_path: Path) -> None:
    packed, host = quantised(large, tmp_path, quant_method="awq", bits=4, group_size=128), host_of(4, "RTX 4090", None)
    gains = {way.name: way.gain for way in advise(packed, host, LOAD).ways}
    wanted = (gains["sums by host:int8"] + max(gains.values())) / 2
    found = advise(packed, host, LOAD, speed=wanted)
    assert found.chosen.kind == "conversion" and found.chosen.gain >= wanted and "fcsd convert" in found.command
    chosen = found.command.split("--layers ")[1].split()[0]
    assert len(select_layers(chosen, 100)) == round(100 * found.chosen.share), "convert takes what is advised"
    never = advise(packed, host, LOAD, speed=9.0)
    assert never.chosen.kind == "stock" and "9.00x" in never.why


def test_stages_of_two_gpus_sum_through_the_host_where_there_are_four(large: str) -> None:
    four, six = (advise(large, host_of(count, "L40S", None), LOAD).ways for count in (4, 6))
    stages, pairs = (way for way in four if way.kind == "stages")
    assert stages.served.step > pairs.served.step > four[0].served.step
    assert _command(stages, large, host_of(4, "L40S", None), LOAD) == (
        f"vllm serve {large} --pipeline-parallel-size 4 --max-num-batched-tokens 2048"
    )
    assert _command(pairs, large, host_of(4, "L40S", None), LOAD) == (
        f"fcsd serve {large} --gpus 2 --all-reduce host -- --pipeline-parallel-size 2 --max-num-batched-tokens 2048"
    )
    assert [way.name for way in six if way.kind == "stages"] == [
        "6 pipeline stages",
        "3 stages of 2 GPUs, sums by host",
    ]


@pytest.mark.parametrize(("gpu", "chunks"), [("H200", 4), ("L40S", 16), ("A100 80GB", 16)])
def test_prompts_are_read_in_the_steps_that_vllm_chooses_for_a_gpu(large: str, gpu: str, chunks: int) -> None:
    server = advise(large, host_of(8, gpu, None), LOAD).server
    assert server._chunks(LOAD.concurrency) == (chunks, LOAD.concurrency * LOAD.prompt_tokens / chunks)


def test_what_does_not_fit_says_how_many_gpus_it_takes(large: str) -> None:
    with pytest.raises(DoesNotFitError, match="141 GB") as raised:
        advise(large, host_of(4, "RTX 4090", None), LOAD)
    assert raised.value.hint is not None and raised.value.hint.startswith("It takes 8 ")


def test_the_command_has_the_exit_codes_and_json_of_others(small: str, large: str) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["advise", small, "--gpu", "L40S", "--gpus", "2", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["chosen"] == "2 replicas"
    assert runner.invoke(app, ["advise", large, "--gpu", "L4", "--gpus", "2"]).exit_code == 8
    assert runner.invoke(app, ["advise", small, "--gpu", "Voodoo 2"]).exit_code == 2
    four = ["advise", large, "--gpu", "L40S", "--gpus", "4", "--json", "--speed"]
    found = json.loads(runner.invoke(app, [*four, "1.05x"]).stdout)
    assert found["chosen"] != "4 pipeline stages"  # their steps are slower
    assert runner.invoke(app, [*four, "0.9x"]).exit_code == 2


def test_the_text_is_one_screen(large: str) -> None:
    lines = to_text(advise(large, host_of(2, "H200", None), LOAD, price=2.5)).splitlines()
    assert len(lines) <= 40


def test_a_sum_lies_between_its_neighbours_and_never_above_stock() -> None:
    table = sums.elsewhere(False, 64)
    low, middle, high = (table.seconds("stock", 2, size) for size in (2**20, 1.4 * 2**20, 2**21))
    assert low < middle < high
    for size in (2**13, 2**20, 2**28):
        assert table.of("host", 4)(size) <= table.seconds("stock", 4, size)
    slow = sums.elsewhere(False, 32)
    assert slow.seconds("stock", 2, 2**13) == table.seconds("stock", 2, 2**13)
    assert 1.8 < slow.seconds("stock", 2, 2**26) / table.seconds("stock", 2, 2**26) < 2


def test_a_wiring_is_never_slower_than_sums_at_once_and_never_faster_than_no_sums(large: str) -> None:
    model = MetaModel(large)
    server = server_of(model, card_of("H100"), LOAD)
    slow = sums.elsewhere(False, 64).of("stock", 2)
    bound = server.tensor_parallel(2, STANDARD, lambda size: 0.0)
    stock = server.tensor_parallel(2, STANDARD, slow)
    ladder = server.tensor_parallel(2, Wiring("ladder", tuple(range(80))), slow)
    assert bound.step < ladder.step < stock.step and bound.first < ladder.first < stock.first


@pytest.mark.parametrize(("shape", "depth"), [("llama3-70b", 80), ("llama3-1b", 16), ("deepseek-v2-lite", 27)])
def test_healing_takes_the_hours_of_a_plan(shape: str, depth: int, tmp_path: Path) -> None:
    """The first half of the layers on H200s, in micro-batches so large that the plan's constants hardly count."""
    SHAPES[shape](depth).save_pretrained(tmp_path)
    found, model = advise(str(tmp_path), host_of(8, "H200", None), LOAD).heal, MetaModel(str(tmp_path))
    divided = model.numbers.experts > 0
    run = Setup(
        world=8,
        micro_batch_size=64,
        seq_len=4096,
        batch_tokens=8 * 64 * 4096,
        tokens=100_000_000,
        recompute=True,
        ep_size=8 if divided else 1,
        teacher="sharded" if divided else "replicated",
    )
    half = select_layers(f"first:{(depth + 1) // 2}", depth)
    run = with_parts(run, model.parts(None, ["converted"], Wiring("ladder", half)))
    planned = plan_setup("run", model, model.numbers, run, Hardware(gpus=8)).speed
    assert found.gpu == "H200"
    assert found.gpu_hours == pytest.approx(8 * planned.parts["forward and backward"], rel=0.02)


_FOUR = {"num_bits": 4, "strategy": "group", "group_size": 128}
_OF_MLP = {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
_OF_REST = {"targets": ["Linear"], "weights": _FOUR}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8 + 24 / 128),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8.0),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": _OF_REST}},
            4.125,
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        # three matrices of the MLP have 82.3 % of a layer's parameters
        (
            {
                **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
                "config_groups": {"group_0": {**_OF_MLP, "format": "float-quantized"}, "group_1": _OF_REST},
            },
            0.8235 * 8 + 0.1765 * 4.125,
        ),
        # attention alone is quantised
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["mlp"]}, 13.909),
    ],
)
def test_bits_of_quantised_weights(large: str, config: dict[str, object], bits: float, tmp_path: Path) -> None:
    model = MetaModel(quantised(large, tmp_path, **config))
    assert model.numbers.bits == pytest.approx(bits, abs=0.01)
    layers, rest = 80 * 855_654_400, 2 * 128_256 * 8192 + 8192
    assert model.numbers.stored == pytest.approx(layers * model.numbers.bits / 8 + 2 * rest, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80 GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80 GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
    ],
)
def test_cards_by_the_names_of_the_driver(name: str, card: str) -> None:
    assert card_of(name).name == card and card_of(name).known


def test_losses_are_nearest_by_kind_and_size() -> None:
    assert {row.wiring for row in losses()} >= {"farskip", "ladder"}
    assert nearest(109e9, True)[0].model == "Llama-4-Scout" and nearest(2e8, False)[0].model.startswith("Gemma")
    half = next(row for row in nearest(30e9, True) if row.share == 0.5)
    assert half.share == 0.5 and half.lost("MMLU") == pytest.approx(2.7) and half.mean == pytest.approx(1.3)


def test_a_machine_file_has_its_own_sums(tmp_path: Path, large: str) -> None:
    file = tmp_path / "machine.json"
    link = {"latency_us": 20.0, "gb_per_s": 10.0}
    fields = {"gpu": "NVIDIA L40S", "gpus_per_node": 4, "near": link}
    file.write_text(json.dumps(fields))
    ring = host_of(None, None, file)
    assert ring.gpus == 4 and ring.sums.seconds("stock", 4, 1e6) == pytest.approx(20e-6 + 1.5e6 / 10e9, rel=0.05)
    file.write_text(json.dumps(fields | {"all_reduce_us": {"4": {"1000": 30.0, "1000000": 900.0}}}))
    measured = host_of(None, None, file)
    assert measured.sums.seconds("stock", 4, 1e6) == pytest.approx(900e-6)
    assert "measured sums" in to_text(advise(large, measured, LOAD))


def test_other_ways_of_a_machine_file_are_weighed(tmp_path: Path, large: str) -> None:
    file = tmp_path / "machine.json"
    fields = {"gpu": "NVIDIA L40S", "gpus_per_node": 4, "near": {"latency_us": 20.0, "gb_per_s": 10.0}}
    stock = {"4": {"1000": 30.0, "100000000": 90000.0}}
    faster = {"4": {"1000": 20.0, "100000000": 50000.0}}
    setting = "NCCL_SHM_USE_CUDA_MEMCPY=1"
    file.write_text(json.dumps(fields | {"all_reduce_us": stock, "sums_us": {setting: faster}}))
    host = host_of(None, None, file)
    (way,) = (way for way in advise(large, host, LOAD).ways if way.kind == "sums")
    assert way.name == f"sums by {setting}" and way.gain > 1
    assert _command(way, large, host, LOAD) == f"{setting} vllm serve {large} --tensor-parallel-size 4"


def test_what_servers_were_timed_with_takes_the_place_of_predictions(tmp_path: Path, large: str, monkeypatch) -> None:
    """The two commands that measure are replaced; what they write is read."""
    asked: list[tuple[str, ...]] = []

    def run(*words: str) -> None:
        asked.append(words)
        out = Path(words[words.index("--out") + 1])
        if words[0] == "links":
            near = {"latency_us": 20.0, "gb_per_s": 10.0}
            fields = {"gpu": "NVIDIA L40S", "gpus_per_node": 4, "near": near, "all_reduce_us": {"4": {"1000": 30.0}}}
            table = {"sums_us": {"host": {"4": {"1000": 20.0}}}}
            out.write_text(json.dumps(fields | table))
            return
        rows = {
            "original": (40.0, 900.0, "original", None),
            "original, host sums": (30.0, 800.0, "original", None),
            "original, pipeline stages": (80.0, 700.0, "original", None),
            "original, stages of two GPUs, host sums": (60.0, 750.0, "original", None),
            "ladder": (36.0, 700.0, "wired", "ladder"),
            "ladder, host sums": (25.0, 600.0, "wired", "ladder"),
            "bound": (20.0, 500.0, "bound", "ladder"),
        }
        variants = {
            name: {"role": role, "wiring": wiring, "rounds": {"decode 16": [step] * 3, "prefill 2048": [first] * 3}}
            for name, (step, first, role, wiring) in rows.items()
        }
        variants["original, one replica a GPU"] = {"role": "original", "wiring": None, "rounds": {"decode 16": [1.0]}}
        (out / "serve.json").write_text(json.dumps({"variants": variants}))

    monkeypatch.setattr(measure, "_run", run)
    host, times = measure.measure(Path(large), host_of(4, "L40S", None), LOAD)
    assert [words[0] for words in asked] == ["links", "serve"] and host.sums.measured
    assert "--concurrency" in asked[1] and "4" in asked[1]
    found = advise(large, host, LOAD, measured=times)
    told = {way.name: way for way in found.ways if way.source == "measured here"}
    names = ["stock vLLM, TP 4", "4 pipeline stages", "2 stages of 2 GPUs, sums by host", "sums by host"]
    names += ["ladder, all of the layers"]
    assert list(told) == names, "replicas have no time of first tokens"
    assert told["ladder, all of the layers"].served == Served(0.025, 0.6)
    assert told["sums by host"].gain == pytest.approx((40 / 30 * 900 / 800) ** 0.5)
    assert found.chosen == told["sums by host"] and found.trial is None and "measured here" in to_text(found)
    assert all(way.gain > 0 for way in found.ways if way.source != "measured here")


def test_gpus_are_named_once() -> None:
    with pytest.raises(ConfigError, match="--gpu and --machine"):
        host_of(2, "L4", Path("machine.json"))


def test_a_way_is_slower_if_either_its_steps_or_its_first_tokens_are() -> None:
    def way(step: float, first: float) -> Way:
        return Way("", "sums", Served(step, first), 1.0, "")

    found = [_nowhere_slower(way(*served), way(1.0, 1.0)) for served in ((0.5, 1.01), (0.5, 1.1), (1.1, 0.5))]
    assert found == [True, False, False]
