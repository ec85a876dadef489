"""`fcsd recipes migrate`: every value and every comment stays, and no file is lost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from old_keys import recipe_before

from fcsd import recipes
from fcsd.config import load_recipe, migrate
from fcsd.config.migration import migrated
from fcsd.errors import ConfigError, DiskError
from fcsd.recipes import strict_yaml

OLD = """\
name: run # the name
model: converted
output_dir: runs/x
data:
  sources:
    - path: "a # b.jsonl"

# how it learns
train: # the old section
  # all processes
  batch_tokens: 2048 # eight rows

  # found by a sweep
  lr: 2e-5 # high
  betas:
    - 0.9 # first
    - 0.99
  # short
  steps: 30
  nonfinite: # see operations
    skip: 2 # twice
  expert_parallel: 2
  # nothing else

# what is tried
sweep:
  stages:
    - train.lr: [1e-5, 2e-5] # two
    - "train.keep": [1]
      train.steps: [10, 20]
  steps: 4
"""

NEW = """\
name: run # the name
model: converted
output_dir: runs/x
data:
  sources:
    - path: "a # b.jsonl"

# how it learns
train: # the old section
  # all processes
  batch_tokens: 2048 # eight rows
  # short
  steps: 30
  # nothing else

optim:
  # found by a sweep
  lr: 2e-5 # high
  betas:
    - 0.9 # first
    - 0.99

faults:
  # see operations
  nonfinite_skip: 2 # twice

parallel:
  ep_size: 2

# what is tried
sweep:
  stages:
    - optim.lr: [1e-5, 2e-5] # two
    - checkpoint.keep: [1]
      train.steps: [10, 20]
  steps: 4
"""


def test_keys_move_with_their_comments() -> None:
    assert migrated(OLD, "r.yaml") == NEW
    assert migrated(NEW, "r.yaml") == NEW
    assert migrated(OLD.replace("\n", "\r\n"), "r.yaml") == NEW.replace("\n", "\r\n")


def test_a_section_in_braces_becomes_lines() -> None:
    text = (
        "name: x\ntrain: {batch_tokens: 256, # all\n  # peak\n  lr: 1e-3, betas: [0.9,\n  0.95],"
        " nonfinite: {skip: 2},\n"
        "  keep: 2 # two\n  # last\n  } # outer\noutput_dir: runs\n"
    )
    assert migrated(text, "r.yaml") == (
        "name: x\ntrain: # outer\n  batch_tokens: 256 # all\n  # last\n\n"
        "optim:\n  # peak\n  lr: 1e-3\n  betas: [0.9,\n  0.95]\n\n"
        "faults:\n  nonfinite_skip: 2\n\ncheckpoint:\n  keep: 2 # two\noutput_dir: runs\n"
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("train:\n  lr: 1e-3", "optim:\n  lr: 1e-3"),
        ("train: # gone\n  horizon:\nname: x\n", "# gone\n\noptim:\n  horizon:\nname: x\n"),
        ("train:\n    lr: 1e-3\n    steps: 2\n", "train:\n    steps: 2\n\noptim:\n    lr: 1e-3\n"),
        ("train: {lr: 1e-3}\n# end\n", "optim:\n  lr: 1e-3\n# end\n"),
        ("train:\n  'lr': 1e-3\n...\n", "optim:\n  lr: 1e-3\n...\n"),
        (
            '{"train": {"lr": 0.001, "steps": 2}}',
            '{\n  "train": {\n    "steps": 2\n  },\n  "optim": {\n    "lr": 0.001\n  }\n}\n',
        ),
    ],
)
def test_other_forms(old: str, new: str) -> None:
    assert migrated(old, "r.yaml") == new


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_recipe_comes_back_from_its_old_form(name: str) -> None:
    text = recipes.read(name)
    assert migrated(text, name) == text
    resolved = load_recipe(name).recipe.model_dump()
    old = recipe_before(resolved)
    newer = {name: old.pop(name) for name in ("optim", "parallel", "checkpoint", "faults") if name in old}
    found: Any = strict_yaml.parse(migrated(json.dumps(old), name), name)[0]
    for section, fields in newer.items():  # which did not exist before the sections
        assert not found[section].keys() & fields.keys()
        found[section] |= fields
    assert found == resolved


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  lr: 1\noptim:\n  betas: [0, 0]\n", "r.yaml:3: the recipe has the section 'optim' and old keys"),
        ("{train: {lr: 1e-3}, name: x} # one line", "cannot be rewritten automatically"),
        ("train:\n  lr: 1\n  lr: 2\n", "r.yaml:3: duplicate key 'lr'"),
        ("- train\n", "r.yaml: not a recipe"),
    ],
)
def test_what_cannot_be_rewritten_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        migrated(text, "r.yaml")


def test_no_file_is_replaced_unasked(tmp_path: Path) -> None:
    path, other = tmp_path / "r.yaml", tmp_path / "other.yaml"
    path.write_text(OLD)
    other.write_text("mine")
    for out in (None, path, other):
        with pytest.raises(ConfigError, match=f"{out or path} exists") as caught:
            migrate(path, out)
        assert caught.value.hint is not None and "--force" in caught.value.hint
    assert (path.read_text(), other.read_text()) == (OLD, "mine")
    assert migrate(path, tmp_path / "new.yaml").read_text() == NEW and path.read_text() == OLD
    (tmp_path / "folder").mkdir()
    assert migrate(path, tmp_path / "folder") == tmp_path / "folder" / "r.yaml"
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    assert migrate(link, force=True) == link
    assert link.is_symlink() and path.read_text() == NEW
    assert migrate(path) == path, "it has no old keys, so there is nothing to replace"
    with pytest.raises(DiskError, match="cannot be written"):
        migrate(path, tmp_path / "nowhere" / "r.yaml")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link.yaml", "new.yaml", "other.yaml", "r.yaml"]
