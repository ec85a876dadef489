"""A dense model's MLPs are divided into experts: exact where all are active, else the sum of the chosen neurons."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import texts
import tiny
import torch
from benchmarks.programs import start
from safetensors.torch import load_file
from studies.real import experts, page
from torch.nn import functional

from fcsd.errors import BadInputError, ConfigError
from fcsd.models.build import load_model


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a llama of bf16 in `dense`, and text in `own`."""
    folder = tmp_path_factory.mktemp("experts")
    tiny.model("llama", dtype=torch.bfloat16, initializer_range=0.1).save_pretrained(folder / "dense")
    texts.tokenizer().save_pretrained(folder / "dense")
    for part, seed in (("train", 1), ("held_out", 2)):
        (folder / "own" / part).mkdir(parents=True)
        ids = tiny.tokens(20, 64, seed).tolist()
        pq.write_table(pa.table({"input_ids": ids}), folder / "own" / part / "part-00000.parquet")
    return folder


def divided(folder: Path, name: str, **how) -> Path:
    inputs = list(experts.mlp_inputs(folder / "dense", {"own": folder / "own"}))
    experts.write(folder / "dense", folder / name, inputs, **{"experts": 4, "shared": 32, **how})
    return folder / name


def test_with_all_experts_active_it_is_the_dense_model(dense: Path) -> None:
    out = divided(dense, "all", active=4)
    models = [load_model(path, dtype=torch.float32) for path in (dense / "dense", out)]
    theirs, ours = (model(tiny.tokens()).logits for model in models)
    assert (theirs - ours).abs().max() < 1e-6 * theirs.abs().max()
    assert models[1].config.model_type == "qwen2_moe" and models[1].config.num_experts_per_tok == 4
    whole, parts = (load_file(path / "model.safetensors") for path in (dense / "dense", out))
    place = "model.layers.1.mlp"
    of = {"shared_expert": 2, **{f"experts.{e}": 4 for e in range(4)}}
    for name, dim in (("gate", 1), ("up", 1), ("down", 0)):  # every neuron is in one expert, to the last bit
        found = [
            parts[f"{place}.{part}.{name}_proj.weight"] / (times if name == "down" else 1) for part, times in of.items()
        ]
        rows = {tuple(row.tolist()) for part in found for row in (part if dim else part.T)}
        expected = whole[f"{place}.{name}_proj.weight"]
        assert rows == {tuple(row.tolist()) for row in (expected if dim else expected.T)}


@pytest.mark.parametrize("router", ["fitted", "gate-rows"])
def test_with_fewer_active_each_token_sums_its_neurons_with_the_weights_of_the_dense_model(
    dense: Path, router: str
) -> None:
    out = divided(dense, f"some-{router}", active=2, router=router, spread=1e-5)
    models = [load_model(path, dtype=torch.float32) for path in (dense / "dense", out)]
    mlp, moe = (model.get_decoder().layers[1].mlp for model in models)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3))
    acts = functional.silu(x @ mlp.gate_proj.weight.T) * (x @ mlp.up_proj.weight.T)
    rows = {tuple(row.tolist()): n for n, row in enumerate(mlp.gate_proj.weight)}

    def neurons(gate) -> list[int]:
        return [rows[tuple(row.tolist())] for row in gate]

    groups = [neurons(gate_up[:24]) for gate_up in moe.experts.gate_up_proj]
    chosen = (x @ moe.gate.weight.T).topk(2).indices
    assert len({tuple(sorted(pair)) for pair in chosen.tolist()}) > 1
    used = torch.zeros_like(acts)
    used[:, neurons(moe.shared_expert.gate_proj.weight)] = 1
    for token, pair in enumerate(chosen.tolist()):
        for expert in pair:
            used[token, groups[expert]] = 1
    assert (used.sum(1) == 32 + 2 * 24).all()
    expected = (acts * used) @ mlp.down_proj.weight.T
    assert (moe(x[None])[0] - expected).abs().max() < 1e-4 * expected.abs().max()


