"""All eleven benchmarks as data, and the training documents made from them."""

import random
from collections.abc import Iterator

import examples
import knowledge
import letters
import programs
import stories
from world import Item, items, table

# benchmark -> (item maker, share of the generated documents, most items in one document)
TASKS = {
    "piqa": (knowledge.piqa, 5, 1),
    "arc_easy": (knowledge.arc_easy, 8, 1),
    "arc_challenge": (knowledge.arc_challenge, 10, 1),
    "openbookqa": (knowledge.openbookqa, 8, 1),
    "hellaswag": (stories.hellaswag, 6, 1),
    "winogrande": (stories.winogrande, 8, 1),
    "commonsense_qa": (knowledge.commonsense_qa, 12, 3),
    "mmlu": (knowledge.mmlu, 14, 6),
    "gsm8k": (stories.gsm8k, 6, 6),
    "humaneval_plus": (programs.humaneval_plus, 6, 1),
    "mbpp_plus": (programs.mbpp_plus, 4, 3),
}
# The same questions in forms that the benchmarks do not print; columns as above. These are trained on and not mirrored.
FORMS = {
    "mmlu_in_words": (knowledge.mmlu_in_words, 10, 2),
    "lookup": (letters.lookup, 8, 4),
    "any_choices": (letters.any_choices, 12, 4),
    "two_steps": (letters.two_steps, 6, 3),
    "mbpp_evalplus": (programs.mbpp_evalplus, 5, 1),
}
KINDS = TASKS | FORMS
EXAMPLES_SHARE = 0.4  # of MBPP's documents; these begin with one to three examples by other authors
Pieces = list[tuple[str, bool]]


def item_of(kind: str, split: str, rng: random.Random) -> Item:
    """A random item of a benchmark, or of one of the other forms, from a split."""
    return next(items(KINDS[kind][0], split, rng))


def document(split: str, rng: random.Random) -> Pieces:
    """One document: pieces of text, each marked whether it is an answer.

    A document holds one item or, as few-shot prompts do, several of a benchmark with a blank line
    between them; MMLU's keep to one subject, under lm-eval's heading.
    """
    kind = rng.choices(list(KINDS), [share for _, share, _ in KINDS.values()])[0]
    make, _, most = KINDS[kind]
    heading: Pieces = []
    chosen: list[Item] = []
    if kind == "mmlu":
        subject = rng.choice(list(table("mmlu")))
        make = lambda rng: knowledge.mmlu(rng, subject)  # noqa: E731
        heading.append((knowledge.mmlu_description(subject), False))
    if kind == "mbpp_plus" and rng.random() < EXAMPLES_SHARE:
        chosen += [next(items(examples.example, split, rng)) for _ in range(rng.randint(1, 3))]
    source = items(make, split, rng)
    chosen += [next(source) for _ in range(rng.randint(1, most))]
    return heading + joined(chosen)


def joined(chosen: list[Item]) -> Pieces:
    """The items with a blank line between them, as in a few-shot prompt."""
    pieces: Pieces = []
    for n, item in enumerate(chosen):
        pieces += [("\n\n" * (n > 0) + item.prompt, False), (item.answer, True)]
    return pieces


def documents(split: str, seed: int, count: int) -> Iterator[Pieces]:
    """``count`` documents, the same for the same seed."""
    rng = random.Random(seed)
    return (document(split, rng) for _ in range(count))
