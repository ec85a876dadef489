"""All eleven benchmarks as data, and the training documents made from them."""

import random
from collections.abc import Iterator

import knowledge
import programs
import stories
from world import Item, items, table

# benchmark -> (item maker, share of the generated documents, most items in one document)
TASKS = {
    "piqa": (knowledge.piqa, 10, 1),
    "arc_easy": (knowledge.arc_easy, 10, 1),
    "arc_challenge": (knowledge.arc_challenge, 12, 1),
    "openbookqa": (knowledge.openbookqa, 8, 1),
    "hellaswag": (stories.hellaswag, 8, 1),
    "winogrande": (stories.winogrande, 8, 1),
    "commonsense_qa": (knowledge.commonsense_qa, 14, 3),
    "mmlu": (knowledge.mmlu, 14, 6),
    "gsm8k": (stories.gsm8k, 6, 6),
    "humaneval_plus": (programs.humaneval_plus, 7, 1),
    "mbpp_plus": (programs.mbpp_plus, 3, 4),
}
Pieces = list[tuple[str, bool]]


def item_of(task: str, split: str, rng: random.Random) -> Item:
    """A random item of a benchmark from a split."""
    return next(items(TASKS[task][0], split, rng))


def document(split: str, rng: random.Random) -> Pieces:
    """One document: pieces of text, each marked whether it is an answer.

    A document holds one item or, as few-shot prompts do, several of a benchmark with a blank line
    between them; MMLU's keep to one subject, under lm-eval's heading.
    """
    task = rng.choices(list(TASKS), [share for _, share, _ in TASKS.values()])[0]
    make, _, most = TASKS[task]
    pieces: Pieces = []
    if task == "mmlu":
        subject = rng.choice(list(table("mmlu")))
        make = lambda rng: knowledge.mmlu(rng, subject)  # noqa: E731
        pieces.append((knowledge.mmlu_description(subject), False))
    source = items(make, split, rng)
    for n in range(rng.randint(1, most)):
        item = next(source)
        pieces += [("\n\n" * (n > 0) + item.prompt, False), (item.answer, True)]
    return pieces


def documents(split: str, seed: int, count: int) -> Iterator[Pieces]:
    """``count`` documents, the same for the same seed."""
    rng = random.Random(seed)
    return (document(split, rng) for _ in range(count))
