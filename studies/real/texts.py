"""Makes the texts of ``heal`` from documents: token ids of ``foreign`` and of ``more``, and a sample.

    python -m studies.real texts MODEL TRAIN HELD_OUT OUT [--first 16e6] [--every 5] [--cut 2000]

``TRAIN`` and ``HELD_OUT`` are JSON lines with a ``text``. ``OUT/foreign/train`` gets the first documents of ``TRAIN``,
until they have ``--first`` tokens of MODEL's tokenizer, and ``OUT/more/train`` the others. Both have ``HELD_OUT`` as
their held-out text. ``OUT/sample.jsonl`` is for ``--held-out``: every ``--every``-th document of ``HELD_OUT``, cut to
``--cut`` characters.
"""

import argparse
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.eval.perplexity import read_texts

AT_ONCE = 256  # documents


ARGUMENTS = {
    "model": Path,
    "train": Path,
    "held_out": Path,
    "out": Path,
    "--first": dict(type=float, default=16e6, help="tokens of foreign"),
    "--every": 5,
    "--cut": 2000,
}


def main(given: argparse.Namespace) -> None:
    """Write the texts that the arguments name, and print how many tokens they have."""
    held_out = read_texts(given.held_out)
    rows, kept = (ids_of(given.model, texts) for texts in (read_texts(given.train), held_out))
    total, count = 0, 0
    while count < len(rows) and total < given.first:
        total, count = total + len(rows[count]), count + 1
    for name, part in (("foreign", rows[:count]), ("more", rows[count:])):
        for folder, ids in (("train", part), ("held_out", kept)):
            file = given.out / name / folder / "part-00000.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            column = pa.array(ids, pa.list_(pa.int32()))
            pq.write_table(pa.table({"input_ids": column}), file, compression="zstd", compression_level=12)
            print(f"{name}/{folder}: {sum(map(len, ids)):,} tokens of {len(ids):,} documents")
    lines = [json.dumps({"text": text[: given.cut]}) + "\n" for text in held_out[:: given.every]]
    (given.out / "sample.jsonl").write_text("".join(lines))
    print(f"sample.jsonl: {len(lines)} documents")


def ids_of(model: Path, texts: list[str]) -> list[list[int]]:
    """The token ids of documents, each with the token that ends it."""
    tokenizer = load_tokenizer(model)
    found: list[list[int]] = []
    for first in range(0, len(texts), AT_ONCE):
        found += [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts[first : first + AT_ONCE])["input_ids"]]
    return found
