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
from fcsd.models.wiring_block import NAMES


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
    for first, desync in (("llama", "yes"), ("qwen3_moe", "no")):
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{first}`, ")]
        assert row.split(" | ")[2] == desync and ("desync" in ARCHS[first].wirings) == (desync == "yes")
    assert all(f"`{wiring}`" in page.split("| `")[0] for wiring in set(NAMES) - {"desync", "desync-2x", "desync-4x"})


def lines_of_page(page):
    """The list entries of a page as (name, what stands in brackets, meaning)."""
    return re.findall(r"^- `([^`]+)`(?: \((.*?)\))?: (.+)$", page, re.MULTILINE)


def test_every_field_has_a_type_and_a_meaning():
    page = script.recipe_page()
    found = lines_of_page(page)
    sections = script._sections(Recipe)
    fields = [(name, field) for section in sections for name, field in section.model_fields.items()]
    own = [name for name, field in fields if not isinstance(field.get_default(call_default_factory=True), BaseModel)]
    assert [name for name, _, _ in found] == own
    assert len(found) > 60 and all(kind and meaning for _, kind, meaning in found)
    headings = " ".join(re.findall(r"^## (.*)$", page, re.MULTILINE))
    assert all(f"`{key}`" in headings for keys in sections.values() for key in keys if key)


def test_types_limits_and_defaults_are_in_words():
    told = {name: kind for name, kind, _ in lines_of_page(script.recipe_page())}
    assert told["weight_by"] == '`tokens`, `counted`, `rows`; `"tokens"`' and told["lr"] == "number, > 0; `2e-05`"
    assert told["seq_len"].startswith("integer, ≥ 2") and told["fused"] == "true or false; `true`"
    assert told["sources"] == "list of sections" and told["teacher"] == "text or null"


def test_a_section_under_two_keys_is_listed_once():
    keys = [keys for section, keys in script._sections(Recipe).items() if "max_rows" in section.model_fields]
    assert keys == [["data.sources[]", "data.held_out", "data.held_out_own"]]
    assert all(issubclass(section, BaseModel) for section in script._sections(Recipe))


def test_every_command_and_option_is_listed():
    page = script.commands_page()
    everywhere, several, *own = page.split("\n## ")[1:]
    assert [name for name, _, _ in lines_of_page(everywhere)] == ["--json", "--verbose, -v", "--quiet, -q"]
    shared = {name.split(" ")[0].strip(",") for name, _, _ in lines_of_page(several)}
    commands = dict(script._commands(typer.main.get_command(app), "fcsd"))
    assert len(own) == len(commands) > 15
    for (name, command), text in zip(commands.items(), own, strict=True):
        assert text.startswith(f"`{name}")
        listed = {entry for entry, _, _ in lines_of_page(text)} | set(re.findall(r"`([^`]+)`", text.splitlines()[-1]))
        found = {part.strip() for entry in listed for part in entry.split(" ")[0].split(",")}
        options = {parameter.opts[0] for parameter in command.params if parameter.param_type_name == "option"}
        assert options - found <= {"--json", "--verbose", "--quiet", "--help"}, name
    assert {"MODEL", "--gpus", "--dtype"} <= shared
    (convert,) = [text for text in own if text.startswith("`fcsd convert MODEL OUT`")]
    assert "- `--layers TEXT` (`all`): " in convert
