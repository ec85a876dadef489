"""A tokenizer with tokens that the embedding has no row for is refused where a model is opened, by every command."""

import json
import shutil
from pathlib import Path

import pytest
import texts
import tiny

from fcsd.checkpoint import Checkpoint, inspect_checkpoint
from fcsd.config import load_recipe
from fcsd.convert import convert_checkpoint
from fcsd.distill.student import student_config
from fcsd.errors import BadInputError, ConfigError
from fcsd.eval.harness import evaluate_models
from fcsd.serve.chat import load_speaker

LAST = tiny.VOCAB  # the first token without a row


@pytest.fixture(scope="module")
def fitting(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sizes") / "model"
    tiny.model("llama").save_pretrained(folder)
    texts.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def model(fitting: Path, tmp_path: Path) -> Path:
    return shutil.copytree(fitting, tmp_path / "model")


def edit(model: Path, change) -> Path:
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return model


def add(text: str, number: int = LAST, special: bool = True):
    entry = {"id": number, "content": text, "special": special, "normalized": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return lambda content: content["added_tokens"].append(entry | flags)


def test_every_command_refuses_a_vocabulary_that_is_larger(model: Path, tmp_path: Path) -> None:
    assert inspect_checkpoint(model).problems == []
    edit(model, lambda content: content["model"]["vocab"].update({"river": LAST, "stone": LAST + 1}))
    said = "the tokenizer has 2 tokens more than the 256 rows of the embedding \\('river' is number 256\\)"
    [problem] = inspect_checkpoint(model).problems
    for call in (
        lambda: convert_checkpoint(model, tmp_path / "out"),
        lambda: load_speaker(str(model), device="cpu"),
        lambda: evaluate_models([str(model)], tasks=["piqa"]),
        lambda: Checkpoint(model).verify(),
    ):
        with pytest.raises(BadInputError, match=said) as caught:
            call()
        assert problem in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_special_token_counts_where_a_text_holds_it_unasked(model: Path) -> None:
    """Gemma 3's tokenizer has a token for images beyond the embedding of the models that read text alone."""
    edit(model, add("<image>"))
    assert Checkpoint(model).size_problem is None
    (model / "chat_template.jinja").write_text("<image>{{ messages }}")
    assert "'<image>' is number 256" in str(Checkpoint(model).size_problem)


def test_a_token_that_ends_texts_and_an_ordinary_added_one_count(model: Path) -> None:
    edit(model, add("<end>"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<end>"}))
    assert "'<end>' is number 256" in str(Checkpoint(model).size_problem)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    edit(model, add("word", LAST + 1, special=False))
    assert "'word' is number 257" in str(Checkpoint(model).size_problem)


def test_other_forms_of_a_vocabulary_are_compared(model: Path) -> None:
    edit(model, lambda content: content["model"].update(vocab=[[str(n), 0.0] for n in range(LAST + 3)]))
    assert "has 3 tokens more" in str(Checkpoint(model).size_problem)
    (model / "tokenizer.json").unlink()
    (model / "vocab.json").write_text(json.dumps({"a": 1, "b": LAST}))
    (model / "added_tokens.json").write_text(json.dumps({"c": LAST + 1}))
    assert "has 2 tokens more" in str(Checkpoint(model).size_problem)


@pytest.mark.parametrize("content", ["[]", "{", '{"model": []}', '{"model": {"vocab": [1, null]}, "added_tokens": 5}'])
def test_a_damaged_file_is_left_to_what_reads_it(model: Path, content: str) -> None:
    (model / "tokenizer.json").write_text(content)
    assert Checkpoint(model).size_problem is None


def test_ends_of_texts_that_no_model_can_choose_are_named(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, LAST]}))
    assert Checkpoint(model).size_problem is None
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [LAST + 1, LAST]}))
    assert "eos_token_id of generation_config.json is [257, 256]" in str(Checkpoint(model).size_problem)


def test_a_run_refuses_what_does_not_fit(model: Path) -> None:
    def recipe(seq_len: int):
        return load_recipe("tiny", [f"model={model}", f"data.seq_len={seq_len}"]).recipe

    student_config(recipe(tiny.VOCAB), Checkpoint(model))
    with pytest.raises(ConfigError, match=r"it has 256 positions .max_position_embeddings., and data.seq_len is 512"):
        student_config(recipe(512), Checkpoint(model))
    edit(model, lambda content: content["model"]["vocab"].update(river=LAST))
    with pytest.raises(BadInputError, match="'river' is number 256"):
        student_config(recipe(64), Checkpoint(model))