def test_neurons_that_act_together_become_an_expert_and_those_that_always_act_are_shared() -> None:
    random = torch.Generator().manual_seed(0)
    kind = torch.randint(4, (400,), generator=random)
    group = torch.arange(32).remainder(4)
    important = 0.1 * torch.rand(400, 40, generator=random)
    important[:, :32] += (kind[:, None] == group[None]).float()
    important[:, 32:] += 2
    order = torch.randperm(40, generator=random)
    common, groups = experts.grouped(important[:, order], 4, 8, 16, random)
    assert sorted(order[common].tolist()) == list(range(32, 40))
    assert sorted(sorted(order[found].tolist()) for found in groups) == [list(range(g, 32, 4)) for g in range(4)]


def test_a_router_is_fitted_to_the_experts_with_the_largest_outputs() -> None:
    random = torch.Generator().manual_seed(0)
    read, truth = torch.randn(500, 16, generator=random), torch.randn(4, 16, generator=random)
    outputs = 5 + 0.1 * read @ truth.T
    scale = torch.rand(500, 1, generator=random) * 100  # a token whose activations are large does not count more
    router = experts.fitted(read, outputs * scale, 0.5)
    chosen, best = ((read @ rows.T).argmax(1) for rows in (router, truth))
    assert (chosen == best).float().mean() > 0.95
    logits = read @ router.T
    assert abs(float((logits - logits.mean(1, keepdim=True)).std()) - 0.5) < 1e-3


