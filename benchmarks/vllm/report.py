"""The rows in which the parts of ``benchmarks/carried/vllm_gpu.sh`` say what they found, and the report on all of them.

    python -m benchmarks.vllm report LOGS OUT      reads LOGS/*.log and *.rc, writes OUT.json and OUT-logs.tar.gz

A log holds a line ``START {...}`` for everything that was begun, and ``ROW {...}`` for everything that ended. With
``VLLM_LOGS`` and ``VLLM_OUT`` set to LOGS and OUT, OUT.json is also renewed whenever a row is found, so that a run that
is stopped leaves what it has found. The exit status is 0 if every part ended with 0, everything that was begun ended,
and every row is right.
"""

import fcntl
import json
import os
import re
import tarfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fcsd.disk import write_text

ARGUMENTS = {"logs": Path, "out": Path}
Row = dict[str, Any]

# vLLM's processes put their name, and then a level, a time and a place in the source, before each line.
_PREFIX = re.compile(
    r"^(\((?:EngineCore|Worker|APIServer)[^)]*\) )?((?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*")
_ENDS = {None: "stopped with the run", 124: "stopped at its time limit", 137: "killed at its time limit"}
LAST_FRAMES, LAST_LINES, WIDTH = 4, 6, 220


def begin(row: Row) -> None:
    """Say that something was begun whose rows will have these fields."""
    print("START " + json.dumps(row), flush=True)


def ended(row: Row) -> Row:
    """Print a row, renew the JSON file of the run, and return the row. NaN, which JSON has not, becomes null."""
    row = {name: None if value != value else value for name, value in row.items()}
    print("ROW " + json.dumps(row), flush=True)
    if "VLLM_LOGS" in os.environ:
        store(Path(os.environ["VLLM_LOGS"]), Path(os.environ["VLLM_OUT"]))
    return row


def report(row: Row, work: Callable[..., Row], *given: Any) -> Row:
    """Do a piece of work that returns fields of a row, and report the row. A failure is a row, too."""
    begin(row)
    start = time.perf_counter()
    try:
        row = row | work(*given)
    except Exception as error:
        traceback.print_exc()
        row = row | dict(right=False, error=f"{type(error).__name__}: {str(error)[:300]}")
    return ended(row | dict(seconds=round(time.perf_counter() - start, 1)))


def read_log(log: Path) -> Row:
    """What a part has found.

    Returns:
        ``rows``; ``unfinished``, what was begun and has no row; ``reasons``, the ends of the tracebacks; and
        ``exit_status``, None if the part has not ended.
    """
    lines = log.read_text(errors="replace").splitlines()
    rows = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
    begun = [json.loads(line[6:]) for line in lines if line.startswith("START ")]
    unfinished = [start for start in begun if not any(start.items() <= row.items() for row in rows)]
    status = log.with_suffix(".rc")
    code = int(status.read_text()) if status.exists() else None
    return dict(rows=rows, unfinished=unfinished, reasons=reasons(lines), exit_status=code)


def store(logs: Path, out: Path) -> dict[str, Row]:
    """Write ``OUT.json``, what every part has found so far, and return it. Several processes may call this."""
    with (logs / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        parts = {log.stem: read_log(log) for log in sorted(logs.glob("*.log"))}
        write_text(out.with_name(f"{out.name}.json"), json.dumps(parts, indent=1))
    return parts


def reasons(lines: list[str]) -> list[str]:
    """For each distinct exception, in the order of their first appearance: its line, after its last frames."""
    errors: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in lines:
        if line.startswith("WARNING"):
            continue  # vLLM warns of what it can do without, with a traceback
        line = _PREFIX.sub("", line)
        if "died unexpectedly" in line:
            errors.setdefault(line[:WIDTH], [])
        elif line.startswith("Traceback"):
            frames = []
        elif line.lstrip().startswith('File "'):
            frames.append(re.sub(r".*/(site|site-packages)/", "", line.strip().removeprefix("File ")).replace('"', ""))
        elif _ERROR.match(line):
            errors.setdefault(line[:WIDTH], frames[-LAST_FRAMES:])
            frames = []
    return [line for error, where in errors.items() for line in (*(f"    {frame[:WIDTH]}" for frame in where), error)]


def line_of(row: Row, before: Row) -> str:
    """A row as one line, its verdict first, without what the row before it has said already."""
    verdict = {True: "right", False: "WRONG"}.get(row.get("right"), "     ")  # type: ignore[arg-type]
    new = {name: value for name, value in row.items() if name not in ("right", "raw") and before.get(name) != value}
    values = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in new.items()}
    return f"{verdict} " + " ".join(f"{name}={value}" for name, value in values.items())


def other_runners(rows: list[Row]) -> list[str]:
    """The cases whose original and converted model were not run by the same model runner of vLLM."""
    runners: dict[str, set[str]] = {}
    for row in rows:
        if "runner" in row:
            fields = ("case", "dtype", "mode", "ranks", "stages", "replicas", "experts", "kernels")
            same = {name: row.get(name) for name in fields}
            runners.setdefault(json.dumps(same), set()).add(row["runner"])
    return [f"{same}: {', '.join(sorted(names))}" for same, names in runners.items() if len(names) > 1]


def main(given: Any) -> bool:
    """Print the report, and write it and the logs; whether something is wrong."""
    logs, out = given.logs, given.out
    out.parent.mkdir(parents=True, exist_ok=True)
    parts, good = store(logs, out), True
    for name, part in parts.items():
        code, rows = part["exit_status"], part["rows"]
        wrong = [row for row in rows if not row.get("right", True)]
        good &= code == 0 and not part["unfinished"] and not wrong
        print(f"== {name}: {_ENDS.get(code, f'ended with {code}')}, {len(rows)} rows")
        for row, before in zip(rows, [{}, *rows], strict=False):
            print(line_of(row, before)[: 2 * WIDTH])
        for start in part["unfinished"]:
            print(f"NOT ENDED {json.dumps(start)}")
        if code != 0 or wrong or part["unfinished"]:
            print("\n".join(part["reasons"][-12:]))
        if code != 0 or part["unfinished"]:
            last = (logs / f"{name}.log").read_text(errors="replace").splitlines()[-LAST_LINES:]
            print("\n".join(f"  | {line[:WIDTH]}" for line in last))
    for case in other_runners([row for part in parts.values() for row in part["rows"]]):
        good = False
        print(f"NOT THE SAME MODEL RUNNER {case}")
    with tarfile.open(out.with_name(f"{out.name}-logs.tar.gz"), "w:gz") as target:
        for log in sorted(logs.glob("*.log")):
            target.add(log, log.name)
    print("everything is right" if good else "NOT everything is right")
    return not good
