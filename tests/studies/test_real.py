"""The page of real models holds the stored runs, and a case becomes a recipe that is taken."""

import json
import os
import re
import subprocess
import sys
import threading
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
import torch
from benchmarks.programs import start
from studies.real import cells as frontiers_cells
from studies.real import frontier, heal, page, passages, ranks, runner
from studies.real import law as healing
from studies.real.heal import read_cases, recipe_of
from studies.real.predictions import frontier as plan_rows
from studies.real.predictions import law, losses

from fcsd.config import Recipe
from fcsd.eval.suite import select_any
from fcsd.eval.tasks import load_tasks
from fcsd.models.selection import select_layers
from fcsd.plan.model import MetaModel

PARTS = page.RAW[3]  # the runs that train part of the model


def test_the_page_holds_what_is_stored(repo: Path) -> None:
    text, raw = (repo / page.PAGE).read_text(), page.read(repo)
    assert page.filled(text, raw, repo) == text, "run python -m studies.real pages"
    rows = [line.split("|")[1:-1] for line in page.runs(list(raw.values())).splitlines()[2:]]
    shown = [[value.strip()[-5:] for cell in row[-2:] for value in cell.split(",")] for row in rows]
    runs = [run["kl"] for file in raw.values() for run in file["runs"] if "kl" in run]
    stored = [f"{kl[of]['kl']:.3f}" for kl in runs for of in page.KL_TEXTS]
    assert sorted(value for row in shown for value in row) == sorted(stored)  # each once, seeds in one row


def test_a_target_is_reached_where_the_upper_end_of_the_interval_is_within_it(repo: Path) -> None:
    raw = page.read(repo)
    (run,) = (run for run in raw[PARTS]["runs"] if run["name"] == "half-frozen-41m")
    (found,) = (found for found in raw[PARTS]["differences"] if found["model"] == "half-frozen-41m")
    run |= {"tokens": 140e6, "kl": {text: {"kl": 0.05} for text in ("own", "foreign")}}
    points = "{:.1f} ± {:.1f}".format(*map(abs, page.mean_difference(raw[PARTS], "half-frozen-41m")))
    told = page.answer(list(raw.values()), repo)
    (row,) = (line for line in told.splitlines() if line.startswith("| 15 of 30"))
    assert f"140 M | converted layers | {points}" in " ".join(row.split()) and "1.36 → 0.050" in row
    assert "**Targets**: 0.5 points with ladder on 15 layers was not shown;" in told
    found["tasks"] = [{**task, "points": -0.1, "stderr": 0.4} for task in found["tasks"]]
    assert "**Targets**: 0.5 points with ladder on 15 layers was shown;" in page.answer(list(raw.values()), repo)


def test_a_change_of_the_recipe_counts_beyond_the_seeds() -> None:
    def run(name: str, own: float, foreign: float, **more: object) -> dict[str, object]:
        kl = {"own": {"kl": own}, "foreign": {"kl": foreign}}
        return {"name": name, "seed": int(name[-1] == "1"), "layers": "all", "tokens": 3e6, "kl": kl, **more}

    hot = {"objective.temperature": 2.0}
    runs = [run("base-0", 0.3, 0.3), run("base-1", 0.31, 0.32), run("grow-half", 0.1, 0.1, layers="16-29")]
    runs += [run("t", 0.26, 0.25, set=hot), run("u", 0.28, 0.25, set=hot), run("grow", 0.4, 0.4)]
    lines = page.recipe({"runs": runs}).splitlines()[2:]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows[:2]] == ["nothing, seed 0", "nothing, seed 1"] and rows[0][-1] == ""
    assert rows[2] == ["temperature 2", "0.260", "0.250", "nearer"]
    assert rows[3][-1] == "no difference shown" and rows[4][-1] == "farther"
    assert rows[4][0] == "layers 16-29 alone for 3 million tokens"


def test_of_other_ways_to_heal_a_low_temperature_alone_differs(repo: Path) -> None:
    raw, seeds = (json.loads((repo / file).read_text()) for file in (page.RECIPE, page.SEEDS))
    kl = {run["name"]: [run["kl"][text]["kl"] for text in ("own", "foreign")] for run in raw["runs"] + seeds["runs"]}
    apart = [abs(one - other) for one, other in zip(kl["base-0"], kl["base-1"], strict=True)]
    verdicts = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in page.recipe(raw).splitlines()[4:]}
    assert {what for what, verdict in verdicts.items() if verdict != "no difference shown"} == {"temperature 0.5"}
    assert verdicts["temperature 0.5"] == "farther" and len(verdicts) == 6
    own = mean(kl[name][0] for name in ("base-0", "base-1"))
    assert min(kl[name][0] - own for name in ("grow-last", "grow-first")) > 3 * apart[0]
    raw = page.read(repo)[page.CONVERTED]
    alike = [run for run in raw["runs"] if run["tokens"] == 125e6]
    original = raw["scores"]["original"]
    assert len(alike) == 3
    for run in alike[1:]:  # asked with each digit a word, which changes no score but the loss of held-out text
        other = {name for name, one in run["original"].items() if one["value"] != original[name]["value"]}
        assert other == {"Held-out loss"}


