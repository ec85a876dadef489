"""The files around the weights: what convert takes over, and what it refuses before it writes anything."""

import json
import os
from pathlib import Path

import pytest
from files import snapshot
from gate import edit, refused

from fcsd.checkpoint import inspect_checkpoint
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError
from fcsd.export.final import export_model


@pytest.fixture
def converted(model: Path, tmp_path: Path) -> Path:
    convert_checkpoint(str(model), tmp_path / "converted", check=False)
    return tmp_path / "converted"


def template(model: Path) -> Path:
    (model / "additional_chat_templates").mkdir()
    return model / "additional_chat_templates" / "tools.jinja"


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(300 << 30)


SPOIL = {
    "a FIFO": lambda model: os.mkfifo(model / "notes.txt"),
    "is a FIFO": lambda model: os.mkfifo(template(model)),
    "is a directory": lambda model: template(model).mkdir(),
    "notes.txt: has 322122547200 bytes": lambda model: sparse(model / "notes.txt"),
    "tools.jinja: has 322122547200 bytes": lambda model: sparse(template(model)),
    "leaves the checkpoint": lambda model: (model / "notes.txt").symlink_to("/dev/zero"),
    "tokenizer.json: holds a JSON list": lambda model: (model / "tokenizer.json").write_text("[1]"),
    "generation_config.json: holds a JSON list": lambda model: (model / "generation_config.json").write_text("[1]"),
    "special_tokens_map.json: is not strict JSON": lambda model: (model / "special_tokens_map.json").write_text("{"),
    r"'notes\udcff.txt' is not a plain file name": lambda model: Path(
        os.fsdecode(os.fsencode(model) + b"/notes\xff.txt")
    ).write_text("a note"),
}


@pytest.mark.parametrize("reason", SPOIL)
@pytest.mark.parametrize("dry_run", [True, False])
def test_what_cannot_be_taken_over_is_refused(model: Path, tmp_path: Path, reason: str, dry_run: bool) -> None:
    SPOIL[reason](model)
    refused(model, reason, call=lambda path: convert_checkpoint(path, tmp_path / "out", dry_run=dry_run))
    assert not (tmp_path / "out").exists()


def test_code_of_an_original_is_left_behind(model: Path, tmp_path: Path) -> None:
    names = ("config.json", "tokenizer_config.json", "generation_config.json")
    (model / "evil.py").write_text("raise SystemExit")
    (model / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 77}))
    for name in names:
        edit(model / name, lambda content: content.update(auto_map={"AutoTokenizer": ["evil.Evil", None]}))
    before = snapshot(model)
    with pytest.raises(BadInputError, match="asks for code of its own"):
        convert_checkpoint(str(model), tmp_path / "out", check=False)
    convert_checkpoint(str(model), tmp_path / "out", check=False, trust_remote_code=True)
    out = tmp_path / "out"
    assert not (out / "evil.py").exists()
    assert all("evil" not in (out / name).read_text() for name in names)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"model_max_length": 77}
    assert snapshot(model) == before
    inspect_checkpoint(str(out))  # is accepted without trust


def test_pickles_and_code_are_left_behind_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    folder = template(model).parent
    for file in (model / "tokenizer.pkl", model / "VOCAB.PICKLE", folder / "evil.py", folder / "evil.pkl"):
        file.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (folder / "tools.jinja").write_text("{{ messages }}")
    convert_checkpoint(str(model), tmp_path / "out", check=False)
    assert not [path for path in (tmp_path / "out").rglob("*") if "evil" in path.name or "pkl" in path.name]
    assert not (tmp_path / "out" / "VOCAB.PICKLE").exists()
    assert (tmp_path / "out" / folder.name / "tools.jinja").exists()


def own_auto_map(converted: Path) -> None:
    edit(converted / "config.json", lambda config: config["auto_map"].update(AutoTokenizer=["evil.Evil", None]))


def nested_auto_map(converted: Path) -> None:
    text = json.dumps({"image_processor": {"auto_map": {"AutoImageProcessor": "evil.Evil"}}})
    (converted / "processor_config.json").write_text(text)


def tokenizer_auto_map(converted: Path) -> None:
    (converted / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.Evil", None]}}))


def code_alone(converted: Path) -> None:
    (converted / "evil.py").write_text("raise SystemExit")


@pytest.mark.parametrize("plant", [own_auto_map, nested_auto_map, tokenizer_auto_map, code_alone])
def test_foreign_code_in_a_converted_directory_is_refused(converted: Path, tmp_path: Path, plant) -> None:
    plant(converted)
    refused(converted, "that is not fcsd's", call=inspect_checkpoint)
    refused(converted, "that is not fcsd's", call=lambda path: export_model(path, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
