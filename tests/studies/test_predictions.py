"""What conversions gain and lose by prediction: beside what was measured, and by the law that was fitted."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from benchmarks.programs import start
from studies.blocks import between_marks
from studies.real import predictions as frontier
from studies.real.law import OUT, PAGE, checks, filled, law, stored
from studies.real.speeds import served
from transformers import LlamaConfig

from fcsd.disk import write_json
from fcsd.distill.layer_costs import LayerCosts
from fcsd.models.build import without_injected
from fcsd.models.schedule import Kind
from fcsd.models.selection import layers_text
from fcsd.models.wiring_block import DESYNC, Blocks, Wiring
from fcsd.plan.model import MetaModel, packaged_config

pytestmark = pytest.mark.lab

MEASURED = "benchmarks/results/infer_slow_16_layers_2xh100.json"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama-3 8B's dimensions with the 16 layers that were measured."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = packaged_config("meta-llama/Llama-3.1-8B-Instruct")
    assert isinstance(config, LlamaConfig)
    config.num_hidden_layers = 16
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rows(model: Path) -> dict[tuple[str, str], frontier.Row]:
    return {(row.wiring, row.layers.split()[0]): row for row in frontier.frontier(MetaModel(str(model)), 2)}


def test_the_stored_law_is_the_fit_of_the_stored_runs(repo: Path) -> None:
    fitted, page = law(repo), (repo / PAGE).read_text()
    assert frontier.law() == json.loads((repo / OUT).read_text()) == fitted, "run python -m studies.real pages"
    assert filled(page, fitted, checks(stored(repo), repo)) == page, "run python -m studies.real pages"


def test_the_speed_is_near_what_was_measured(repo: Path, rows: dict[tuple[str, str], frontier.Row]) -> None:
    """The rates were set on this file, so this holds them in place and proves no prediction."""
    stored = json.loads((repo / MEASURED).read_text())["rows"]
    measured = {row["wiring"]: row for row in stored if row["batch"] == frontier.PROMPTS and row["reduce"] == "nccl"}
    for name in ("ladder", "desync-4x"):
        row = rows[name, "100%"]
        assert row.decode == pytest.approx(measured[name]["decode_times_standard"], rel=0.1)
        assert row.prefill == pytest.approx(measured[name]["prefill_times_standard"], rel=0.1)
    one = next(r for r in stored if (r["batch"], r["wiring"], r["reduce"]) == (1, "ladder", "nccl"))
    assert rows["ladder", "100%"].prefill > 1.3 * one["prefill_times_standard"], "one prompt is predicted too fast"


def test_the_page_holds_the_speeds_beside_those_of_servers(repo: Path) -> None:
    page, told = (repo / PAGE).read_text(), served(repo)
    assert between_marks(page, {"served": told}) == page, "run python -m studies.real pages"
    cells = [line.replace("x", "").split("|")[5:-1] for line in told.splitlines()[2:]]
    steps = [float(step) / float(measured) for step, measured, *_ in cells]
    first = [float(one) / float(measured) for *_, one, both in cells for measured in both.split(",")]
    assert sum(ratio > 1 for ratio in steps) == 7 and len(steps) == 9
    assert min(steps + first) > 0.85 and max(steps + first) < 1.2


def test_the_assumed_link_and_rates_are_near_what_was_measured(repo: Path, model: Path) -> None:
    stored = json.loads((repo / MEASURED).read_text())["rows"]
    standard = {
        kind: next(r for r in stored if (r["batch"], r["wiring"], r["reduce"]) == (16, "standard", kind))
        for kind in ("nccl", "none")
    }
    meta = MetaModel(str(model))
    for prefill, key, rows in ((False, "decode_ms", 16), (True, "prefill_ms", 16 * 1024)):
        whole = 1e3 * frontier.seconds_of(meta, 2, None, Wiring("standard", ()), prefill)
        sent = 2 * rows * meta.numbers.hidden  # two ranks send what they sum
        assert whole == pytest.approx(standard["nccl"][key], rel=0.1)
        assert whole - 32e3 * frontier.SLOW.seconds(sent) == pytest.approx(standard["none"][key], rel=0.15)


def test_more_layers_are_faster_and_lose_more(rows: dict[tuple[str, str], frontier.Row]) -> None:
    for name in dict(rows):
        assert name[1] != "auto"  # nobody has measured this model's layers
    for name in ("ladder", "farskip", "desync-2x"):
        some = [rows[name, share] for share in frontier.SHARES]
        assert 1 < some[0].decode < some[-1].decode and 1 < some[0].prefill < some[-1].prefill
        if name in DESYNC:
            assert some[0].kl is None and some[0].points is None
            continue
        bounds = [row.kl for row in some if row.kl is not None]
        assert len(bounds) == 4 and bounds == sorted(bounds) and all(low < high for low, high in bounds)
    # 4 of 16 layers are less than any run converted, and ladder on attention alone has no costs here.
    assert rows["farskip", "50%"].fitted and not rows["farskip", "25%"].fitted
    assert rows["ladder attn-only", "50%"].points is None
    assert not frontier.losses(0.1, (4.2, 4.2))["fitted"] and not frontier.losses(0.5, (4.2, 9.0))["fitted"]


def test_a_prediction_of_two_costs_reaches_from_the_low_end_of_the_one_to_the_high_end_of_the_other() -> None:
    cheap, dear, both = (frontier.losses(0.5, whole) for whole in ((4.2, 4.2), (9.0, 9.0), (4.2, 9.0)))
    for key in ("kl", "points"):
        assert both[key] == (cheap[key][0], dear[key][1]) and cheap[key][1] < dear[key][1]


def test_heads_that_two_gpus_do_not_divide_are_planned_for_three() -> None:
    fields = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=2)
    odd = SimpleNamespace(config=LlamaConfig(**fields))
    fields |= dict(num_attention_heads=1, num_key_value_heads=1)
    assert frontier.usual_ranks(SimpleNamespace(config=LlamaConfig(**fields))) == 2, "no number divides one head"
    assert frontier.usual_ranks(odd) == 3 and frontier.usual_ranks(SimpleNamespace(config=LlamaConfig())) == 2


def test_costs_are_those_of_a_measured_wiring_only_where_all_reads_are_alike() -> None:
    dense: list[Kind] = ["dense"] * 4
    alike = {
        (name, variant): frontier.measured_alike(Wiring(name, (0, 1, 2, 3), variant), dense, Blocks())
        for name, variant in frontier.WIRINGS
        if name not in DESYNC
    }
    assert alike["parallel", "full"] == alike["ladder", "mlp-only"] == alike["farskip", "full"] == "farskip"
    assert alike["ladder", "full"] == "ladder" and alike["ladder", "attn-only"] is None
    assert frontier.measured_alike(Wiring("parallel", (0, 1)), ["moe-shared"] * 2, Blocks()) is None


def test_the_place_in_the_depth_decides_the_cost_of_a_model_of_other_depth() -> None:
    alone = [2.0, 1.0, 0.5]
    assert frontier.sum_over(alone, range(3), 3) == pytest.approx(3.5)
    assert frontier.sum_over(alone, range(7), 7) == pytest.approx(3.5)
    assert frontier.sum_over(alone, [1, 2], 4) == pytest.approx(0.25 * 2 + 1.0 + 0.25 * 0.5)


def test_the_command_says_that_it_predicts_and_what_it_assumes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*options: str) -> str:
        start("studies.real", "predictions", str(model), *options)
        return capsys.readouterr().out

    done = said()
    assert done.startswith("Predicted, not measured.") and "are assumed: those of two H100s without" in done
    assert "as in SmolLM2-135M-Instruct or Gemma-3-270m" in " ".join(done.split())
    costs, machine = tmp_path / "costs.json", tmp_path / "machine.json"
    costs.write_text(json.dumps({"tokens": 9, "ladder": {"alone": [3.0, 1.0, *[0.1] * 14]}}))
    machine.write_text(json.dumps({"gpus_per_node": 2, "near": {"latency_us": 10, "gb_per_s": 300}}))
    options = ["--costs", str(costs), "--machine", str(machine)]
    told = said(*options)
    rows = " ".join(told.split())
    assert "| ladder | auto:4 (2-5)" in rows  # 25 % of 16, the first of equal ones
    assert "those of the machine file" in told
    before, after = json.loads(said("--json")), json.loads(said("--json", *options))
    ladder, farskip = (
        [next(row for row in found if row["wiring"] == name) for found in (before, after)]
        for name in ("ladder", "farskip")
    )
    assert ladder[1]["decode"] < ladder[0]["decode"] and ladder[1]["cost"] == [pytest.approx(0.4)] * 2
    assert farskip[0]["kl"] is not None and farskip[1]["kl"] is None


def test_a_layer_that_cannot_be_converted_is_never_among_the_cheapest(model: Path, tmp_path: Path) -> None:
    """The first layers of a model that adds image features to their outputs stay standard."""
    later = {layer: 0.01 + layer / 1000 for layer in range(6, 16)}
    measured = LayerCosts(Wiring("ladder", tuple(later)), later, together=1.0, tokens=9)
    costs = tmp_path / "costs.json"
    write_json(costs, measured.to_json())
    rows = frontier.frontier(MetaModel(str(model)), 2, costs=costs)
    told = {row.layers: row.cost for row in rows if row.wiring == "ladder"}
    assert [layers for layers in told if layers.startswith("auto")] == ["auto:4 (6-9)", "auto:8 (6-13)"]
    assert told["100% (0-15)"] == (pytest.approx(sum(later.values())),) * 2


def test_layers_that_cannot_be_converted_are_in_no_row(tmp_path: Path) -> None:
    """As with ``fcsd convert --layers all``, which leaves them standard."""
    config = tiny.config("qwen3_vl")
    config.vision_config.deepstack_visual_indexes = [0, 1]
    config.save_pretrained(tmp_path)
    rows = frontier.frontier(MetaModel(str(tmp_path)), 2)
    whole = {row.wiring: row.layers for row in rows if row.layers.startswith("100%")}
    for wiring in ("ladder", "farskip", "desync-2x"):
        layers = tuple(range(config.text_config.num_hidden_layers))
        all_that_can = without_injected(config, Wiring(wiring, layers, tp_degree=2 if wiring in DESYNC else 1)).layers
        assert 0 < len(all_that_can) < len(layers) and whole[wiring] == f"100% ({layers_text(all_that_can)})"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "1"], "one GPU sends nothing"),
        (["--gpus", "3"], "does not divide the 32 attention heads"),
        (["--costs", "none.json"], "--costs none.json: there is no such file"),
        (["--costs", "text.json"], "text.json has no costs of layers"),
        (["--costs", "short.json"], "no costs of a model of 16 layers"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    options: list[str], words: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.json").write_text("[]")
    Path("short.json").write_text(json.dumps({"ladder": {"alone": [1.0, 2.0]}}))
    with pytest.raises(SystemExit, match=words):
        start("studies.real", "predictions", str(model), *options)
