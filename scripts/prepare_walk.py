"""Counts the files of fcsd that a run enters from `prepare_run` to its first step: what a reader of it walks through.

It makes a tiny converted model in a temporary folder, trains it, and prints the files in the order in
which a function of them is first called. Imports, and the bodies of modules and classes, do not count.
"""

import inspect
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]
FOLDER = f"{ROOT / 'fcsd'}/"


def walk(folder: Path) -> list[str]:
    """The files, by their paths in fcsd/."""
    import runs

    from fcsd.distill.loop import distill_model

    runs.write_models(folder)
    found: dict[str, None] = {}
    on = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal on
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER) and code.co_flags & inspect.CO_OPTIMIZED:
            on = code.co_name == "prepare_run" or (on and code.co_name != "launch_step")
            if on:
                found[code.co_filename.removeprefix(FOLDER)] = None

    recipe = runs.resolved(folder, train__steps=2)
    sys.setprofile(note)
    try:
        distill_model(recipe)
    finally:
        sys.setprofile(None)
    return list(found)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        files = walk(Path(scratch))
    print("\n".join([*files, f"{len(files)} files"]))
