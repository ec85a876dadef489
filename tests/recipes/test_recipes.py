"""Every packaged recipe loads, says what it is for, and stays where it was found."""

import json
import re
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig

from fcsd import recipes
from fcsd.bench.shapes import SHAPES
from fcsd.config import load_recipe
from fcsd.distill.run.identity import flat
from fcsd.distill.sweep.trials import all_trials
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.build import converted_config
from fcsd.models.wiring import Wiring
from fcsd.plan import Hardware, plan_run
from fcsd.plan.model import MetaModel
from fcsd.plan.report import to_text
from fcsd.plan.setup import setup_of
from fcsd.recipes.inherit import copy_recipe

NAMES = recipes.names()


def test_names_are_the_files(repo: Path) -> None:
    assert sorted(path.stem for path in (repo / "recipes").iterdir()) == NAMES
    assert {"tiny", "tiny-sft"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_loads_and_says_what_it_is_for(name: str) -> None:
    recipe = load_recipe(name).recipe
    assert recipe.name == name
    assert recipes.read(name).startswith("# ")
    ran = name.startswith("tiny")
    assert ("\n# Hardware: run on " if ran else "\n# Hardware: planned for ") in recipes.read(name)
    what, _, hardware = recipes.summary(name).removesuffix(".").rpartition(". ")
    assert what == recipes.read(name).partition("\n")[0].removeprefix("# ").removesuffix(".")
    assert hardware == "Run on two CPU cores" if ran else re.fullmatch(r"Planned for (\w+) GPUs? of \d+ GB.*", hardware)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("tiny")])
def test_every_value_says_where_it_is_from(name: str) -> None:
    require_sources(recipes.read(name))


def require_sources(text: str) -> None:
    """Check that every value of a recipe's text has a comment that names a paper's section, or says that it is ours."""
    ours, papers = "not published; ours", ("FarSkip §", "FarSkip eq.", "FarSkip Table", "FarSkip App", "Ladder §")
    columns = ("format", "messages", "message_keys", "column")  # what the dataset's own fields are called
    for line in text.split("\noutput_dir:")[1].splitlines()[1:]:
        key, _, rest = line.strip().removeprefix("- ").partition(": ")
        if rest and not rest.startswith("#") and key not in columns:
            assert any(source in rest.partition(" # ")[2] for source in (ours, *papers)), line


STEPS = {
    "deepseek-v2-lite": 76294,  # 10 B tokens of 2^17
    "qwen3-30b-a3b-table2": 3815,  # 500 M tokens of 2^17
    "qwen3-30b-a3b-table2-quarter-batch": 3815,
    "qwen3-30b-a3b-table2-4x-batch": 3815,
    "llama3.1-8b-ladder": 45777,  # 6 B tokens of 2^17
    "pretrain-farskip": 11921,  # 50 B tokens of 2^22
    "pretrain-desync-4x-1b": 23842,  # 100 B tokens of 2^22
}


@pytest.mark.parametrize("name", STEPS)
def test_budgets_are_the_papers(name: str) -> None:
    assert load_recipe(name).recipe.train.steps == STEPS[name]


@pytest.mark.parametrize("name", ["llama4-scout", "llama4-scout-sft", "qwen3-30b-a3b-table2-sft"])
def test_early_stopping_is_the_papers(name: str) -> None:
    stop = load_recipe(name).recipe.early_stop
    assert (stop.metric, stop.every, stop.patience, stop.delta) == ("mbpp_plus", 1000, 20, 0.02)


def test_a_small_dense_model_has_a_recipe_with_the_measured_values(repo: Path) -> None:
    """The defaults of the fields are for no model in particular; these ended lowest in short runs."""
    recipe = load_recipe("smollm2-135m-ladder").recipe
    results = repo / "benchmarks/results"
    runs = json.loads((results / "real_smollm2_10m_2xh100.json").read_text())["runs"]
    how = ("ladder", recipe.init.layers, "own")
    alike = [run for run in runs if "kl" in run and (run["wiring"], run["layers"], run["text"]) == how]
    least = min(alike, key=lambda run: run["kl"]["own"]["kl"])
    assert len(alike) > 1
    assert (recipe.optim.lr, recipe.train.batch_tokens) == (least["lr"], least.get("batch", 131072)) == (1e-3, 32768)
    gemma = json.loads((results / "real_gemma3_1xh100.json").read_text())["runs"]
    assert {run["lr"] for run in gemma} == {3e-4}
    assert recipe.data.seq_len == 1024 and recipe.data.sources[0].token_ids == "input_ids"


