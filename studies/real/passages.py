"""Makes a LAMBADA-like task from a text where the data set itself is not at hand.

    python -m studies.real passages held_out.jsonl MIRROR [--most 20] [--last-sentence]

LAMBADA's passages were chosen by people, who could guess the last word from the whole passage and not from its last
sentence (Paperno et al. 2016, arXiv 1606.06031). This program has no people. It takes passages of three to five
sentences of prose whose last word has four letters or more, occurs in an earlier sentence, and not in the last one
before its end. In LAMBADA, too, most of the last words occur earlier in the passage. The same text always gives the
same passages, at most ``--most`` of each document, spread over it.

It writes a mirror with the data set that lm-eval's task ``lambada_openai`` reads, so that
``fcsd eval MODEL --tasks lambada_openai --data-mirror MIRROR`` measures it. With ``--last-sentence`` it writes the last
sentences alone: what a model knows there, it does not know from the passage.
"""

import argparse
import json
import re
from pathlib import Path

from fcsd.eval.perplexity import read_texts
from fcsd.eval.statistics import spread

DATA_SET = "EleutherAI/lambada_openai"
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'\u201d\u2019)])) (?=[\"'\u201c\u2018(]*[A-Z])")
SENTENCES = range(3, 6)
WORDS = range(30, 161)  # of a passage
PROSE = 0.97  # the share of letters, spaces and ordinary punctuation; dictionaries and tables have less
CARD = """---
configs:
- config_name: default
  data_files:
  - split: test
    path: default/test.jsonl
---
{passages} LAMBADA-like passages, made by studies/real/passages.py. This is not the LAMBADA data set.
"""


ARGUMENTS = {
    "text": Path,
    "mirror": Path,
    "--most": dict(type=int, default=20, help="passages of a document"),
    "--last-sentence": dict(action="store_true", help="write the last sentence of each passage alone"),
}


def main(given: argparse.Namespace) -> None:
    """Write the mirror that the arguments name."""
    found = [passage for text in read_texts(given.text) for passage in passages(text, given.most)]
    if not found:
        raise SystemExit(f"{given.text}: no passage of this text ends as LAMBADA's do")
    lines = [" ".join(passage[-1:] if given.last_sentence else passage) for passage in found]
    file = given.mirror / DATA_SET / "default" / "test.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in lines))
    (given.mirror / DATA_SET / "README.md").write_text(CARD.format(passages=len(lines)))
    print(f"{len(lines)} passages in {file.parent.parent}")


def passages(text: str, most: int) -> list[list[str]]:
    """At most ``most`` passages of a document as lists of sentences. The last sentence ends with the word to guess."""
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        sentences = SENTENCE_END.split(" ".join(paragraph.split()))
        begin = 0
        while begin < len(sentences):
            passage = next((p for n in SENTENCES if (p := _passage(sentences[begin : begin + n], n))), None)
            found += [passage] if passage else []
            begin += len(passage) if passage else 1  # passages do not overlap
    return [found[i] for i in spread(len(found), most)]


def _passage(sentences: list[str], length: int) -> list[str] | None:
    """The sentences without the end mark, if they are such a passage."""
    if len(sentences) < length:
        return None
    *earlier, last = sentences
    end = re.search(r"^(.+ )([A-Za-z]{4,})[.!?]$", last)
    whole = " ".join(sentences)
    if end is None or len(whole.split(" ")) not in WORDS or any(len(s.split(" ")) < 4 for s in sentences):
        return None
    word = rf"\b{end[2]}\b"
    if not re.search(word, " ".join(earlier)) or re.search(word, end[1]):
        return None
    plain = sum(c.isascii() and (c.isalpha() or c in " ,.;:'\"?!-") for c in whole) / len(whole)
    return [*earlier, end[1] + end[2]] if plain >= PROSE else None
