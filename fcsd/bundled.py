"""Finds the bundled model and corpus, which a path that begins with `bundled:` names wherever fcsd is called."""

from pathlib import Path

# Only a clone of the repository has this folder; the wheel leaves it out.
FOLDER = Path(__file__).parents[1] / "assets"


def located(path: str) -> str:
    """Write out a path that begins with ``bundled:``. Any other path is returned unchanged."""
    name = path.removeprefix("bundled:")
    return path if name == path else str(FOLDER / name)
