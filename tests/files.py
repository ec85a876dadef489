"""Helps tests to find out whether anything in a directory has changed."""

import hashlib
from pathlib import Path


def snapshot(directory: Path) -> dict[str, str]:
    """The SHA-256 of every file below a directory, by relative path."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
