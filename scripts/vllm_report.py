"""Says what the parts of ``scripts/vllm_gpu.sh`` found: one line for each row, and the reasons of what failed.

    python scripts/vllm_report.py LOGS OUT      reads LOGS/*.log and *.rc, writes OUT.json and OUT-logs.tar.gz

A log holds a line ``START {...}`` for everything that was begun, ``ROW {...}`` for everything that ended, and
``MISSING ...`` for what could not be imported or made. The exit status is 0 if every part ended with 0, everything
that was begun ended, and every row is right.
"""

import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

# vLLM's processes put their name, and then a level, a time and a place in the source, before each line.
_PREFIX = re.compile(
    r"^(\((?:EngineCore|Worker|APIServer)[^)]*\) )?((?:ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
)
_ERROR = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b.*")
_KILLED = {"124": "stopped at its time limit", "137": "killed at its time limit"}
LAST_FRAMES, LAST_LINES, WIDTH = 4, 6, 220


def read_log(text: str) -> dict[str, Any]:
    """``rows``, ``unfinished`` and ``missing`` of a log, and ``reasons``, the ends of its tracebacks."""
    lines = text.splitlines()
    rows = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
    begun = [json.loads(line[6:]) for line in lines if line.startswith("START ")]
    unfinished = [start for start in begun if not any(start.items() <= row.items() for row in rows)]
    missing = [line[8:] for line in lines if line.startswith("MISSING ")]
    return dict(rows=rows, unfinished=unfinished, missing=missing, reasons=reasons(lines))


def reasons(lines: list[str]) -> list[str]:
    """For each distinct exception, in the order of their first appearance: its line, after its last frames."""
    found: dict[str, list[str]] = {}
    frames: list[str] = []
    for line in lines:
        if line.startswith("WARNING"):
            continue  # vLLM warns of what it can do without, with a traceback
        line = _PREFIX.sub("", line)
        if "died unexpectedly" in line:
            found.setdefault(line[:WIDTH], [])
        elif line.startswith("Traceback"):
            frames = []
        elif line.lstrip().startswith('File "'):
            frames.append(re.sub(r".*/(site|site-packages)/", "", line.strip().removeprefix("File ")).replace('"', ""))
        elif _ERROR.match(line):
            found.setdefault(line[:WIDTH], frames[-LAST_FRAMES:])
            frames = []
    return [line for error, where in found.items() for line in (*(f"    {frame[:WIDTH]}" for frame in where), error)]


def line_of(row: dict[str, Any], before: dict[str, Any]) -> str:
    """A row as one line, its verdict first, without what the row before it has said already."""
    verdict = {True: "right", False: "WRONG"}.get(row.get("right"), "     ")  # type: ignore[arg-type]
    new = {name: value for name, value in row.items() if name not in ("right", "raw") and before.get(name) != value}
    values = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in new.items()}
    return f"{verdict} " + " ".join(f"{name}={value}" for name, value in values.items())


def other_runners(rows: list[dict[str, Any]]) -> list[str]:
    """The cases whose original and converted model were not run by the same model runner of vLLM."""
    runners: dict[str, set[str]] = {}
    for row in rows:
        if "runner" in row:
            same = {name: row.get(name) for name in ("case", "dtype", "mode", "ranks", "experts")}
            runners.setdefault(json.dumps(same), set()).add(row["runner"])
    return [f"{same}: {', '.join(sorted(found))}" for same, found in runners.items() if len(found) > 1]


def main() -> None:
    """Print the report, and write it and the logs."""
    folder, out = map(Path, sys.argv[1:])
    parts, good = {}, True
    for log in sorted(folder.glob("*.log")):
        status, text = log.with_suffix(".rc"), log.read_text(errors="replace")
        ended = status.read_text().strip() if status.exists() else "0"
        part = read_log(text)
        parts[log.stem] = part | dict(exit_status=int(ended))
        wrong = [row for row in part["rows"] if not row.get("right", True)]
        good &= ended == "0" and not part["unfinished"] and not part["missing"] and not wrong
        print(f"== {log.stem}: {_KILLED.get(ended, f'ended with {ended}')}, {len(part['rows'])} rows")
        for row, before in zip(part["rows"], [{}, *part["rows"]], strict=False):
            print(line_of(row, before)[: 2 * WIDTH])
        for start in part["unfinished"]:
            print(f"NOT ENDED {json.dumps(start)}")
        for line in part["missing"]:
            print(f"MISSING {line[:WIDTH]}")
        if ended != "0" or wrong or part["unfinished"]:
            print("\n".join(part["reasons"][-12:]))
        if ended != "0" or part["unfinished"]:
            print(
                "\n".join(f"  | {line[:WIDTH]}" for line in log.read_text(errors="replace").splitlines()[-LAST_LINES:])
            )
    for case in other_runners([row for part in parts.values() for row in part["rows"]]):
        good = False
        print(f"NOT THE SAME MODEL RUNNER {case}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.name}.json").write_text(json.dumps(parts, indent=1))
    with tarfile.open(out.with_name(f"{out.name}-logs.tar.gz"), "w:gz") as target:
        for log in sorted(folder.glob("*.log")):
            target.add(log, log.name)
    print("everything is right" if good else "NOT everything is right")
    sys.exit(not good)


if __name__ == "__main__":
    main()
