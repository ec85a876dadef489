"""Gather Python's documentation and standard library, and write the texts everything else reads.

    python studies/teacher/corpus.py --stdlib /usr/lib/python3.11 --docs HTML/_sources

writes runs/teacher/{train,held_out}.jsonl (all text, for the teacher) and assets/corpus/
{train.parquet,held_out.jsonl} (a sample mixed with generated documents, for distillation and
held-out loss). ``--docs`` is the ``_sources`` folder of the Debian package python3.11-doc.
Whole files are held out, chosen by a hash of their name.
"""

import argparse
import hashlib
import json
import random
from pathlib import Path

import pyarrow
import pyarrow.parquet
from items import documents

CHUNK = 3000  # characters; a document is cut at blank lines into pieces of about this size
# Files that are left out: machine-written tables, and vendored or generated files.
SKIPPED = (
    "encodings/",
    "pydoc_data/",
    "lib2to3/tests/",
    "test/",
    "idlelib/",
    "site-packages/",
    "_sysconfigdata",
)


def chunks(text: str) -> list[str]:
    """The text cut at blank lines into pieces of about CHUNK characters."""
    pieces, piece = [], ""
    for block in text.split("\n\n"):
        if piece and len(piece) + len(block) > CHUNK:
            pieces.append(piece)
            piece = ""
        piece += ("\n\n" if piece else "") + block
    return [p for p in [*pieces, piece] if len(p) > 200]


def sources(stdlib: Path, docs: Path) -> dict[str, str]:
    """Every documentation page and library module: name -> text."""
    files = {f"doc/{p.relative_to(docs)}": p for p in sorted(docs.rglob("*.rst.txt"))}
    for path in sorted(stdlib.rglob("*.py")):
        inside = str(path.relative_to(stdlib))
        if not inside.startswith(SKIPPED) and not path.is_symlink():
            files[f"lib/{inside}"] = path
    return {name: path.read_text(errors="ignore") for name, path in files.items()}


def is_held_out(name: str) -> bool:
    """Whether a file is held out. One file in twenty-five is."""
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) % 25 == 0


def take(texts: list[str], characters: int) -> list[str]:
    """Texts from the front until there are enough characters."""
    taken, size = [], 0
    for text in texts:
        if size >= characters:
            break
        taken.append(text)
        size += len(text)
    return taken


def generated(split: str, seed: int, characters: int) -> list[str]:
    """Generated documents of a split, as plain text."""
    texts = ("".join(text for text, _ in pieces) for pieces in documents(split, seed, characters // 40))
    return take(list(texts), characters)


def write_jsonl(path: Path, texts: list[str]) -> None:
    """Write a file with one {"text": ...} per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stdlib", type=Path, required=True)
    parser.add_argument("--docs", type=Path, required=True)
    parser.add_argument("--all", type=Path, default=Path("runs/teacher"))
    parser.add_argument("--out", type=Path, default=Path("assets/corpus"))
    args = parser.parse_args()

    split: dict[str, list[str]] = {"train": [], "held_out": []}
    for name, text in sources(args.stdlib, args.docs).items():
        split["held_out" if is_held_out(name) else "train"] += chunks(text)
    rng = random.Random(0)
    for name, texts in split.items():
        rng.shuffle(texts)
        write_jsonl(args.all / f"{name}.jsonl", texts)

    # Half is text and half is generated: about 1.6 M tokens for distillation, 80 k for the held-out loss.
    train = take(split["train"], 2_400_000) + generated("train", 1, 2_400_000)
    held_out = take(split["held_out"], 120_000) + generated("held_out", 2, 120_000)
    rng.shuffle(train)
    rng.shuffle(held_out)
    write_jsonl(args.out / "held_out.jsonl", held_out)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": train}), args.out / "train.parquet", compression="zstd", compression_level=19
    )


if __name__ == "__main__":
    main()
