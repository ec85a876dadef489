"""What every benchmark does: a run is timed, and figures become a table and a JSON file.

``fcsd bench`` and the programs in ``benchmarks/`` use this module.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fcsd.disk import write_text
from fcsd.launch.world import World, barrier

# What stands before the name in an absolute path. A path begins a text, or follows a space, a quote or punctuation.
_FOLDERS = re.compile(r"(?<![^\s\"'`=:(\[,])/(?:[^/\s\"'`]+/)+(?=[^/\s\"'`])")


def together(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of one run on this rank. All ranks call this and start at the same time."""
    finished(device)
    if dist.is_initialized():
        barrier()
    if device.type == "cuda":
        return on_gpu(run)
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def on_gpu(run: Callable[[], Any]) -> float:
    """Milliseconds of one run on the current stream, measured between two CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def finished(device: torch.device) -> float:
    """The seconds of the host's clock when all work that was started on this process's device is complete."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def table(rows: Mapping[str, Mapping[str, str | None]], first: str = "") -> str:
    """Formats rows of figures: a line for each row, and the columns in the order in which the rows first name them.

    Args:
        rows: name of a row -> title of a column -> cell. A cell that is missing or None is shown as ``-``, and a
            column without any cell is left out.
    """
    titles = list(dict.fromkeys(title for cells in rows.values() for title in cells))
    titles = [title for title in titles if any(cells.get(title) for cells in rows.values())]
    lines = [
        [first, *titles],
        *([name, *(cells.get(title) or "-" for title in titles)] for name, cells in rows.items()),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{'<' if not place else '>'}{width}}"
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


def say(world: World, text: str) -> None:
    """Prints to stderr on rank 0."""
    if world.rank == 0:
        print(text, file=sys.stderr, flush=True)


def set_aside(path: Path | None, *others: str, rank: int = 0) -> None:
    """Renames the result of an earlier run, and what lies beside it, on rank 0: ``serve.json`` to ``serve.1.json``.

    Args:
        path: the file of the result; None, or a name that is free, renames nothing.
        others: further names in its directory; ``overlapped`` becomes ``overlapped.1``.
    """
    if path is not None and rank == 0 and path.exists():
        names = [path, *(path.with_name(name) for name in others)]
        for number in count(1):
            kept = [name.with_name(f"{name.stem}.{number}{name.suffix}") for name in names]
            if not any(map(Path.exists, kept)):
                break
        for name, new in zip(names, kept, strict=True):
            if name.exists():
                name.rename(new)


def write(result: Any, path: Path | None, rank: int = 0) -> None:
    """Writes a result as JSON on rank 0, and makes its directory; nothing without a path.

    A benchmark calls this after each of its parts, so that one that is cut short leaves a whole file of what it has.
    Results are shown to others, so a path in one is its last name; see :func:`without_folders`.
    """
    if path is not None and rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(without_folders(result), indent=1))


def without_folders(value: Any) -> Any:
    """A value with texts in it, in which an absolute path is its last name: no folder of a user stands in a result."""
    if isinstance(value, str):
        return _FOLDERS.sub("", value)
    if isinstance(value, Mapping):
        return {key: without_folders(own) for key, own in value.items()}
    return [without_folders(own) for own in value] if isinstance(value, list | tuple) else value
