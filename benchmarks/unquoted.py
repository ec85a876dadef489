"""``python -m benchmarks.unquoted``: the raw results that no page, program or test names, which may leave the tree.

A text names a file by its name, by the name without its ending, or by a pattern: ``serve_vllm_{name}slow_?xh100.json``.
A pattern needs ``LEAST`` letters of its own, because ``*.json`` names nothing.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

RESULTS = "benchmarks/results"
TEXTS = (".md", ".py", ".sh", ".toml", ".yaml")
LEAST = 8
_NAME = re.compile(r"[\w.-]+")
_PATTERN = re.compile(r"(?:[\w.-]|\{[^{}\s]*\}|[*?])+")


def unquoted(files: Iterable[str], texts: Iterable[str]) -> list[str]:
    """The files that none of the texts names, sorted."""
    names: set[str] = set()
    patterns: set[str] = set()
    for text in texts:
        names.update(_NAME.findall(text))
        patterns.update(re.sub(r"\{.*?\}", "*", one) for one in _PATTERN.findall(text))
    patterns = {one for one in patterns if ("*" in one or "?" in one) and len(re.sub(r"\W", "", one)) >= LEAST}
    return sorted(file for file in files if not _is_named(Path(file), names, patterns))


def _is_named(file: Path, names: set[str], patterns: set[str]) -> bool:
    if file.name in names or file.stem in names or f"{file.name}." in names:  # at the end of a sentence
        return True
    return any(fnmatch(file.name, pattern) or fnmatch(file.stem, pattern) for pattern in patterns)


def main() -> None:
    """Prints the raw results of this checkout that nothing names; the exit code is 1 if there is one."""
    root = Path(__file__).resolve().parents[1]
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    there = [file for file in listed if file and (root / file).is_file()]
    texts = [(root / file).read_text(encoding="utf-8") for file in there if file.endswith(TEXTS)]
    raw = [file for file in there if file.startswith(f"{RESULTS}/")]
    found = unquoted([file for file in raw if Path(file).name != "README.md"], texts)
    print("\n".join(found) if found else f"all {len(raw)} files of {RESULTS} are named")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