def test_any_number_of_seeds_is_a_row_with_their_mean(repo: Path) -> None:
    stored = page.read(repo)[page.CONVERTED_SEEDS]
    (found,) = (found for found in stored["differences"] if found["model"] == "half-converted-41m-0")
    (run,) = (run for run in stored["runs"] if run["name"] == "half-converted-41m-0")
    seeds = {"runs": [], "differences": [], "scores": {"original": stored["scores"]["original"]}}
    for seed, more in enumerate((-1.0, 0.0, 1.0)):  # points that each task has more, and a hundredth of them in nats
        name = f"half-{seed}"
        kl = {text: {"kl": 0.09 + more / 100} for text in ("own", "foreign")}
        seeds["runs"].append({**run, "name": name, "seed": seed, "kl": kl})
        tasks = [{**task, "points": task["points"] + more} for task in found["tasks"]]
        seeds["differences"].append({**found, "model": name, "tasks": tasks})
        seeds["scores"][name] = stored["scores"][run["name"]]
    points, error = page.mean_difference(seeds, "half-1")
    row = " ".join(page.by_seed(seeds).splitlines()[-1].split())
    each = ", ".join(f"{-points - more:.1f}" for more in (-1, 0, 1))
    assert f"| 3 | 0.090 ± 0.010 | 0.090 ± 0.010 | {each} |" in row
    assert f"| {-points:.1f} ± {(error**2 + 1 / 3) ** 0.5:.1f} |" in row
    # Of longer runs a second seed makes such a row, and the first table has their mean.
    raw = page.read(repo)
    longer = raw[page.CONVERTED]
    (first,) = (run for run in longer["runs"] if run["name"] == "half-converted-125m")
    longer["runs"] = [run for run in longer["runs"] if run["layers"] != first["layers"] or run is first]
    alone = page.by_seed(page.with_seeds(raw)).splitlines()
    (asked,) = (found for found in longer["differences"] if found["model"] == first["name"])
    better = [{**task, "points": task["points"] + 1} for task in asked["tasks"]]
    longer["runs"].append({**first, "name": "second", "seed": 1})
    longer["differences"].append({**asked, "model": "second", "tasks": better})
    longer["scores"]["second"] = longer["scores"][first["name"]]
    (row,) = set(page.by_seed(page.with_seeds(raw)).splitlines()[2:]) - set(alone)
    lost, error = page.mean_difference(longer, first["name"])
    each, told = f"{-lost:.1f}, {-lost - 1:.1f}", f"{-lost - 0.5:.1f} ± {(error**2 + 0.25) ** 0.5:.1f}"
    assert f"| 125 M | 2 | 0.071 ± 0.000 | 0.072 ± 0.000 | {each} | {told} |" in " ".join(row.split())
    assert f"| 125 M | converted layers | {told} of 7,214 |" in " ".join(page.answer(list(raw.values()), repo).split())
    seeds["runs"] = [{**seeds["runs"][0], "set": {"train.anneal_share": 0.3}}]
    assert "| 0.080 ± 0.000 |" in page.by_seed(seeds) and "| annealed wiring |" in page.runs([seeds])


def test_the_frontier_is_that_of_the_raw_files_and_of_the_law(repo: Path, tmp_path: Path) -> None:
    rows = json.loads((repo / frontier.WITHOUT_PEERS).read_text())["rows"]
    (ladder,) = (r for r in rows if (r["wiring"], r["batch"], r["reduce"]) == ("ladder", 16, "nccl"))
    whole, half = (frontier.served("ladder", share, frontier.MEASURED, repo) for share in (1, 0.5))
    assert whole is not None and half is not None and frontier.served("parallel", 1, frontier.MEASURED, repo) is None
    assert whole.decode == pytest.approx(ladder["decode_times_standard"])
    assert 1 / half.first == pytest.approx((1 + 1 / ladder["prefill_times_standard"]) / 2)  # half of the time is saved
    for wiring in ("ladder", "farskip"):
        points = [row[0] for row in frontier.lost(wiring, repo)]
        assert points == sorted(points)
    moe = {(row.wiring, row.layers.split()[0]): row for row in plan_rows(MetaModel("Qwen/Qwen3-30B-A3B"), 2)}[
        "ladder", "50%"
    ]
    assert moe.points is not None
    points = f"{moe.points[0]:.1f} to {moe.points[1]:.1f}{'' if moe.fitted else '*'}"
    told = f"| {moe.decode:.2f}x / {moe.prefill:.2f}x | {points} |"
    (last,) = (line for line in frontier.of_larger().splitlines() if "Qwen3-30B-A3B" in line)
    assert told in " ".join(last.split()) and 0.65 < 5 ** -law()["kl"]["coefficients"][3] < 0.7
    file = page.read_cells(repo)
    longer = page.healed(list(page.read(repo).values()))
    frontier.draw(tmp_path / "drawn.svg", page.cells(file), longer, page.tokens_of(file), repo)
    drawn, stored = ((path).read_text() for path in (tmp_path / "drawn.svg", repo / page.PICTURE))
    said = [re.findall("<!-- (.*?) -->", text) for text in (drawn, stored)]
    assert said[0] == said[1] and any("farskip" in one for one in said[0]), "run python -m studies.real pages"