def test_table_2_is_one_change_each() -> None:
    base = flat(load_recipe("qwen3-30b-a3b-table2").recipe.model_dump())
    assert (base["optim.lr"], base["optim.min_lr"], base["init.layers"]) == (2e-5, 1e-5, "all")
    for variant, changes in {
        "frozen": {"objective.freeze_embeddings": True, "objective.freeze_lm_head": True},
        "sft": {"objective.kl": 0.0, "objective.sft": 1.0},
        "quarter-batch": {"train.batch_tokens": 2**15, "train.tokens": None},
        "4x-batch": {"train.batch_tokens": 2**19, "train.tokens": None},
        "last50": {"init.layers": "50%"},
        "last75": {"init.layers": "75%"},
        "last90": {"init.layers": "90%"},
    }.items():
        recipe = flat(load_recipe(f"qwen3-30b-a3b-table2-{variant}").recipe.model_dump())
        found = {key: value for key, value in recipe.items() if value != base[key]}
        assert {key: found[key] for key in found if key not in ("name", "output_dir")} == changes


def test_the_sweep_is_the_papers() -> None:
    sweep = load_recipe("llama4-scout-sft-sweep").recipe.sweep
    assert sweep is not None and sweep.steps == 2000 and sweep.metric == "loss"
    assert sweep.stages == [{"train.batch_tokens": [2**16, 2**17, 2**18]}, {"optim.lr": [2e-5, 4e-5, 8e-5]}]


@pytest.mark.parametrize("name", [name for name in NAMES if load_recipe(name).recipe.sweep])
def test_every_trial_of_a_sweep_is_a_recipe(name: str) -> None:
    assert name.endswith("-sweep") and f"fcsd distill --sweep {name}" in recipes.read(name)
    assert len(all_trials(load_recipe(name))) > 1


# layers, nodes
FITTING = [("deepseek-v2-lite", 27, 1), ("qwen3-30b-a3b", 48, 1), ("llama4-scout", 48, 4)]


@pytest.mark.parametrize(("name", "layers", "nodes"), FITTING)
def test_it_fits_the_hardware_it_names(name: str, layers: int, nodes: int, tmp_path: Path) -> None:
    SHAPES[name](layers).save_pretrained(tmp_path)
    numbers = {1: "eight", 4: "32"}
    assert f"# Hardware: planned for {numbers[nodes]} GPUs of 141 GB" in recipes.read(name)
    planned = plan_run(load_recipe(name, [f"model={tmp_path}"]).recipe, Hardware(8, nodes, 141))
    assert planned.memory.fits and planned.setup.accumulation.is_integer()
    for sweep in (f"{name}-sweep", f"{name}-sft-sweep"):
        trials = all_trials(load_recipe(sweep))
        assert len(trials) == 9, "whatever the first stage chooses; five of them run"
        assert all(setup_of(trial.full.recipe, 8 * nodes, layers).accumulation.is_integer() for trial in trials)


_model = cache(MetaModel)  # many recipes have one model


