"""Writes text to heal a student on: the teacher's own mixture, a mixture of other text, or real text alone.

    python studies/capability/text.py --kind same  --tokens 100e6 --text runs/teacher/train.jsonl --out DIR
    python studies/capability/text.py --kind other --tokens 100e6 --wrong 0.1 --out DIR
    python studies/capability/text.py --kind none  --tokens 100e6 --out DIR
    python studies/capability/text.py --kind same  --tokens 100e6 --token-ids --text runs/teacher/train.jsonl --out DIR

- ``same``: a quarter real text from ``--text`` (studies/teacher/corpus.py writes it) and three quarters generated
  documents, as the teacher was trained on. The documents are new ones, from other seeds.
- ``other``: the same shares of other real text and of documents about a second world (``other_world.py``): the tasks'
  forms with other names and facts. ``--wrong`` is the share of items whose answer is wrong, as in public instruction
  data.
- ``none``: the other real text alone.

A line of DIR's train.jsonl is ``{"text": ...}``, or with ``--token-ids`` ``{"token_ids": [...]}``. The teacher was
trained on token ids: a question and its answer were encoded separately, as lm-eval does. A text, which is encoded as a
whole, often has one token where these had two, for example for the newline before the answer and the spaces after it.

The other real text is, unless ``--text`` says otherwise, the sources and documents of the installed Python packages.
The teacher has seen the standard library, which is not among them. DIR gets train.jsonl and text.json: what
it was made from. Its tokens are counted on a sample; there are at least as many as asked for, up to two per cent.
"""

import argparse
import hashlib
import json
import os
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that this file runs as a program, too

from studies.capability.other_world import makers
from studies.teacher.pieces import CHUNK, chunks

REAL_SHARE = 0.25  # of the tokens, as in studies/teacher/train.py
SAMPLE = 400  # documents whose tokens are counted to estimate those of all
SUFFIXES = (".py", ".rst", ".md", ".txt")
KINDS = ("same", "other", "none")
PART = 5000  # documents that a process generates at once
Pieces = list[str]  # the pieces of a document
FIRST_SEED = 1_000_000  # of generated documents; the teacher's training used smaller ones


def wrong_answer(item: Any, another: Any, rng: random.Random) -> str:
    """An answer to ``item`` that is wrong and has the right form: another choice, or the answer to ``another`` item."""
    row, answer = item.row, item.answer.strip()
    if "sol1" in row:
        return " " + row[f"sol{2 - int(row['label'])}"]
    choices = row.get("endings") or row.get("choices")
    if not choices:
        return another.answer
    texts = choices["text"] if isinstance(choices, dict) else choices
    if len(answer) == 1:  # a letter
        return " " + rng.choice([letter for letter in "ABCDE"[: len(texts)] if letter != answer])
    return " " + rng.choice([text for text in texts if text != answer])


def with_errors(items: Any, rate: float) -> Any:
    """A function like ``world.items`` whose items have a wrong answer at this rate."""

    def stream(make: Any, split: str, rng: random.Random) -> Iterator[Any]:
        source = items(make, split, rng)
        for item in source:
            if rng.random() >= rate:
                yield item
            elif "option1" in item.row:  # the choice stands before the answer, in the prompt
                right, wrong = item.row["option1"], item.row["option2"]
                if item.row["answer"] == "2":
                    right, wrong = wrong, right
                yield type(item)(item.key, item.row, item.prompt.removesuffix(right) + wrong, item.answer)
            else:
                another = next(other for other in source if other.answer != item.answer)
                yield type(item)(item.key, item.row, item.prompt, wrong_answer(item, another, rng))

    return stream


def generator(kind: str, wrong: float) -> Any:
    """The module ``items`` that makes the documents of a kind, with wrong answers at this rate."""
    module, _ = makers(other=kind == "other")
    if wrong:
        module.items = with_errors(module.items, wrong)
    return module


def generated(kind: str, wrong: float, seed: int, count: int) -> list[Pieces]:
    """``count`` generated documents from the training split, the same for the same seed."""
    documents = generator(kind, wrong).documents("train", seed, count)
    return [[text for text, _ in pieces] for pieces in documents]


def generated_lines(kind: str, wrong: float, seed: int, count: int, tokenizer: Path | None) -> bytes:
    """The documents of ``generated`` as JSON lines."""
    return as_lines(generated(kind, wrong, seed, count), tokenizer)