def test_the_cells_say_what_was_concluded_from_them(repo: Path) -> None:
    file = page.read_cells(repo)
    cells = {(c.wiring, c.choice, c.share): c for c in page.cells(file)}
    ends = {page.cell_of(run): run["kl"]["own"]["kl"] for run in file["runs"]}
    assert len(ends) == len(cells) == 35
    both = [(c, cells[w, "last", share]) for (w, choice, share), c in cells.items() if choice == "cheapest"]
    apart = [c for c, o in both if abs(c.points - o.points) > 1.645 * (c.error**2 + o.error**2) ** 0.5]
    told = [("farskip", 0.5), ("ladder attn-only", 0.75), ("desync-4x", 0.25)]
    assert [(chosen.wiring, chosen.share) for chosen in apart] == told
    for share in (0.25, 0.5, 1.0):
        least = {c.wiring: c.points for (_, choice, of), c in cells.items() if choice == "last" and of == share}
        assert max(least, key=lambda wiring: least[wiring]) == "ladder attn-only"
    assert cells["ladder attn-only", "last", 0.75].lost == cells["farskip", "last", 0.75].lost
    for desync, other in (("desync-4x", "ladder"), ("desync-2x", "farskip")):
        assert frontier.speed(desync, 1, repo).decode == pytest.approx(frontier.speed(other, 1, repo).decode, abs=0.005)
    runs = [json.loads((repo / one).read_text())["runs"] for one in page.CELLS]
    before, second, _ = ({page.cell_of(run): run["kl"]["own"]["kl"] for run in of} for of in runs)
    whole = {page.cell_of(run) for run in runs[0] if "optim.train" not in run["set"]}
    twice = [second[cell] / kl for cell, kl in before.items() if cell in second and cell not in whole]
    assert len(twice) == 2 and all(abs(ratio - 1) < 0.045 for ratio in twice)
    rows = [
        line.split("|")[1:-1] for line in page.by_tokens(file, [page.read(repo)[f] for f in page.MORE]).splitlines()
    ]
    lost = {tuple(cell.strip() for cell in row[:3]): float(row[-1].split("±")[0]) for row in rows[2:]}
    assert lost["15 of 30", "ladder", "125 M"] < lost["15 of 30", "ladder", "6 M"] / 2
    assert lost["30 of 30", "ladder", "186 M"] < lost["30 of 30", "ladder", "6 M"] / 2


def test_the_law_of_the_number_of_layers_is_nearer_than_that_of_their_costs(repo: Path) -> None:
    """A law of the sum of what the converted layers cost alone is farther from the same runs."""
    files, costs = healing.stored(repo), frontier.costs(repo)

    def by_sum(run: dict) -> list[float]:
        alone = costs[run["wiring"]]
        total = sum(alone[layer] for layer in select_layers(run["layers"], len(alone)))
        return [1.0, log(total), -log(run["tokens"] / 1e6)]

    runs = healing.runs_of(files, repo=repo)
    known = [log(run["kl"]["own"]["kl"]) for run in runs]
    of_sum, of_count = (healing._fit([at(run) for run in runs], known) for at in (by_sum, lambda run: run["at"]))
    assert law()["kl"]["residual"] == of_count["residual"] < of_sum["residual"]
    assert law()["kl"]["runs"] == len(runs) and len(healing.runs_of(files[:-1], None, repo)) == 20


def test_a_cell_is_told_as_it_was_healed_and_asked(repo: Path) -> None:
    """What was not asked has a dash; the least lost is that of the cells that are as fast."""
    file = page.read_cells(repo)
    scores, (found, *_) = file["scores"], file["differences"]
    like = {**file["runs"][0], "steps": 183, "batch": 32768, "set": {"optim.train": ["converted"]}}
    names = {
        "a": ("ladder", "50%"),
        "b": ("ladder", "5-6,8-11,20-28"),
        "c": ("desync-4x", "all"),
        "d": ("farskip", "25%"),
    }
    runs = [{**like, "name": name, "wiring": w, "layers": layers} for name, (w, layers) in names.items()]
    tasks = {
        name: [{**t, "points": -p, "stderr": 0.6} for t in found["tasks"]]
        for name, p in zip("abc", (3, 1, 5), strict=True)
    }
    scores = {"original": scores["original"]} | dict.fromkeys("abc", scores["original"])
    told = {
        "runs": runs,
        "scores": scores,
        "differences": [{**found, "model": n, "tasks": t} for n, t in tasks.items()],
    }
    cells = page.cells(told)
    assert [(c.wiring, c.choice, c.share) for c in cells] == [
        ("ladder", "last", 0.5),
        ("ladder", "cheapest", 0.5),
        ("desync-4x", "last", 1.0),
    ]
    lines = frontier.table_of_cells(cells).splitlines()
    by = {tuple(cell.strip() for cell in line.split("|")[1:3]): line.split("|")[3:-1] for line in lines}
    whole = [cell.strip() for choice in frontier.CHOICES.values() for cell in by["desync-4x", choice]]
    assert whole == 2 * ["-", "-", "-", "5.0 ± 0.3"]
    assert [cell.strip() for cell in by["ladder", "last"]][:2] == ["-", "3.0 ± 0.3"]
    wanted = [
        [cell.strip() for cell in line.split("|")] for line in frontier.table_of_speeds_wanted(cells, repo).splitlines()
    ]
    assert wanted[2][1:4] == ["1.05x", "ladder", "50%, that cost least alone"] and wanted[-1][1:4] == [
        "1.40x",
        "desync-4x",
        "all",
    ]


def test_what_single_layers_cost_follows_the_turning_of_their_reads(repo: Path) -> None:
    smol, gemma = (json.loads((repo / file).read_text()) for file in page.LAYERS.values())
    turned = [[layer[name] for layer in m["layers"]] for m in (smol, gemma) for name in ("attn_turned", "mlp_turned")]
    assert max(map(median, turned)) < 0.035
    assert all(layer["first_token"] < 0.01 for layer in smol["layers"][:2])
    more = json.loads((repo / frontier.MORE_COSTS).read_text())
    assert {n: smol["ladder"]["alone"][int(n)] for n in more["check"]["ladder"]} == more["check"]["ladder"]
    for model in (smol, gemma):
        for wiring in ("ladder", "farskip"):
            assert model[wiring]["rank correlation with first_token"] < 0
            assert model[wiring]["rank correlation with mlp_turned"] > 0.4
    assert set(range(30)) - set(smol["ladder"]["kept"]) == {0, 1} and len(gemma["ladder"]["kept"]) == 14


