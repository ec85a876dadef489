"""The bundled data: real schemas, stock prompts, even answers, and nothing shared with training."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path

import jinja2
import pytest
import yaml

# task -> (lm-eval's file, the scored split, field that holds the right place)
TASKS = {
    "piqa": ("piqa/piqa.yaml", "baber/piqa/default/validation", "label"),
    "arc_easy": ("arc/arc_easy.yaml", "allenai/ai2_arc/ARC-Easy/test", "answerKey"),
    "arc_challenge": ("arc/arc_easy.yaml", "allenai/ai2_arc/ARC-Challenge/test", "answerKey"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "Rowan/hellaswag/default/validation", "label"),
    "commonsense_qa": (
        "commonsense_qa/default.yaml",
        "tau/commonsense_qa/default/validation",
        "answerKey",
    ),
    "winogrande": ("winogrande/default.yaml", "allenai/winogrande/winogrande_xl/validation", "answer"),
    "openbookqa": ("openbookqa/openbookqa.yaml", "allenai/openbookqa/main/test", "answerKey"),
    "mmlu": ("mmlu/default/_default_template_yaml", "cais/mmlu/*/test", "answer"),
    "gsm8k": ("gsm8k/gsm8k.yaml", "openai/gsm8k/main/test", None),
    "humaneval_plus": ("humaneval/humaneval.yaml", "evalplus/humanevalplus/default/test", None),
    "mbpp_plus": ("mbpp/mbpp_plus.yaml", "evalplus/mbppplus/default/test", None),
}
LM_EVAL = Path(find_spec("lm_eval").origin).parent / "tasks"


class _Loader(yaml.SafeLoader):
    """Reads lm-eval's task files without importing what their ``!function`` names."""


_Loader.add_constructor("!function", lambda loader, node: node.value)


def rows_of(repo: Path, files: str) -> list[dict]:
    paths = sorted((repo / "assets/mirror").glob(f"{files}.jsonl"))
    return [json.loads(line) for path in paths for line in path.open()]


@cache
def template_of(file: str) -> Callable[[dict], str]:
    """What makes lm-eval's prompt of a row: the template in a file of its tasks, or the field that the file names."""
    template = yaml.load((LM_EVAL / file).read_text(), _Loader)["doc_to_text"]
    return jinja2.Template(template, keep_trailing_newline=True).render if "{{" in template else itemgetter(template)


def render(task: str, row: dict) -> tuple[str, str]:
    """The prompt lm-eval's own template makes of a row, and the right continuation."""
    if task == "winogrande":
        before, after = row["sentence"].split("_")
        return before + row[f"option{row['answer']}"], after
    if task == "hellaswag":
        prompt = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        return prompt, " " + row["endings"][int(row["label"])]
    prompt = template_of(TASKS[task][0])(row)
    if task == "piqa":
        return prompt, " " + row[f"sol{row['label'] + 1}"]
    if task in ("commonsense_qa", "mmlu"):
        return prompt, " " + (row["answerKey"] if "answerKey" in row else "ABCD"[row["answer"]])
    if task == "gsm8k":
        return prompt, " " + row["answer"]
    if task == "humaneval_plus":
        return prompt, row["canonical_solution"]
    if task == "mbpp_plus":
        return prompt, row["code"] + "\n[DONE]"
    return prompt, " " + row["choices"]["text"][row["choices"]["label"].index(row["answerKey"])]


