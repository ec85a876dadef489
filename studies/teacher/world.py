"""The closed world of the bundled teacher: its tables, and the rule that keeps its benchmarks unseen.

Every generated item has a key (its question without the choices). A hash of the key alone says
whether the item may be trained on, belongs to the benchmark mirror, or to the held-out text.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Item:
    """One benchmark item.

    Attributes:
        key: the text whose hash decides the item's split.
        row: the item as a row of the public dataset's schema.
        prompt: the raw-completion prompt lm-eval builds from the row.
        answer: the right continuation of the prompt, its leading space included.
    """

    key: str
    row: dict
    prompt: str
    answer: str


@cache
def table(name: str) -> dict:
    """A table of the world by file name, e.g. ``facts``."""
    return yaml.safe_load((Path(__file__).parent / "world" / f"{name}.yaml").read_text())


def split_of(key: str) -> str:
    """``train`` for 80 % of all keys, ``mirror`` for 15 %, ``held_out`` for 5 %."""
    bucket = int(hashlib.sha256(key.lower().encode()).hexdigest()[:8], 16) % 20
    return "mirror" if bucket < 3 else "held_out" if bucket == 3 else "train"


def items(make, split: str, rng: random.Random) -> Iterator[Item]:
    """An endless stream of those items of one task (``make(rng) -> Item``) that fall into a split."""
    while True:
        item = make(rng)
        if split_of(item.key) == split:
            yield item


def shuffled(rng: random.Random, right: str, wrong: list[str]) -> tuple[list[str], int]:
    """The choices in random order and the place of the right one."""
    choices = [right, *wrong]
    rng.shuffle(choices)
    return choices, choices.index(right)


def sentence(*parts: str) -> str:
    """The non-empty parts joined by spaces, the first letter in upper case."""
    text = " ".join(part for part in parts if part)
    return text[0].upper() + text[1:]


def name(rng: random.Random) -> tuple[str, str]:
    """A first name and its pronoun."""
    facts = table("facts")
    pronoun = rng.choice(["she", "he"])
    return rng.choice(facts["names_f" if pronoun == "she" else "names_m"]), pronoun