def test_passages_end_with_a_word_of_an_earlier_sentence() -> None:
    """A name is asked. A short or new word, one of the last sentence, and what is no prose are not."""
    passage = (
        'The captain had a parrot, and its name was Barnaby. "It talks," he said to the boy. All of the sailors feared '
        "the old bird, because it never forgot a word that was spoken. So the boy asked who stole the bread, "
        "and the captain looked at the parrot and said that it was {}."
    )
    (found,) = passages.passages(passage.format("Barnaby"), 4)
    assert len(found) == 4 and found[1] == '"It talks," he said to the boy.' and found[-1].endswith("it was Barnaby")
    for word in ("he", "nobody", "captain", "Barnaby2", "0x7f [1] {a} == <tag> (b|c) #define Barnaby"):
        assert passages.passages(passage.format(word), 4) == [], word
    several = "\n\n".join(
        passage.replace("parrot", f"{name} parrot").format("Barnaby") for name in ("red", "old", "big")
    )
    assert [p[0][18:21] for p in passages.passages(several, 2)] == ["red", "old"]


def test_a_mirror_of_passages_is_read_by_the_task_of_lm_eval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = "The old fox lived in the wood for many years. It was known to all as Reynard by name. Nobody there "
    sentences += "was as clever, and the hunters who came each winter went home with nothing but cold feet and stories "
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": f"{sentences}of Reynard."}) + "\n")
    for folder, *more in (["whole"], ["last", "--last-sentence"]):
        start("studies.real", "passages", str(tmp_path / "text.jsonl"), str(tmp_path / folder), *more)
        assert capsys.readouterr().out.startswith("1 passages in")
        with load_tasks(select_any("paper", ["lambada_openai"]), tmp_path / folder) as (task,):
            (leaf,) = task.lm_eval["tasks"].values()
            assert leaf.doc_to_target(leaf.eval_docs[0]) == " Reynard"
            assert leaf.doc_to_text(leaf.eval_docs[0]).startswith(
                "The old fox" if folder == "whole" else "Nobody there"
            )
        assert task.benchmark.beside and heal.tasks_of(tmp_path / folder) == f"{heal.TASKS},lambada_openai"
    assert heal.tasks_of(tmp_path) == heal.TASKS


def test_what_stands_beside_the_mean_is_shown_where_a_raw_file_has_it(repo: Path) -> None:
    (whole, stored) = page.read(repo)[page.RAW[0]], json.loads((repo / page.PASSAGES).read_text())
    before, columns = page.scores(whole), [name for name in page.beside(stored).split("|")[2:-1:2]]
    assert len(page.beside(stored).splitlines()) == 2 + len(stored["scores"]) and len(columns) >= 3
    original, name = page.baseline_of(whole), whole["differences"][0]["model"]
    loss = {"column": "lambada_openai loss", "nats": 0.25, "stderr": 0.01, "unit": "answer"}
    whole["differences"][0]["perplexities"] = [loss]
    for model, value in ((original, 2.0), (name, 2.25)):
        whole["scores"][model]["lambada_openai loss"] = {
            "value": value,
            "stderr": 0.1,
            "n": 9,
            "metric": "nll_per_answer",
        }
    whole["differences"] = whole["differences"][:1]
    whole["scores"] = {model: whole["scores"][model] for model in (original, name)}
    first, beside = page.scores(whole).split("\n\n")
    assert set(first.splitlines()) <= set(before.splitlines()), "the mean and its table stay the same"
    assert beside.splitlines()[2:] == ["| original | 2.000 |  |", f"| {name} | 2.250 | +0.250 ± 0.010 |"]


def test_every_stored_case_is_a_recipe(repo: Path, tmp_path: Path) -> None:
    texts = {name: tmp_path / name for name in ("own", "doc", "foreign", "more", "day")}
    others = (page.GEMMA, page.RECIPE, page.RESULTS / "real_kl_beside_sft_smollm2_1xh100.json")
    stored = [*page.read(repo).values(), *(json.loads((repo / file).read_text()) for file in others)]
    for case in (case for file in stored for case in file["runs"]):
        if {"optim.kind", "train.anneal_share"} & case.get("set", {}).keys():
            continue  # Muon and annealed wirings, which lost and were removed (benchmarks/results/LOG.md)
        read = Recipe.model_validate(recipe_of(case, tmp_path / "student", tmp_path, texts))
        assert read.optim.lr == case["lr"] and read.train.steps == case["steps"]
        assert len(read.data.sources) == len(case["text"].split("+"))


def test_cases_are_checked_before_the_first_one_runs(tmp_path: Path) -> None:
    case = {"name": "a", "wiring": "ladder", "layers": "50%", "text": "own", "tokens": 1e7, "lr": 1e-3, "seed": 1}
    texts, file = {"own": tmp_path}, tmp_path / "cases.jsonl"

    def read(*cases: dict) -> list[dict]:
        file.write_text("\n".join(map(json.dumps, cases)))
        return read_cases(file, texts)

    own = {"set": {"objective.temperature": 2.0, "objective.hidden.weight": 1e-4, "optim.betas": [0.9, 0.98]}}
    own["set"]["optim.train"] = ["converted"]
    (taken,) = read(case | own)
    recipe = Recipe.model_validate(recipe_of(taken, tmp_path, tmp_path, texts))
    assert (recipe.seed, recipe.objective.temperature, recipe.objective.hidden.weight) == (1, 2.0, 1e-4)
    assert (recipe.optim.betas, recipe.optim.train) == ([0.9, 0.98], ["converted"])
    with pytest.raises(ValueError, match="two cases have one name"):
        read(case, case)
    with pytest.raises(ValueError, match="case a: seeds missing or unknown"):
        read(case | {"seeds": [1, 2]})
    with pytest.raises(ValueError, match="heat"):
        read(case | {"set": {"objective.heat": 2}})


