"""The search over layers: right sets from few measurements, on a text; compared on another."""

import json
import random
from itertools import combinations
from pathlib import Path

import eval_data
import pytest
import tiny
from typer.testing import CliRunner

from fcsd.cli.main import app
from fcsd.errors import ConfigError
from fcsd.eval.layers.choose import choose_layers, greedy_path, measuring, search
from fcsd.eval.layers.compare_choice import compare_choice, random_sets
from fcsd.eval.layers.rewiring import load_subject
from fcsd.eval.statistics import estimate, paired_difference
from fcsd.models.selection import select_layers


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "teacher"
    tiny.model("deepseek_v2", vocab_size=400, num_hidden_layers=5).save_pretrained(path)
    eval_data.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> tuple[Path, Path]:
    """A text to search on, and one to check on that shares a document with it."""
    rng, folder = random.Random(0), tmp_path_factory.mktemp("texts")
    documents = [" ".join(rng.choices(eval_data.WORDS, k=rng.randint(5, 40))) for _ in range(13)]
    for name, part in (("search", documents[:7]), ("check", documents[6:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in part))
    return folder / "search.jsonl", folder / "check.jsonl"


def interacting(seed: int, depth: int):
    """A loss whose layers make each other dearer, neighbours most; and a list of the sets it was asked for."""
    rng, asked = random.Random(seed), []
    own = [rng.random() for _ in range(depth)]
    pair = {(a, b): rng.random() * (3 if b == a + 1 else 0.3) for a, b in combinations(range(depth), 2)}

    def loss(layers):
        asked.append(layers)
        return 1 + sum(own[i] for i in layers) + sum(pair[both] for both in combinations(layers, 2))

    return loss, asked


@pytest.mark.parametrize("seed", range(20))
def test_the_lazy_path_is_the_greedy_path(seed):
    depth = 12
    loss, asked = interacting(seed, depth)
    path = list(greedy_path(loss, depth))
    distinct = len(set(asked))
    chosen = ()
    for n in range(depth + 1):
        assert path[n] == chosen
        more = [tuple(sorted((*chosen, i))) for i in range(depth) if i not in chosen]
        chosen = min(more, key=loss, default=())
    assert distinct < depth * (depth + 1) / 2, "fewer sets measured than by plain greedy search"


def test_a_plain_end_is_chosen_where_it_costs_less():
    # Alone layer 1 is the cheapest; only together are 2 and 3 cheaper still.
    losses = {(1,): 1.1, (2, 3): 1.05}

    def measure(layers):
        return [(losses.get(layers, 1 + 0.2 * len(layers)), 1)]

    steps, path = search(measure, 4, sizes=[2, 1])
    assert [(step.layers, step.found_by) for step in steps] == [((2, 3), "last"), ((1,), "greedy")]
    assert [step.layers for step in path] == [(), (1,), (0, 1)]


@pytest.mark.parametrize(("allowed", "chosen"), [(0.0, ()), (0.11, (0,)), (0.31, (0, 2)), (5.0, (0, 1, 2))])
def test_budget(allowed, chosen):
    costs = (0.1, 0.5, 0.2)

    def measure(layers):
        return [(2 + 2 * sum(costs[i] for i in layers), 1)]

    (step,), _ = search(measure, 3, allowed=allowed)
    assert step.layers == chosen and step.increase <= allowed


def test_choices_and_comparison_on_a_model(teacher, texts, tmp_path):
    text, check = texts
    choice = choose_layers(str(teacher), text=text, layers=[1, 3], check=check, out=tmp_path)
    subject = load_subject(str(teacher))
    seen = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    measure = measuring(subject, seen, None)
    costs = {i: estimate(measure((i,)))[0] for i in range(5)}
    best = min(costs, key=lambda i: costs[i])
    assert choice["choices"][0]["layers"] == (best,) and choice["choices"][0]["loss"] == pytest.approx(costs[best])
    for found in choice["choices"]:
        assert select_layers(found["spec"], 5) == found["layers"] and len(found["layers"]) == found["n"]
        assert found["loss"] <= estimate(measure(tuple(range(found["n"]))))[0] + 1e-6
    assert choice["path"][0]["increase"] == 0

    unseen = [json.loads(line)["text"] for line in check.read_text().splitlines()][1:]
    measure = measuring(subject, unseen, None)
    for found, compared in zip(choice["choices"], choice["comparison"], strict=True):
        chosen = measure(found["layers"])
        assert compared["chosen"]["loss"] == pytest.approx(estimate(chosen)[0])
        last = tuple(range(5 - found["n"], 5))
        assert compared["last"]["difference"] == pytest.approx(paired_difference(measure(last), chosen), abs=1e-6)
        assert len(compared["random"]) == {1: 5, 3: 10}[found["n"]], "all there are"
        mean = sum(entry["difference"][0] for entry in compared["random"]) / len(compared["random"])
        assert compared["random_mean"]["difference"][0] == pytest.approx(mean)
        better = [entry for entry in compared["random"] if entry["difference"][0] < 0]
        assert compared["random_mean"]["better"] == len(better)
    assert json.loads((tmp_path / "choice.json").read_text()) == json.loads(json.dumps(choice))
    assert (tmp_path / "comparison.md").read_text().count("\n") == 2 + 2 * 4
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_is_not_measured_again(teacher, texts, tmp_path, monkeypatch):
    text, _ = texts
    first = choose_layers(str(teacher), text=text, layers=[2], out=tmp_path)
    monkeypatch.setattr("fcsd.eval.layers.rewiring.wire", lambda *_: pytest.fail("measured again"))
    assert choose_layers(str(teacher), text=text, layers=[2], out=tmp_path) == first


def test_random_sets_are_distinct_and_repeatable():
    sets = random_sets(4, 10)
    assert len(set(sets)) == 20 and all(len(set(layers)) == 4 and max(layers) < 10 for layers in sets)
    assert random_sets(4, 10) == sets != random_sets(4, 10, seed=1)


def test_refusals(teacher, texts):
    text, _ = texts
    options = (
        {},
        {"layers": [1], "budget": "2%"},
        {"layers": [5]},
        {"layers": [0]},
        {"budget": "2"},
        {"budget": "-1%"},
    )
    for wrong in options:
        with pytest.raises(ConfigError):
            choose_layers(str(teacher), text=text, **wrong)
    with pytest.raises(ConfigError, match="no document that is not in"):
        choose_layers(str(teacher), text=text, layers=[1], check=text)


def test_command_line_prints_what_convert_takes(teacher, texts):
    result = CliRunner().invoke(app, ["choose-layers", str(teacher), "--text", str(texts[0]), "--budget", "1000%"])
    assert result.exit_code == 0 and select_layers(result.stdout.strip(), 5) == (0, 1, 2, 3, 4)
    result = CliRunner().invoke(app, ["choose-layers", str(teacher), "--text", str(texts[0]), "--layers", "some"])
    assert result.exit_code == 2


def test_the_comparison_of_a_set_with_itself_differ_by_nothing(teacher, texts):
    subject = load_subject(str(teacher))
    measure = measuring(subject, ["river stone lamp", "music winter paper silver"], None)
    assert compare_choice(measure, (0, 1), subject)["first"]["difference"] == (0, 0)
