"""Helpers for tests of bad base models: all checks that a command makes first, and the state of a directory."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fcsd.checkpoint import CheckpointConfig, Comparison, Layout, open_checkpoint
from fcsd.errors import BadInputError


@dataclass(frozen=True)
class Base:
    """A base model that passed all checks."""

    config: CheckpointConfig
    layout: Layout
    comparison: Comparison


def open_base(model: str, *, trust_remote_code: bool = False) -> Base:
    """Resolve a model, read its config and layout, and verify its tensors, raising on the first problem."""
    source = open_checkpoint(model, trust_remote_code=trust_remote_code)
    return Base(source.config, source.layout, source.verify())


def state_of(root: Path) -> dict[str, str]:
    """Every path below ``root`` with its kind, its times and, for regular files that are not too large, its content."""
    state = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        regular = path.is_file() and not path.is_symlink() and info.st_size < 1 << 24
        content = hashlib.sha256(path.read_bytes()).hexdigest() if regular else ""
        state[str(path)] = f"{info.st_mode:o} {info.st_size} {info.st_mtime_ns} {content}"
    return state


def refused(path: Path, *reasons: str, call: Callable[[str], Any] = open_base) -> str:
    root = path.parent
    before = state_of(root)
    with pytest.raises(BadInputError) as caught:
        call(str(path))
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500, message
    for reason in reasons:
        assert reason in message
    assert state_of(root) == before
    return message


def edit(file: Path, change: Callable[[dict], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))
