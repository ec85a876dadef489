"""Counts the files of fcsd that a command enters: what a reader of it walks through.

`walk.py prepare` follows a run from `prepare_run` to its first step. `walk.py convert` follows `fcsd convert` from
`convert_checkpoint` to its report. Both use tiny models in a temporary folder, which another process writes so that
nothing is cached. They print the files in the order in which a function of them is first called. Imports, and the
bodies of modules and classes, do not count.
"""

import inspect
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]
FOLDER = f"{ROOT / 'fcsd'}/"


def entered(act: Callable[[], Any], start: str, end: str = "") -> list[str]:
    """The files, by their paths in fcsd/, whose functions `act` calls from its call of `start` to its call of `end`."""
    found: dict[str, None] = {}
    on = False

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal on
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER) and code.co_flags & inspect.CO_OPTIMIZED:
            on = code.co_name == start or (on and code.co_name != end)
            if on:
                found[code.co_filename.removeprefix(FOLDER)] = None

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return list(found)


def prepare(folder: Path) -> list[str]:
    """From `prepare_run` to the first step."""
    import runs

    from fcsd.distill.loop import distill_model

    recipe = runs.resolved(folder, train__steps=2)
    return entered(lambda: distill_model(recipe), "prepare_run", "launch_step")


def convert(folder: Path) -> list[str]:
    """The whole of `convert_checkpoint`."""
    from fcsd.convert import convert_checkpoint

    return entered(lambda: convert_checkpoint(folder / "teacher", folder / "converted").to_text(), "convert_checkpoint")


def write_models(folder: Path) -> None:
    """Writes a teacher and its conversion."""
    import runs

    runs.write_models(folder)


if __name__ == "__main__":
    walk = {"prepare": prepare, "convert": convert}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as scratch:
        writer = get_context("spawn").Process(target=write_models, args=(Path(scratch),))
        writer.start()
        writer.join()
        files = walk(Path(scratch))
    print("\n".join([*files, f"{len(files)} files"]))
