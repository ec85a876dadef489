"""docs/reference, and the generated blocks of README and docs/, are what scripts/write_reference.py writes."""

import re

import typer
from pydantic import BaseModel
from scripts import write_reference as script
from scripts.page_blocks import page_blocks
from studies.blocks import between_marks

from fcsd.cli.main import app
from fcsd.config import Recipe
from fcsd.models.archs import ARCHS


def test_the_pages_are_up_to_date(repo):
    folder = repo / "docs/reference"
    pages = script.pages()
    assert sorted(path.name for path in folder.iterdir()) == sorted(pages)
    for name, text in pages.items():
        assert (folder / name).read_text() == text, "run python scripts/write_reference.py"


def test_the_blocks_are_up_to_date(repo):
    blocks = page_blocks(repo)
    for page in [*(repo / "docs").rglob("*.md"), *(repo / name for name in blocks if not name.startswith("docs/"))]:
        text, own = page.read_text(), blocks.pop(str(page.relative_to(repo)), {})
        assert set(re.findall(r"<!-- end of (.*?) -->", text)) == own.keys(), "a block that no program writes"
        assert between_marks(text, own) == text, "run python scripts/write_reference.py"
    assert not blocks


def test_every_architecture_is_listed():
    page = script.architectures_page()
    assert all(f"`{arch}`" in page for arch in ARCHS)
    (row,) = [line for line in page.splitlines() if line.startswith("| `llama`, ")]
    assert row.split(" | ")[2] == " ".join(f"`{wiring}`" for wiring in ARCHS["llama"].wirings)


def test_every_field_has_a_type_a_default_and_a_meaning():
    rows = [line for line in script.recipe_page().splitlines() if line.startswith("| `")]
    fields = [name for section in script._sections(Recipe) for name in section.model_fields]
    assert [row.split("`")[1] for row in rows] == fields and len(fields) > 60
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").replace(r"\|", "").split("|")), row


def test_types_limits_and_defaults_are_in_words():
    rows = {line.split("`")[1]: line for line in script.recipe_page().splitlines() if line.startswith("| `")}
    assert "`none`, `wandb`, `trackio`, `tensorboard`" in rows["report"] and '`"none"`' in rows["report"]
    assert "integer, ≥ 2" in rows["seq_len"] and "*required*" in rows["sources"] and "true or false" in rows["fused"]


def test_a_section_under_two_keys_is_listed_once():
    keys = [keys for section, keys in script._sections(Recipe).items() if "max_rows" in section.model_fields]
    assert keys == [["data.sources[]", "data.held_out", "data.held_out_own"]]
    assert all(issubclass(section, BaseModel) for section in script._sections(Recipe))


def test_every_command_and_option_is_listed():
    page = script.commands_page()
    assert {"fcsd convert", "fcsd recipes show", "fcsd bench serve"} <= {
        line.strip("# `") for line in page.splitlines() if line.startswith("## ")
    }
    for name, command in script._commands(typer.main.get_command(app), "fcsd"):
        assert {parameter.name for parameter in command.params} >= set(script.EVERYWHERE), name
    convert = page.split("## `fcsd convert`")[1].split("\n## ")[0]
    assert "fcsd convert MODEL OUT [OPTIONS]" in convert and "| `--layers` `TEXT` | `all` |" in convert
