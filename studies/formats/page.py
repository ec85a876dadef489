"""Writes the tables of FORMATS_QUALITY.md and the picture beside them from the stored results in benchmarks/results.

    python -m studies.formats.page

The text around the tables is written by hand. A table stands between a line `<!-- NAME -->` and a line
`<!-- end of NAME -->`:
`quality` holds the tables of FlashCommunication V2, and `training` the study of training through the wire.
"""

import json
from pathlib import Path
from typing import Any

from studies.blocks import between_marks
from studies.formats import bandwidths, tables, training

PAGE = "studies/formats/FORMATS_QUALITY.md"
RESULTS = Path("benchmarks/results")


def sections(root: Path) -> dict[str, str]:
    """The generated tables by name, in Markdown."""
    results = root / RESULTS
    speeds = (
        bandwidths.of_all_reduce(_read(results / "all_reduce_formats_2xh200.json")),
        bandwidths.of_exchange(_read(results / "rows_to_experts_2xh200.json")),
    )
    quality = tables.to_text(_read(results / "wires_quality.json"), *speeds)
    return {"quality": quality, "training": training.table(_read(results / "wire_study.json")["runs"])}


def filled(page: str, parts: dict[str, str]) -> str:
    """The page with each part in its place."""
    return between_marks(page, {name: f"\n{part}\n\n" for name, part in parts.items()})


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    page = root / PAGE
    page.write_text(filled(page.read_text(), sections(root)))
    tables.draw(_read(root / RESULTS / "wires_quality.json"), root / RESULTS / "wires_quality.png")


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
