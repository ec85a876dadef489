"""Plain-text documents end with the token with which the model was trained, not with the end of a chat's turn."""

import json
from pathlib import Path
from typing import Any

import pytest
import runs
import texts
import tiny

from fcsd.config import Source, load_recipe
from fcsd.distill.data.corpus import load_corpus
from fcsd.distill.data.of_run import document_end
from fcsd.distill.preview import preview
from fcsd.errors import BadInputError, ConfigError

END = 98  # the id of the first token that is added to the tokenizer of the tests


def tokenizer(template: Any = texts.PLAIN, **special: Any) -> Any:
    made = texts.tokenizer()
    made.chat_template = template
    made.add_special_tokens(special)
    return made


def write_generation(folder: Path, ends: Any) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def test_the_end_is_chosen_by_what_the_model_says(tmp_path: Path) -> None:
    def chosen(made: Any, ends: Any = None) -> str:
        write_generation(tmp_path, ends)
        return document_end(None, tmp_path, made, tiny.VOCAB).text

    text = {"pad_token": "<|endoftext|>"}
    assert chosen(tokenizer()) == "<eos>", "the model knows no other end"
    assert chosen(tokenizer(), [texts.EOS]) == "<eos>"
    assert chosen(tokenizer(**text)) == "<|endoftext|>"
    assert chosen(tokenizer("{{ messages }}<eos>", **text)) == "<|endoftext|>", "named in the template"
    assert chosen(tokenizer({"default": texts.PLAIN, "tools": "{{ messages }}"}, **text)) == "<|endoftext|>"
    assert chosen(tokenizer("{{ messages }};", **text)) == "<eos>", "turns end with something else"
    assert chosen(tokenizer(None, **text)) == "<eos>", "no chat template"
    more = {"additional_special_tokens": ["<|stop|>", "<|call|>", "<|end_of_text|>"]}
    fewer = {"additional_special_tokens": ["<|stop|>", "<|call|>"]}
    assert chosen(tokenizer(texts.PLAIN + "<|call|>", **fewer), [texts.EOS, END + 1, END]) == "<|stop|>"
    assert chosen(tokenizer(texts.PLAIN, **more), [texts.EOS, END + 1, END + 2]) == "<|end_of_text|>", "by its name"
    assert chosen(tokenizer(texts.PLAIN, **more), 10_000) == "<|end_of_text|>", "no such token"
    for damaged in ("<eos>", [1.5], [True]):
        with pytest.raises(BadInputError, match="eos_token_id"):
            chosen(tokenizer(), damaged)


def test_the_recipe_names_another_token(tmp_path: Path) -> None:
    made = tokenizer(pad_token="<|endoftext|>")
    assert document_end("<pad>", tmp_path, made, tiny.VOCAB)[:2] == (0, "<pad>")
    for wanted, size in (("<|end|>", tiny.VOCAB), ("<|endoftext|>", END)):
        with pytest.raises(ConfigError, match="is not a token of the model") as caught:
            document_end(wanted, tmp_path, made, size)
        assert "<eos>" in str(caught.value.hint)


def test_text_ends_with_it_and_the_run_depends_on_it(tmp_path: Path) -> None:
    path = texts.write_jsonl(tmp_path / "a.jsonl", ["one", "two<|endoftext|>", "three<eos>"])
    made = tokenizer(pad_token="<|endoftext|>")
    plain = load_corpus(Source(path=str(path)), made, tiny.VOCAB)
    ended = load_corpus(Source(path=str(path)), made, tiny.VOCAB, END)
    found = [ended.document(number)[0].tolist() for number in range(3)]
    assert found == [[*texts.ids("one"), END], [*texts.ids("two"), END], [*texts.ids("three"), texts.EOS, END]]
    assert plain.document(0)[0].tolist() == [*texts.ids("one"), texts.EOS]
    assert "end of a document" not in plain.sha256 and ended.sha256["end of a document"] == str(END)


def test_the_dry_run_shows_it(tmp_path: Path) -> None:
    _, student = runs.write_models(tmp_path, "llama")
    made = tokenizer(pad_token="<|endoftext|>")
    made.save_pretrained(student)
    write_generation(student, [texts.EOS, END])
    line = "documents   of plain text end with {} ("
    assert line.format("<|endoftext|>") in preview(runs.resolved(tmp_path).recipe)
    assert line.format("<unk>") in preview(runs.resolved(tmp_path, data__document_end="<unk>").recipe)
    chats = texts.write_jsonl(tmp_path / "chats.jsonl", [texts.chat("hi", "ho")] * 4, "chat")
    recipe = json.loads((tmp_path / "recipe.yaml").read_text())
    recipe["data"] |= {"sources": [{"path": str(chats), "messages": "chat", "min_counted": 0}], "held_out": None}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    assert "documents   of" not in preview(load_recipe(tmp_path / "recipe.yaml").recipe)
    with pytest.raises(ConfigError, match="document_end"):
        runs.resolved(tmp_path, data__document_end="")