@pytest.mark.parametrize("name", NAMES)
def test_it_is_planned_without_the_hub(name: str, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcsd.plan.MetaModel", MetaModel if name.startswith("tiny") else _model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    if name.startswith("tiny"):  # its first line says to convert the bundled model, of which the plan reads the config
        original = AutoConfig.from_pretrained(repo / "assets/teacher")
        wiring = Wiring("farskip", tuple(range(original.num_hidden_layers)))
        block = wiring.to_block(base_model="assets/teacher", base_revision=None, base_sha256=None)
        converted_config(original, block).save_pretrained(tmp_path / "runs/tiny-farskip")
    recipe = load_recipe(name).recipe
    planned = plan_run(recipe, Hardware(recipe.parallel.ep_size * recipe.parallel.tp_size))
    assert planned.packaged == (() if name.startswith("tiny") else (recipe.model,))
    assert ("its packaged config.json is used" in to_text(planned)) == bool(planned.packaged)


# Parameters in billions, all and those of one token, of the language models alone except for Scout.
PACKAGED = {
    "deepseek-ai/DeepSeek-V2-Lite": (15.7, 2.7),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (15.7, 2.7),
    "Qwen/Qwen3-30B-A3B": (30.5, 3.3),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (107.8, 17.2),
    "meta-llama/Llama-3.1-8B-Instruct": (8.03, 8.03),
    "meta-llama/Llama-3.2-1B": (1.24, 1.24),
    "HuggingFaceTB/SmolLM2-135M-Instruct": (0.135, 0.135),
    "meta-llama/Llama-3.3-70B-Instruct": (70.6, 70.6),
    "Qwen/Qwen3-32B": (32.8, 32.8),
    "Qwen/Qwen3-235B-A22B": (235.1, 22.2),
    "zai-org/GLM-4.5-Air": (106.9, 13.4),
    "openai/gpt-oss-120b": (116.8, 5.7),
}


def test_packaged_configurations_are_those_of_the_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    named = {load_recipe(name).recipe.model for name in NAMES if not name.startswith("tiny")}
    assert set(PACKAGED) == named
    for name, (total, active) in PACKAGED.items():
        model = MetaModel(name)
        assert model.packaged
        assert (model.numbers.total / 1e9, model.numbers.active / 1e9) == pytest.approx((total, active), rel=0.02)
    with pytest.raises(BadInputError):
        MetaModel("meta-llama/Llama-3.2-1B@main")  # another revision may have another configuration
    with pytest.raises(BadInputError):
        MetaModel("org/other")


@pytest.mark.parametrize("name", NAMES)
def test_bundled_files_a_recipe_names_exist(name: str, repo: Path) -> None:
    data = load_recipe(name).recipe.data
    paths = [source.path for source in [*data.sources, *data.measured.values()]]
    bundled = [Path(path) for path in paths if Path(path).is_relative_to(repo / "assets")]
    assert all(path.is_file() for path in bundled) and len(bundled) == (2 if name.startswith("tiny") else 0)


@pytest.mark.parametrize("name", NAMES)
def test_copy_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    written = copy_recipe(name, tmp_path)
    assert written == tmp_path / f"{name}.yaml"
    text, packaged = written.read_text(encoding="utf-8"), recipes.read(name)
    assert load_recipe(str(written)).recipe == load_recipe(name).recipe
    if "\nbase: " not in packaged:
        assert text == packaged
    assert "\nbase: " not in text and {"name", "model", "output_dir", "data"} <= {
        line.partition(":")[0] for line in text.splitlines()
    }
    assert text.split("\nname:")[0] == packaged.split("\nbase:")[0].split("\nname:")[0]
    said = lambda text: [line for line in text.splitlines() if " # " in line]  # noqa: E731
    assert set(said(packaged)) <= set(said(text))
    if not name.startswith("tiny"):
        require_sources(text)


def test_a_copy_has_the_lines_of_the_recipe_and_of_its_bases(tmp_path: Path) -> None:
    text = copy_recipe("qwen3-30b-a3b-table2-sft", tmp_path).read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) > 60 and lines[0] == recipes.read("qwen3-30b-a3b-table2-sft").splitlines()[0]
    for own in ("  kl: 0.0 # FarSkip Table 2", "  tokens: 500e6 # FarSkip Table 2", "      message_keys: from/value"):
        assert lines.count(own) >= 1, own
    assert "model: Qwen/Qwen3-30B-A3B # FarSkip §5.1" in text and "deepseek-ai" not in text


def test_tiny_and_its_control_differ_in_the_objective_alone() -> None:
    kl, sft = (load_recipe(name).recipe.model_dump() for name in ("tiny", "tiny-sft"))
    assert {key for key in kl if kl[key] != sft[key]} == {"name", "output_dir", "objective"}


def test_unknown_name_suggests_the_closest() -> None:
    with pytest.raises(ConfigError) as caught:
        recipes.find("tinny")
    assert caught.value.hint is not None
    assert "Did you mean 'tiny'?" in caught.value.hint


def test_a_file_of_ones_own_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigError, match="no packaged recipe is named 'mine'") as caught:
        load_recipe("mine")
    assert caught.value.hint is not None and "Did you mean the file ./mine.yaml?" in caught.value.hint
    with pytest.raises(ConfigError, match=r"mine\.yml: no such file") as caught:
        load_recipe("mine.yml")
    assert caught.value.hint is not None and "Did you mean mine.yaml?" in caught.value.hint
    with pytest.raises(ConfigError, match="the folder none does not exist"):
        copy_recipe("tiny", Path("none/tiny.yaml"))
    with pytest.raises(ConfigError, match=r"mine\.yaml is not a directory"):
        copy_recipe("tiny", Path("mine.yaml/tiny.yaml"))
    (tmp_path / "rewired").mkdir()
    with pytest.raises(ConfigError, match="no packaged recipe is named 'rewired'") as caught:
        load_recipe("rewired")
    assert caught.value.hint is not None and "add --set model=rewired to a recipe" in caught.value.hint


@pytest.mark.parametrize("name", ["../tiny", "", ".", "..", "\0"])
def test_a_name_never_leaves_the_folder(name: str) -> None:
    with pytest.raises(ConfigError):
        copy_recipe(name, Path("unused"))