def test_choices_are_compared_by_their_divergence_from_the_dense_model(
    dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [{"active": 4}, {"active": 2, "split": "random"}]
    monkeypatch.setattr(experts, "COMPARED", [{"experts": 4, "shared": 32, **case} for case in cases])
    words = [
        str(dense / "dense"),
        str(tmp_path / "out.json"),
        "--compare",
        f"--text=own={dense / 'own'}",
        "--rows",
        "1",
    ]
    start("studies.real", "experts", *words)
    whole, some = json.loads((tmp_path / "out.json").read_text())["models"]
    assert abs(whole["kl"]["own"]["kl"]) < 1e-6 < 1e-3 < some["kl"]["own"]["kl"] and some["split"] == "random"


def test_what_cannot_be_divided_is_refused_and_nothing_is_written(dense: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="128 neurons do not make 30 shared ones and 4 experts with 2 active ones"):
        experts.write(dense / "dense", tmp_path / "out", [], experts=4, active=2, shared=30)
    tiny.model("qwen3").save_pretrained(tmp_path / "qwen3")
    with pytest.raises(BadInputError, match="is no llama without biases"):
        experts.write(tmp_path / "qwen3", tmp_path / "out", [], experts=4, active=2, shared=32)
    assert not (tmp_path / "out").exists()


def test_the_mixtures_runs_have_a_control_of_as_many_tokens(repo: Path) -> None:
    file = json.loads((repo / page.EXPERTS).read_text())
    runs = {run["name"]: run for run in file["runs"]}
    assert runs["moe"]["steps"] * 32768 == 11_993_088 and runs["farskip-2-29"]["steps"] * 32768 == 5_996_544
    assert runs["moe-again"]["steps"] == runs["farskip-2-29"]["steps"]
    far, control = (runs[name]["kl"] for name in ("farskip-2-29", "moe-again"))
    assert all(far[name]["kl"] > control[name]["kl"] for name in ("own", "doc", "foreign"))
    whole, half, standard = (runs[name]["held_out"][1] for name in ("farskip-all", "farskip-2-29", "moe-again"))
    assert whole[0] == half[0] == standard[0] == 122 and "kl" not in runs["farskip-all"]  # 4.0 million tokens
    assert standard[1] < half[1] < whole[1]
    assert min(one["same_from_the_first"] for one in file["compared"]) == 1
    assert all(
        len({v for k, v in one.items() if k != "prompt"}) == 1 for one in file["compared_untrained_cpu"]["prompts"]
    )


def test_the_divisions_are_those_that_were_compared(repo: Path) -> None:
    models = json.loads((repo / page.SPLITS).read_text())["models"]
    choices = [{key: value for key, value in one.items() if key != "kl"} for one in models]
    assert all(case.items() <= choice.items() for case, choice in zip(experts.COMPARED, choices, strict=True))
    whole, used, random, two, _, wide, small, _, _ = (one["kl"]["foreign"]["kl"] for one in models)
    assert abs(whole) < 1e-6 and random > 2 * used and 0 < used - small < 0.02 < 0.4 < wide - used
    assert round(two / used, 1) == 2.0


def test_the_page_shows_runs_scores_and_how_far_two_engines_agree_and_says_what_was_not_measured() -> None:
    one = {"from": "moe", "wiring": "farskip", "layers": "2-29", "held_out": [[1, 0.5], [2, 0.25]]}
    kl = {"own": {"kl": 0.125}, "doc": {"kl": 0.25}, "foreign": {"kl": 0.375}}
    runs = [{**one, "name": "a", "kl": kl, "tokens_per_second": 7.0}, {**one, "name": "b", "tokens_per_second": 8.0}]
    score = {"value": 0.5, "stderr": 0.01, "n": 100, "metric": "acc_norm"}
    asked = {"scores": {"original": {"HS": score}, "a": {"HS": {**score, "value": 0.4}}}}
    asked["differences"] = [{"model": "a", "tasks": [{"column": "HS", "points": -10.0, "stderr": 2.0}]}]
    told = [{"prompt": "Why?", "engine_tokens": 48, "vllm_tokens": 47, "same_from_the_first": 12}]
    lines = [
        "".join(line.split()) for line in page.experts({"runs": runs, **asked, "compared": told}).splitlines() if line
    ]
    assert "|a|moe|farskip|2-29|0.500,0.250|0.125|0.250|0.375|7|" in lines
    assert "|b|moe|farskip|2-29|0.500,0.250|notmeasured|notmeasured|notmeasured|8|" in lines
    assert "|a|40.0|-10.0±2.0|" in lines and "|Why?|48|47|12|" in lines
    assert len(page.experts({"runs": runs}).splitlines()) == 4


@pytest.mark.nightly
def test_the_whole_chain_heals_to_the_dense_model_with_divided_experts(dense: Path, repo: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "EXPERTS": "--experts 4 --active 2 --shared 32", "LAYERS": "2-3"}
    settings = {"data.seq_len": 32, "train.dtype": "fp32", "train.micro_batch_size": 2, "optim.lr": 0.003}
    env |= {"BATCH": "256", "OMP_NUM_THREADS": "1", "SET": json.dumps(settings)[1:-1]}
    command = [repo / "studies/real/experts.sh", dense / "dense", tmp_path, "8e3", f"own={dense / 'own'}"]
    done = subprocess.run([*map(str, command)], cwd=repo, env=env, capture_output=True, text=True)
    logs = [file.read_text()[-2000:] for file in tmp_path.glob("*/log.txt")]
    assert done.returncode == 0, (done.stderr[-2000:], logs)
    found = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sorted(case["name"] for case in found) == ["farskip-2-29", "farskip-all", "moe", "moe-again"]
    assert found[-1]["name"] == "farskip-all"  # what is wanted least comes last
    for case in found:
        first, *_, last = (kl for _, kl in case["held_out"])
        assert last < first, case
        recipe = json.loads((tmp_path / case["name"] / "recipe.yaml").read_text())
        assert recipe["teacher"] == str(dense / "dense")
        assert recipe.get("parallel", {}).get("ep_size") == (2 if case["name"] == "farskip-2-29" else None)
    kl = {case["name"]: (case["untrained_kl"]["own"]["kl"], case["kl"]["own"]["kl"]) for case in found}
    assert kl["moe-again"][0] == pytest.approx(kl["moe"][1]) and kl["farskip-all"][0] > kl["moe"][1]
    answers = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert answers and all(json.loads(line) for line in answers)