def as_lines(documents: Iterable[Pieces], tokenizer: Path | None) -> bytes:
    """Documents as JSON lines of text, or of the token ids of their pieces by a tokenizer."""
    if tokenizer is None:
        rows: Iterable[dict[str, Any]] = ({"text": "".join(pieces)} for pieces in documents)
    else:
        rows = ({"token_ids": ids} for ids in token_ids(documents, tokenizer))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def token_ids(documents: Iterable[Pieces], tokenizer: Path) -> Iterator[list[int]]:
    """The token ids of documents, between those of BOS and EOS, each piece encoded alone (studies/teacher/train.py)."""
    from transformers import PreTrainedTokenizerFast

    encoder = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for pieces in documents:
        parts: Any = encoder(["<s>", *pieces, "</s>"], add_special_tokens=False)["input_ids"]
        yield list(chain.from_iterable(parts))


def real_text(source: Path, pool: ProcessPoolExecutor) -> list[str]:
    """Pieces of real text: the lines of a .jsonl file, or the files of a folder, cut at blank lines."""
    if source.suffix == ".jsonl":
        return [json.loads(line)["text"] for line in source.open()]
    paths = [path for path in sorted(source.rglob("*")) if path.suffix in SUFFIXES]
    return [piece for found in pool.map(pieces_of, paths, chunksize=100) for piece in found]


def pieces_of(path: Path) -> list[str]:
    """The pieces of a file of real text; none of a large file or a link, which may be listed twice."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size >= 400_000:
        return []
    return [piece for piece in chunks(path.read_text(errors="ignore")) if len(piece) < 2 * CHUNK]


def tokens_per_text(tokenizer: Any, texts: list[str], rng: random.Random) -> float:
    """The mean number of tokens of a text and its end, on a sample."""
    sample = rng.sample(texts, min(SAMPLE, len(texts)))
    return sum(len(ids) + 1 for ids in tokenizer(sample)["input_ids"]) / len(sample)


def write(args: argparse.Namespace) -> dict[str, Any]:
    """Write the text; returns what text.json holds.

    Real pieces come first and generated documents after them, because a run draws them in a random order anyway.
    """
    from transformers import AutoTokenizer

    tokenizer, rng = AutoTokenizer.from_pretrained(args.tokenizer), random.Random(args.seed)
    wanted = 1.02 * args.tokens
    args.out.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with ProcessPoolExecutor(args.workers) as pool, (args.out / "train.jsonl").open("wb") as file:
        real = real_text(args.text, pool)
        if not real:
            raise SystemExit(f"{args.text} has no text; name a .jsonl file or a folder with --text")
        rng.shuffle(real)
        share, tokens_by = 1.0 if args.kind == "none" else REAL_SHARE, args.tokenizer if args.token_ids else None
        count = round(share * wanted / tokens_per_text(tokenizer, real, rng)) + 1
        made, parts = 0, list[int]()
        if args.kind != "none":
            sample = ["".join(pieces) for pieces in generated(args.kind, args.wrong, args.seed, SAMPLE)]
            made = round((1 - share) * wanted / tokens_per_text(tokenizer, sample, rng)) + 1
            parts = [min(PART, made - first) for first in range(0, made, PART)]
        seeds = [FIRST_SEED * (1 + args.seed) + n for n in range(len(parts))]
        drawn = ([[real[n % len(real)]] for n in range(at, min(at + PART, count))] for at in range(0, count, PART))
        lines_of_real = pool.map(as_lines, drawn, repeat(tokens_by))
        made_lines = pool.map(generated_lines, repeat(args.kind), repeat(args.wrong), seeds, parts, repeat(tokens_by))
        for lines in chain(lines_of_real, made_lines):
            digest.update(lines)
            file.write(lines)
    about = {
        "kind": args.kind,
        "wrong": args.wrong,
        "token_ids": args.token_ids,
        "tokens": round(args.tokens),
        "seed": args.seed,
        "real_text": str(args.text),
        "real_pieces": len(real),
        "real_epochs": round(count / len(real), 2),
        "documents": {"real": count, "generated": made},
        "sha256": digest.hexdigest(),
    }
    (args.out / "text.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--tokens", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wrong", type=float, default=0.0, help="share of generated items with a wrong answer")
    parser.add_argument("--text", type=Path, help="real text: a .jsonl file or a folder")
    parser.add_argument("--tokenizer", type=Path, default=Path("assets/teacher"))
    parser.add_argument("--token-ids", action="store_true", help="token ids of pieces that are encoded separately")
    parser.add_argument("--seed", type=int, default=0)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes that generate; default: one per core")
    args = parser.parse_args()
    if args.text is None:
        same = args.kind == "same"
        args.text = Path("runs/teacher/train.jsonl") if same else Path(sysconfig.get_paths()["purelib"])
    if not args.text.exists():
        raise SystemExit(f"{args.text} does not exist; studies/teacher/corpus.py writes the teacher's text")
    print(json.dumps(write(args)))


if __name__ == "__main__":
    main()