def test_the_cells_of_the_frontier_are_cases_that_heal_takes(
    repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is healed as its stored run was, and is converted as its name says."""
    file, stored = tmp_path / "cases", {page.cell_of(run): run for run in page.read_cells(repo)["runs"]}
    file.write_text("\n".join(json.dumps(case) for case in frontiers_cells.cases(repo)))
    texts = dict.fromkeys(("own", "doc", "foreign"), tmp_path)
    cases = {page.cell_of(case): case for case in read_cases(file, texts)}
    assert cases.keys() == stored.keys() and len(cases) == 35
    for cell, run in stored.items():
        case = cases[cell]
        assert select_layers(case["layers"], page.DEPTH) == select_layers(run["layers"], page.DEPTH)
        for key in ("set", "text", "tokens", "batch", "lr", "seed", "tp_degree"):
            assert case.get(key) == run.get(key)
    ran: list[tuple[Any, ...]] = []
    monkeypatch.setattr(heal, "_fcsd", lambda *words, **_: ran.append(words[2:]) or 1 / (words[2] == "convert"))
    for cell in (("ladder attn-only", "cheapest", 0.75), ("desync-2x", "last", 1.0)):
        with pytest.raises(ZeroDivisionError):
            heal.heal(cases[cell], tmp_path / "teacher", tmp_path, texts, {})
    assert [words[4:] for words in ran if words[0] == "convert"] == [
        ("ladder", "--layers", "0,4-6,8-11,13-16,19-29", "--no-check", "--variant", "attn-only"),
        ("desync-2x", "--layers", "all", "--no-check", "--tp-degree", 3),
    ]


def test_failed_cases_run_again_and_two_runs_of_a_gpu_have_two_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"wiring": "ladder", "layers": "50%", "text": "own", "tokens": 1e7, "lr": 1e-3}
    cases, out, ran = tmp_path / "cases.jsonl", tmp_path / "out", []
    cases.write_text("\n".join(json.dumps({"name": name, "eval": name == "c", **case}) for name in "abc"))
    both = threading.Barrier(2)

    def pretended(case: dict, *given: object) -> dict:
        ran.append((case["name"], given[-1]))
        if len(ran) <= 2:
            both.wait(60)  # two are at work at the same time
        if len(ran) <= 3 and case["name"] == "b":
            raise ValueError("lost")
        return {**case, "kl": {}}

    monkeypatch.setattr(heal, "heal", pretended)
    monkeypatch.setattr(heal, "scores", lambda *_: {"scores": {}})
    words = ["heal", "teacher", str(out), "--cases", str(cases), "--text", "own=own", "--at-once", "2", "--mirror", "m"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")  # others use the first ones
    for expected in ("abc", "b", ""):
        before = len(ran)
        start("studies.real", *words)
        assert sorted(name for name, _ in ran[before:]) == list(expected)
    assert len({env["MASTER_PORT"] for _, env in ran[:2]}) == 2
    assert {env["CUDA_VISIBLE_DEVICES"] for _, env in ran} == {"6"}
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [line.get("failed") for line in lines if line["name"] == "b"] == ["lost", None]
    before, after = (line for line in lines if line["name"] == "c")  # a run is kept while its benchmarks are asked
    assert before["failed"] == "the benchmarks have not ended" and before["kl"] == {}
    assert after["scores"] == {} and "failed" not in after
    assert heal.gpu_names(2) == ["6", "7"]
    with pytest.raises(ValueError, match="3 GPUs are wanted, and CUDA_VISIBLE_DEVICES=6,7 names 2"):
        heal.gpu_names(3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert heal.gpu_names(3) == ["0", "1", "2"]


def test_a_student_is_measured_by_the_divergence_of_all_logits(tmp_path: Path) -> None:
    """The KL of full logits, in fp64, over the rows of a text; that of the teacher to itself is 0."""
    models = [tiny.model("llama", seed, initializer_range=0.2) for seed in range(3)]
    folders = [tmp_path / str(seed) for seed in range(3)]
    for model, folder in zip(models, folders, strict=True):
        model.save_pretrained(folder)
    ids = tiny.tokens(4, 32)
    (tmp_path / "text/held_out").mkdir(parents=True)
    pq.write_table(pa.table({"input_ids": ids.tolist()}), tmp_path / "text/held_out/a.parquet")
    found = [runner.measure(student, folders[0], {"text": tmp_path / "text"}) for student in folders]
    with torch.no_grad():
        theirs, *each = (model.double()(ids.view(1, -1)).logits[0, :-1].log_softmax(-1) for model in models)
    expected = [float((theirs.exp() * (theirs - own)).sum(-1).mean()) for own in each]
    assert [one["text"]["kl"] for one in found] == pytest.approx([0, *expected], rel=1e-4, abs=1e-7)
    assert [one["text"]["tokens"] for one in found] == [127] * 3 and min(expected) > 1e-3


def test_the_cases_of_the_study_of_ranks_are_taken_and_its_table_is_that_of_the_stored_runs(
    repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["ranks", "--ranks", "full,4", "--lrs", "1e-3,3e-3", "--tokens", "1e6", "--set", "seed=7"]
    start("studies.real", *command)
    (tmp_path / "cases").write_text(capsys.readouterr().out)
    cases = read_cases(tmp_path / "cases", {"own": tmp_path})
    assert [case["set"].get("train.adapter.rank") for case in cases] == [None, 4, 4]
    runs = [{**case, "kl": {"own": {"kl": kl}}} for case, kl in zip(cases, (0.5, 0.9, 0.6), strict=True)]
    runs[0]["untrained_kl"] = {"own": {"kl": 2.0}}
    rows = ranks.table([{"model": "tiny", "runs": runs}]).splitlines()[2:]
    assert [[cell.strip() for cell in row.split("|")[3:-1]] for row in rows] == [
        ["all weights", "0.001", "1", "2.00 → 0.500", "75.0%", "100.0%"],
        ["rank 4", "0.003", "1", "2.00 → 0.600", "70.0%", "93.3%"],
    ]
    stored = json.loads((repo / PARTS).read_text())
    (found,) = (found for found in stored["differences"] if found["model"] == "half-frozen-41m")
    points, error = page.mean_difference(stored, found["model"])
    asked = {"model": "tiny", "runs": runs, "differences": [{**found, "model": runs[2]["name"]}]}
    asked["scores"] = {"original": stored["scores"]["original"], runs[2]["name"]: {}}
    last = [row.split("|")[-2].strip() for row in ranks.table([asked]).splitlines()]
    assert last[:1] + last[2:] == ["points lost", "", f"{-points:.1f} ± {error:.1f}"]
    page_of_ranks = (repo / ranks.PAGE).read_text()
    assert ranks.filled(page_of_ranks, ranks.read(repo)) == page_of_ranks, "run python -m studies.real pages"


def points_of(file: dict, model: str, column: str) -> tuple[float, float]:
    """Points of a model minus those of the original on one benchmark, and their standard error."""
    (tasks,) = (found["tasks"] for found in file["differences"] if found["model"] == model)
    (task,) = (task for task in tasks if task["column"] == column)
    return task["points"], task["stderr"]


def names_of_seeds(file: dict, of: str) -> list[str]:
    """The runs of the shorter recipe of ``half`` or ``far``, by seed."""
    return sorted(run["name"] for run in file["runs"] if run["name"].startswith(f"{of}-converted-41m-"))


def real_model(repo: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script with this environment, from another folder."""
    env = {**os.environ, "FCSD_VENV": sys.prefix}
    return subprocess.run(
        [str(repo / "scripts/real_model.sh"), *arguments], cwd=cwd, env=env, capture_output=True, text=True
    )


def test_minutes_that_are_no_number_print_the_usage(repo: Path, tmp_path: Path) -> None:
    done = real_model(repo, tmp_path, "soon")
    assert done.returncode == 2 and "Usage: scripts/real_model.sh [MINUTES] [OUT]" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_a_real_model_is_healed_from_its_package(repo: Path, tmp_path: Path) -> None:
    """It downloads 98 MB and takes minutes. A second call repeats nothing and says the same."""
    done = real_model(repo, tmp_path, "1", "out")
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    untrained, healed = map(float, re.findall(r"([\d.]+) (?:untrained|after)", last))
    assert healed < untrained
    assert (tmp_path / "out/healed/model.safetensors").is_file()
    assert real_model(repo, tmp_path, "1", "out").stdout.splitlines()[-1] == last


def test_last_words_and_held_out_text_are_as_likely_after_longer_runs(repo: Path) -> None:
    raw = json.loads((repo / page.CONVERTED).read_text())
    healed = [found for found in raw["differences"] if found["model"].startswith(("half", "far"))]
    words = [points_of(raw, found["model"], "lambada_openai") for found in healed]
    assert len(healed) == 4 and all(abs(points) < 1.96 * error and error < 1.85 for points, error in words)
    assert all(one["loss"]["nats"] < 1.96 * one["loss"]["stderr"] for one in healed)


def test_no_target_of_points_was_reached(repo: Path) -> None:
    raw = page.read(repo)
    every = [
        (found["model"], -page.mean_difference(file, found["model"])[0])
        for file in raw.values()
        for found in file.get("differences", ())
        if not found["model"].endswith("-untrained")
    ]
    best = {of: min(points for name, points in every if of in name) for of in ("half", "far")}
    nearly = min(points for name, points in every if any(of in name for of in ("far", "auto")))
    assert nearly == best["far"] > 0.7 and best["half"] > 0.5
    kl = [
        [run["kl"][text]["kl"] for text in ("own", "foreign")]
        for file in raw.values()
        for run in file["runs"]
        if "kl" in run and any(of in run["name"] for of in ("far", "auto"))
    ]
    assert all(min(column) > 0.08 for column in zip(*kl, strict=True))


def test_hellaswag_loses_more_on_advice_than_on_videos(repo: Path) -> None:
    seeds = page.read(repo)[page.CONVERTED_SEEDS]
    names = [*names_of_seeds(seeds, "half"), *names_of_seeds(seeds, "far")]
    assert len(names) == 6
    for name in names:
        counts = seeds["hellaswag"][name]
        fewer = sum(one["lost"] - one["won"] for one in counts.values())
        assert -100 * fewer / 2500 == pytest.approx(points_of(seeds, name, "HS")[0])
        assert page.won(counts["advice"])[0] < page.won(counts["videos"])[0] < 0
    lengths = seeds["hellaswag_by_length"]
    counts = [lengths[name] for name in names]
    assert all(by["advice"] == seeds["hellaswag"][name]["advice"] for name, by in zip(names, counts, strict=True))
    short, long = ([page.won(by[part]) for by in counts] for part in ("videos, up to 50", "videos, over 75"))
    assert all(points < 0 for points, _ in short) and all(points > 0 for points, _ in long)
    assert lengths["median_characters"]["advice"] > 2 * lengths["median_characters"]["videos"]


def test_everyday_text_wins_at_most_one_of_four_points_of_advice_back(repo: Path) -> None:
    raw = json.loads((repo / page.EVERYDAY).read_text())
    won = [
        {
            kind: page.won(one)
            for kind, one in raw["hellaswag"][f"half-day-41m-{n} against half-converted-41m-{n}"].items()
        }
        for n in (0, 1)
    ]
    assert all(one["advice"][0] > 0 > one["videos"][0] for one in won)
    assert max(points + 1.645 * error for points, error in (one["advice"] for one in won)) < 1.05  # at most one
    seeds = json.loads((repo / page.CONVERTED_SEEDS).read_text())["hellaswag"]
    assert 3.5 < -mean(page.won(seeds[f"half-converted-41m-{n}"]["advice"])[0] for n in (0, 1)) < 4.5  # about four


def test_all_layers_keep_the_last_word_and_miss_the_target_on_own_text_alone(repo: Path) -> None:
    raw = json.loads((repo / page.LONGER).read_text())
    (best,) = page.best([raw])  # by the divergence
    (run,) = (run for run in raw["runs"] if run["name"] == best["name"])
    kl = {name: one["kl"] for name, one in run["kl"].items()}
    assert kl["doc"] < kl["foreign"] < 0.15 < kl["own"]
    points, error = points_of(raw, run["name"], "lambada_openai")
    assert abs(points) < 1.96 * error
    assert raw["scores"][f"{run['name']}-untrained"]["lambada_openai"]["value"] == 0
    losses = [run["original"], raw["scores"]["original"]]
    losses = [{name: one[name]["value"] for name in one if name != "Held-out loss"} for one in losses]
    assert losses[0] == losses[1]  # the digits are in no score


def test_the_law_holds_the_divergence_of_a_longer_run_of_all_layers_and_not_its_points(repo: Path) -> None:
    raw = json.loads((repo / page.LONGER).read_text())
    shorter, run = (next(one for one in raw["runs"] if one["name"] == f"all-{n}m") for n in (186, 358))
    kl, less = ({name: one["kl"] for name, one in which["kl"].items()} for which in (run, shorter))
    assert all(kl[name] < less[name] for name in kl) and run["batch"] == shorter["batch"] == 65536
    lost = [-page.mean_difference(raw, one["name"])[0] for one in (shorter, run)]
    assert lost[1] > lost[0], "a lower divergence won no points back"
    without = [
        {**file, "runs": [one for one in file["runs"] if one["name"] != "all-358m"]} for file in healing.stored(repo)
    ]
    fitted = healing.runs_of(without, repo=repo)
    share, whole = (exp(value) for value in healing.runs_of([{**raw, "runs": [run]}], repo=repo)[0]["at"][1:3])
    before = healing.fits(fitted, [*fitted, *healing.runs_of(without, None, repo)])
    told = losses(share, (whole, whole), run["tokens"] / 1e6, before)
    most = told["points"][1]
    assert told["kl"][0] < kl["own"] < told["kl"][1] and most < lost[1] < most + 0.1


def test_the_page_takes_other_runs_of_all_layers_and_of_everyday_text(repo: Path) -> None:
    """A longer run of all layers, which is asked questions, and a run that read text of everyday doings, too."""
    raw, text = page.read(repo), (repo / page.PAGE).read_text()
    seeds, (run,) = raw[page.CONVERTED_SEEDS], raw[page.ALL]["runs"]
    (found,) = (found for found in seeds["differences"] if found["model"] == "half-converted-41m-0")
    (half,) = (run for run in seeds["runs"] if run["name"] == "half-converted-41m-0")
    scores = {"original": seeds["scores"]["original"], "all-300m": seeds["scores"]["half-converted-41m-0"]}
    longer = {**run, "name": "all-300m", "tokens": 300e6, "kl": {text: {"kl": 0.1} for text in run["kl"]}}
    raw[page.LONGER] = {"runs": [longer], "scores": scores, "differences": [{**found, "model": "all-300m"}]}
    day, counts = "half-day-41m-0", {"questions": 100, "original_right": 50, "lost": 10, "won": 30}
    raw[page.EVERYDAY] = {
        "runs": [{**half, "name": day, "text": "own+doc+day+foreign"}],
        "scores": {"original": scores["original"], day: scores["all-300m"]},
        "differences": [{**found, "model": day}],
        "hellaswag": {
            day: seeds["hellaswag"]["half-converted-41m-0"],
            f"{day} against half-converted-41m-0": {"videos": counts, "advice": counts},
        },
    }
    filled = page.filled(text, raw, repo)
    points, error = (abs(value) for value in page.mean_difference(seeds, "half-converted-41m-0"))
    (row,) = (" ".join(line.split()) for line in filled.splitlines() if line.startswith("| 30 of 30:"))
    assert f"| 300 M | converted layers | {points:.1f} ± {error:.1f} of 7,214 |" in row and "6.42 → 0.100" in row
    assert "1.5 points with ladder on 30 layers was" in filled
    row = " ".join(page.everyday(raw[page.EVERYDAY]).splitlines()[-1].split())
    assert row.startswith("| 0 |") and row.count("+20.0 ± 6.0") == 2  # sqrt(0.4 - 0.2^2) / 10
    told = page.won(seeds["hellaswag"]["half-converted-41m-0"]["advice"])
    assert "| {:+.1f} ± {:.1f} |".format(*told) in row
    assert "| all-300m |" in filled and "| all-151m |" not in filled


def test_gemmas_weights_are_a_fifth_and_its_tokens_are_those_of_its_file(repo: Path) -> None:
    untrained = json.loads((repo / page.UNTRAINED_GEMMA).read_text())
    without = [
        {**run, "kl": {"foreign": run["kl"]["foreign"]}} for run in json.loads((repo / PARTS).read_text())["runs"]
    ]
    assert page.runs([{"runs": without}]).count("| not measured |") == len(without)  # it wrote no text
    smol, gemma = (found["median"] for found in untrained["root_mean_square_of_matrices"].values())
    assert round(smol / gemma) == 5 and not untrained["tokens"]["different_texts"]


def test_gemma_lost_most_on_arc_easy_and_farskip_on_more_layers_lost_more(repo: Path) -> None:
    raw = json.loads((repo / page.GEMMA).read_text())
    half, cut, far = raw["runs"]
    differences = {found["model"]: found for found in raw["differences"]}
    assert [name for name in differences if not name.endswith("untrained")] == [half["name"], far["name"]]
    most, words = [], []
    for run in (half, far):
        tasks = {task["column"]: task for task in differences[run["name"]]["tasks"]}
        most.append(min((tasks[name] for name in page.informative(raw)), key=lambda task: task["points"]))
        words.append(tasks["lambada_openai"])
    assert {one["column"] for one in most} == {"ARC-E"} and cut["name"] not in differences
    assert words[0]["low"] < 0 < words[0]["high"] and words[1]["high"] < 0
    beside = raw["far_minus_half"]
    assert beside["models"] == [far["name"], half["name"]] and beside["points"] == pytest.approx(
        page.mean_difference(raw, far["name"])[0] - page.mean_difference(raw, half["name"])[0]
    )
    assert {round(far["kl"][name]["kl"] / half["kl"][name]["kl"]) for name in ("own", "foreign")} == {2}
    alike = json.loads((repo / "benchmarks/results/real_tokenizers_cpu.json").read_text())[
        "gemma3_with_the_tokenizer_of_5_23"
    ]
    assert not alike["different_answers"]
    # The questions were asked with the right tokenizer: the original is above chance in all but the hardest task.
    assert "gives the ids of 5.23" in raw["tokenizer"] and raw["scores"]["original"]["ARC-E"]["value"] > 0.4


def test_digits_as_words_change_no_question_but_those_of_piqa(repo: Path) -> None:
    raw = json.loads((repo / "benchmarks/results/real_tokenizers_cpu.json").read_text())
    versions, digits = raw["smollm2_by_version"], raw["smollm2_digits_alone"]
    assert not versions["different_documents"] and versions["documents"] == 1000
    assert digits.pop("foreign text")["different"] and digits.pop("PIQA")["different"]
    assert digits.keys() == {"ARC-E", "HS", "OBook", "lambada_openai"}
    assert not any(asked["different"] for asked in digits.values())


def test_kl_beside_sft_differ_in_the_objective_alone_and_were_asked_as_they_ended(repo: Path) -> None:
    raw = json.loads((repo / "benchmarks/results/real_kl_beside_sft_smollm2_1xh100.json").read_text())
    by_kl, by_sft = raw["runs"]
    objectives = [run["recipe"].pop("objective") for run in raw["runs"]]
    assert objectives == [{"kl": 1.0, "sft": 0.0}, {"kl": 0.0, "sft": 1.0}]
    assert by_kl["recipe"] | {"name": ""} == by_sft["recipe"] | {"name": ""}, "the objective alone differs"
    asked = raw["asked"]
    assert asked["kl_minus_sft"]["overall"]["high"] < 3, "the target of three is missed"
    assert abs(points_of(asked, by_kl["name"], "lambada_openai")[0]) < 0.05
    apart = [
        abs(a["kl"][t]["kl"] - b["kl"][t]["kl"])
        for a, b in zip(asked["runs"], raw["runs"], strict=True)
        for t in a["kl"]
    ]
    assert max(apart) < 0.001
    again = raw["again"]["runs"]
    for run in raw["runs"]:
        (first, then), repeated = run["curve"]["held_out"][:2], again[run["name"]]["curve"]["held_out"]
        assert (first["step"], then["step"]) == (repeated[0]["step"], repeated[1]["step"]) and then[
            "tokens"
        ] // 1e6 == 15
        assert all(round(abs(value - repeated[1][key]), 3) <= 0.001 for key, value in then.items())
    assert again[by_kl["name"]]["steps"] < by_kl["steps"]


def test_healing_to_int4_had_equal_tokens_and_is_rounded_again(repo: Path) -> None:
    raw = json.loads((repo / "benchmarks/results/real_smollm2_int4_healing_4xh100.json").read_text())
    assert {run["tokens"] for run in raw["runs"]} == {24.576e6}
    raw = json.loads((repo / "benchmarks/results/real_smollm2_int4_healing_cpu.json").read_text())
    kl = {name: form["kl"] for name, form in raw["llm_compressor"]["forms"].items()}
    plain, after = raw["forms"]["healed"]["kl"], raw["forms"]["healed, then rounded"]["kl"]
    again = kl["healed with rounded weights, rounded to nearest again"]
    assert plain == pytest.approx(kl["healed"], rel=1e-6) and again > after


def test_rounding_after_training_costs_the_healed_model_no_more_than_the_original(repo: Path) -> None:
    raw = json.loads((repo / page.ROUNDED).read_text())["after_training"]
    forms = {form["name"]: form for form in raw["forms"]}
    healed = "half-foreign-kl-24m"
    for how, more in raw["more_than_original"].items():
        original, after = (forms[f"{name}+{how}"] for name in ("original", healed))
        costs = [form["minus_unrounded"]["overall"] for form in (original, after)]
        assert 0 < more["points"] <= 2 * more["stderr"]
        assert more["points"] == pytest.approx(costs[1]["points"] - costs[0]["points"], abs=1e-6)
        assert all(0.45 < form["minus_original"]["overall"]["stderr"] < 0.65 for form in (original, after))
    for name in ("original", healed):
        fine, coarse = (forms[f"{name}+int4:g{group}"] for group in (32, 64))
        assert all(fine["kl"][of]["kl"] < coarse["kl"][of]["kl"] for of in ("own", "doc", "foreign"))
