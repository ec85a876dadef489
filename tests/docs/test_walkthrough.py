"""The walkthrough's recipe begins with what most people bring: chats, as in the line that it shows."""

import re
from pathlib import Path

import texts

from fcsd.config import load_recipe
from fcsd.distill.data.corpus import load_corpus


def test_the_recipe_reads_the_chats_that_the_page_shows(repo: Path, tmp_path: Path) -> None:
    page = (repo / "docs/walkthrough.md").read_text()
    recipe = re.search(r"```yaml\n(name: mine\n.*?)```", page, re.DOTALL)
    chat = re.search(r"```json\n(.*?)```", page, re.DOTALL)
    assert recipe and chat
    (tmp_path / "mine.yaml").write_text(recipe[1])
    (tmp_path / "t.jinja").write_text(texts.PLAIN)
    (tmp_path / "chats.jsonl").write_text(chat[1])
    first = load_recipe(tmp_path / "mine.yaml").recipe.data.sources[0]
    assert first.chat
    here = {"path": str(tmp_path / first.path), "chat_template": str(tmp_path / "t.jinja")}
    tokenizer = texts.tokenizer()
    corpus = load_corpus(first.model_copy(update=here), tokenizer, len(tokenizer))
    assert (len(corpus.lengths), corpus.skipped) == (1, {}) and corpus.tokens == len("U:What is 2 + 2?;A:4.")