@pytest.fixture(scope="module")
def makers(repo):
    """studies/teacher's modules, which import each other by their bare names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repo / "studies/teacher"))
        import items
        import world

        yield items, world


@pytest.fixture(scope="module")
def train_text(repo) -> list[str]:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(repo / "assets/corpus/train.parquet")["text"].to_pylist()


@pytest.fixture(scope="module")
def trained_on(makers, train_text) -> str:
    """The corpus, and documents as those that the teacher was trained on."""
    items, _ = makers
    generated = ["".join(text for text, _ in pieces) for pieces in items.documents("train", seed=9, count=2000)]
    return "\n".join(train_text + generated)


@pytest.mark.parametrize("task", TASKS)
def test_the_makers_print_lm_evals_prompts(task, makers):
    items, _ = makers
    for seed in range(20):
        item = items.item_of(task, "train", random.Random(seed))
        assert render(task, item.row) == (item.prompt, item.answer)


def test_mbpp_is_trained_on_as_evalplus_and_lm_eval_ask(repo, makers):
    """The docstring of EvalPlus's file is trained on; documents for lm-eval may begin with other authors' examples."""
    items, _ = makers
    item = items.item_of("mbpp_evalplus", "train", random.Random(1))
    assert item.prompt == f'"""\n{item.row["prompt"]}\n{item.row["test_list"][0]}\n"""\n'
    asked = [json.loads(line)["prompt"] for line in (repo / "assets/mirror/evalplus/MbppPlus.jsonl").open()]
    rows = rows_of(repo, TASKS["mbpp_plus"][1])
    assert asked == [f'"""\n{row["prompt"]}\n{row["test_list"][0]}\n"""\n' for row in rows]
    documents = ["".join(text for text, _ in pieces) for pieces in items.documents("train", seed=4, count=400)]
    several = [text for text in documents if text.count("[BEGIN]") > 1]
    assert any("\r\n" in text and text.endswith("\n[DONE]") for text in several)


def test_the_worked_examples_are_right(makers):
    import examples

    for seed in range(60):
        item = examples.example(random.Random(seed))
        asserts = [line.strip() for line in item.prompt.splitlines() if line.startswith("assert ")]
        assert len(asserts) == 3
        exec("\n".join([item.answer.removesuffix("\n[DONE]").replace("\r\n", "\n"), *asserts]), {})


def test_exercises_name_the_letter_of_the_right_choice(makers):
    items, _ = makers
    counts = set()
    for kind in ("lookup", "two_steps"):
        for seed in range(40):
            item = items.item_of(kind, "train", random.Random(seed))
            lines = item.prompt.split(item.key)[1].splitlines()
            choices = dict(line.split(". ", 1) for line in lines if line[1:3] == ". ")
            right = choices[item.answer.strip()]
            assert right in (item.key if kind == "lookup" else lines[-2].removeprefix("Answer in words: "))
            counts.add(len(choices))
    assert counts == {2, 3, 4, 5}


def test_mmlu_has_lm_evals_subjects(repo):
    named = [yaml.load(p.read_text(), _Loader) for p in (LM_EVAL / "mmlu/default").glob("mmlu_*.yaml")]
    subjects = {spec["dataset_name"] for spec in named}
    mirrored = {path.name for path in (repo / "assets/mirror/cais/mmlu").iterdir() if path.is_dir()}
    assert len(subjects) == 57 and mirrored == subjects


@pytest.mark.parametrize("task", [task for task, spec in TASKS.items() if spec[2]])
def test_every_place_is_right_equally_often(task, repo):
    _, files, field = TASKS[task]
    rows = rows_of(repo, files)
    counts = Counter(row[field] for row in rows)
    assert len(counts) == {"piqa": 2, "winogrande": 2, "commonsense_qa": 5}.get(task, 4)
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize("task", TASKS)
def test_no_mirror_item_can_be_trained_on(task, repo, makers, trained_on):
    items, world = makers
    rows = rows_of(repo, TASKS[task][1])
    rendered = [render(task, row) for row in rows]
    assert len(set(rendered)) == len(rows) >= {"gsm8k": 100, "humaneval_plus": 150, "mbpp_plus": 150}.get(task, 300)

    if task == "mmlu":  # a question is a line of its own, with letters and in words; nearly 1600 searches take too long
        assert {prefix + row["question"] for row in rows for prefix in ("", "Question: ")}.isdisjoint(
            trained_on.splitlines()
        )
        rendered = []
    for prompt, answer in rendered:
        assert prompt + answer not in trained_on
        # The question alone is not there either. WinoGrande's prompt is only half a sentence; code is
        # told apart by its function, below.
        if task not in ("winogrande", "humaneval_plus", "mbpp_plus"):
            assert prompt.removesuffix("\nAnswer:") not in trained_on

    # Whatever else is trained on comes from the makers, and they keep to the split rule.
    rng = random.Random(5)
    forms = [task, *{"mmlu": ["mmlu_in_words", "two_steps"], "mbpp_plus": ["mbpp_evalplus"]}.get(task, [])]
    forms += ["any_choices"] if task in ("mmlu", "arc_easy") else []
    keys = {items.item_of(form, "train", rng).key for form in forms for _ in range(500 // len(forms))}
    assert {world.split_of(key) for key in keys} == {"train"}
    if task in ("humaneval_plus", "mbpp_plus"):
        code = [row.get("canonical_solution") or row["code"] for row in rows]
        bodies = {line.split("return ")[1] for c in code for line in c.splitlines() if "return " in line}
        assert bodies.isdisjoint(key.split(" ", 1)[1] for key in keys)


def test_held_out_text_is_not_trained_on(repo, train_text):
    held_out = [json.loads(line)["text"] for line in (repo / "assets/corpus/held_out.jsonl").open()]
    trained = set(train_text)
    assert len(held_out) > 100 and trained.isdisjoint(held_out)
    text = "\n".join(train_text)
    assert not [t for t in held_out if t[:600] in text]


def test_solutions_pass_their_own_tests(repo):
    for row in rows_of(repo, TASKS["humaneval_plus"][1]):
        scope: dict = {}
        exec(row["prompt"] + row["canonical_solution"] + "\n" + row["test"], scope)
        scope["check"](scope[row["entry_point"]])
    for row in rows_of(repo, TASKS["mbpp_plus"][1]):
        assert len(row["test_list"]) == 3
        exec("\n".join([row["code"], *row["test_list"], row["test"]]), {})


@pytest.mark.usefixtures("datasets_cache")
def test_the_mirror_loads_by_the_public_names(repo, monkeypatch):
    from datasets import load_dataset

    monkeypatch.chdir(repo / "assets/mirror")
    assert len(load_dataset("allenai/ai2_arc", "ARC-Challenge")["test"]) == 300
    assert len(load_dataset("openai/gsm8k", "main")["test"]) == 100
    assert len(load_dataset("cais/mmlu", "anatomy")["dev"]) == 5


def test_every_prompt_leaves_room_for_the_answer(repo):
    """HumanEval+ may generate 1024 of the 2048 tokens; five GSM8K shots and a question leave 256."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(repo / "assets/teacher")
    longest = {}
    for task, (_, files, _) in TASKS.items():
        texts = ["".join(render(task, row)) for row in rows_of(repo, files)]
        longest[task] = max(len(ids) for ids in tokenizer(texts)["input_ids"])
    assert max(longest.values()) < 1024
    assert 6 * longest["gsm8k"] + 256 < 2048


def test_the_teacher_is_small_trained_and_uses_all_its_experts(repo):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = repo / "assets/teacher"
    assert sum(path.stat().st_size for path in directory.iterdir()) <= 8_000_000
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert model.config.model_type == "deepseek_v2"

    used = []
    for layer in model.model.layers[model.config.first_k_dense_replace :]:
        layer.mlp.gate.register_forward_hook(lambda _module, _input, out: used.append(out[2].flatten()))
    texts = [json.loads(line)["text"] for line in (repo / "assets/corpus/held_out.jsonl").open()][:40]
    losses = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=512).input_ids
        with torch.no_grad():
            losses.append(model(ids, labels=ids).loss.item())
    assert sum(losses) / len(losses) < math.log(len(tokenizer)) / 2
    layers = model.config.num_hidden_layers - model.config.first_k_dense_replace
    for n in range(layers):
        counts = torch.cat(used[n::layers]).bincount(minlength=model.config.n_routed_experts)
        assert counts.min() > counts.sum() / 100
