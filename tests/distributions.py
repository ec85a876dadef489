"""The distributions that requirements bring, and environments that hold some of the installed ones."""

import sys
import venv
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def closure(requirements: Iterable[str]) -> set[str]:
    """The names of all distributions that requirements need, as far as the installed ones say.

    A distribution that is not installed is in the result, and what it needs itself is not.
    """
    todo = [Requirement(text) for text in requirements]
    seen: set[tuple[str, str]] = set()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        for extra in ["", *sorted(wanted.extras)]:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = [Requirement(text) for text in _needs(name)]
            todo += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def _needs(name: str) -> list[str]:
    try:
        return distribution(name).requires or []
    except PackageNotFoundError:
        return []


def linked_environment(folder: Path, names: Iterable[str], checkout: Path) -> Path:
    """Makes an environment with some of this environment's distributions, as links, and with the package of a checkout.

    Returns: its interpreter.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "lib" / version / "site-packages"
    (site / "checkout.pth").write_text(f"{checkout}\n")
    for name in sorted(names):
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # another platform's
        for top in {file.parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"
