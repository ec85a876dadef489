"""Exercises in answering by a letter, from easy to hard. They are trained on and belong to no benchmark.

MMLU and CommonsenseQA ask for the letter of the right choice. A model that met only these two guessed at both, although
it knew the facts; another answered five choices and guessed at four (benchmarks/results/RESULTS.md). The exercises have
two to five choices in the layouts of both benchmarks. Their keys are those of the questions that they repeat.
"""

import random

from knowledge import LETTERS, arc_easy, definition, lettered, mmlu_description
from world import Item, sentence, shuffled, table

LOOKUPS = (
    "Which line says {}?",
    "Choose {}.",
    "Find {} in the list.",
    "The right choice is {}.",
    "Where in the list is {}?",
    "Only {} is right.",
)


def _asked(rng: random.Random, key: str, right: str, others: list[str], subject: str, step: str = "") -> Item:
    """A question with two to five choices in one of the two layouts; ``step`` stands before the final "Answer:"."""
    count = min(rng.randint(2, 5), 1 + len(others))
    choices, gold = shuffled(rng, right, rng.sample(others, count - 1))
    heading = mmlu_description(subject) if rng.random() < 0.3 else ""
    question = key if rng.random() < 0.7 else f"Question: {key}"
    prompt = heading + lettered(question, choices)
    return Item(key, {}, prompt.removesuffix("Answer:") + step + "Answer:", f" {LETTERS[gold]}")


def _subject(rng: random.Random) -> str:
    return rng.choice(list(table("mmlu")))


def lookup(rng: random.Random) -> Item:
    """A list of terms or of meanings, and the question which letter one of them has."""
    subject = _subject(rng)
    terms = table("mmlu")[subject]
    choices = rng.sample(list(terms) if rng.random() < 0.6 else list(terms.values()), 5)
    question = sentence(rng.choice(table("facts")["ask_openings"]), rng.choice(LOOKUPS).format(choices[0]))
    return _asked(rng, question, choices[0], choices[1:], subject)


def any_choices(rng: random.Random) -> Item:
    """A question of ARC's or MMLU's kind, with two to five choices."""
    subject = _subject(rng)
    if rng.random() < 0.4:
        item = arc_easy(rng)
        texts, gold = item.row["choices"]["text"], LETTERS.index(item.row["answerKey"])
        return _asked(rng, item.key, texts[gold], texts[:gold] + texts[gold + 1 :], subject)
    question, right, pool = definition(rng, subject)
    return _asked(rng, question, right, [text for text in pool if text != right], subject)


def two_steps(rng: random.Random) -> Item:
    """A question of MMLU's kind that is answered in words first, and then by the letter of these words."""
    subject = _subject(rng)
    question, right, pool = definition(rng, subject)
    return _asked(
        rng, question, right, [text for text in pool if text != right], subject, f"Answer in words: {right}\n"
    )
