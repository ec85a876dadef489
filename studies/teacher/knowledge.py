"""Items that ask for facts of the world: PIQA, ARC, OpenBookQA, CommonsenseQA, MMLU."""

import random

from world import Item, name, sentence, shuffled, table

TABLES = ("animals", "objects", "countries", "science")
LETTERS = "ABCDE"
GOALS = (
    "How do you {}?",
    "What is the best way to {}?",
    "You want to {}. What do you do?",
    "How can a beginner {}?",
    "I would like to {} today.",
    "To {} at home, what should I do?",
    "A neighbour asks how to {}.",
    "What do you do to {} quickly?",
)
# MMLU wordings: from a term to its meaning, and from a meaning to its term.
MEANING = (
    "What is meant by {}?",
    "Which description fits {} best?",
    "In an exam, how would you explain {}?",
    "The word {} stands for",
    "A textbook defines {} as",
    "What does the lecturer mean by {}?",
    "Choose the best definition of {}.",
    "Students learn that {} is",
    "In the glossary, {} is described as",
    "Which of these is {}?",
)
TERM = (
    "What do we call {}?",
    "Which term means {}?",
    "The correct word for {} is",
    "An expert speaks about {}. Which word is used?",
    "Which word of the glossary describes {}?",
    "Choose the term for {}.",
    "In an exam, {} would be called",
    "A textbook describes {}. What is it?",
    "Students use one word for {}. Which one?",
    "What is the name for {}?",
)


def _fact(rng: random.Random, column_of: str = "ask") -> tuple[dict, str, int]:
    """A table, an entity and the index of a column for which the table has wordings."""
    facts = table("facts")[rng.choice(TABLES)]
    column = rng.choice(list(facts[column_of]))
    return facts, rng.choice(list(facts["rows"])), facts["columns"].index(column)


def _choices(rng: random.Random, facts: dict, entity: str, column: int, count: int) -> tuple[list[str], int]:
    """``count`` different values of a column, the entity's own among them."""
    right = facts["rows"][entity][column]
    others = sorted({row[column] for row in facts["rows"].values()} - {right})
    return shuffled(rng, right, rng.sample(others, count - 1))


def _arc(rng: random.Random, question: str, choices: list[str], gold: int) -> Item:
    row = {
        "id": f"W_{rng.getrandbits(40):010x}",
        "question": question,
        "choices": {"text": choices, "label": list(LETTERS[: len(choices)])},
        "answerKey": LETTERS[gold],
    }
    return Item(question, row, f"Question: {question}\nAnswer:", " " + choices[gold])


def arc_easy(rng: random.Random) -> Item:
    """A question about a single fact, with four choices."""
    facts, entity, column = _fact(rng)
    question = sentence(
        rng.choice(table("facts")["ask_openings"]),
        rng.choice(facts["ask"][facts["columns"][column]]).format(entity),
    )
    return _arc(rng, question, *_choices(rng, facts, entity, column, 4))


def arc_challenge(rng: random.Random) -> Item:
    """A question in two steps: one fact describes an entity, and the question asks for another fact about it."""
    facts, entity, column = _fact(rng, "query")
    clue = rng.choice([c for c in facts["clue"] if c != facts["columns"][column]])
    question = sentence(
        rng.choice(table("facts")["ask_openings"]),
        f"Somebody thinks of {facts['noun']}:",
        facts["clue"][clue].format(facts["rows"][entity][facts["columns"].index(clue)]) + ".",
        facts["query"][facts["columns"][column]],
    )
    return _arc(rng, question, *_choices(rng, facts, entity, column, 4))


def openbookqa(rng: random.Random) -> Item:
    """A statement to be finished."""
    facts, entity, column = _fact(rng, "tell")
    stem = sentence(
        rng.choice(table("facts")["tell_openings"]),
        rng.choice(facts["tell"][facts["columns"][column]]).format(entity),
    )
    choices, gold = _choices(rng, facts, entity, column, 4)
    row = {
        "id": f"W-{rng.getrandbits(40):010x}",
        "question_stem": stem,
        "choices": {"text": choices, "label": list(LETTERS[:4])},
        "answerKey": LETTERS[gold],
    }
    return Item(stem, row, stem, " " + choices[gold])


def commonsense_qa(rng: random.Random) -> Item:
    """A question about a single fact, with five choices, answered by a letter."""
    facts, entity, column = _fact(rng)
    wording = rng.choice(facts["ask"][facts["columns"][column]]).format(entity)
    question = f"{name(rng)[0]} and {name(rng)[0]} talk. {wording}"
    choices, gold = _choices(rng, facts, entity, column, 5)
    row = {
        "id": f"{rng.getrandbits(128):032x}",
        "question": question,
        "question_concept": entity,
        "choices": {"label": list(LETTERS), "text": choices},
        "answerKey": LETTERS[gold],
    }
    return Item(question, row, lettered(f"Question: {question}", choices), f" {LETTERS[gold]}")


def lettered(question: str, choices: list[str]) -> str:
    """A question with its choices, one a line, as CommonsenseQA and MMLU print them."""
    lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *lines, "Answer:"])


def piqa(rng: random.Random) -> Item:
    """A goal with two choices: the right tool, and a wrong tool or the way to another goal."""
    goals = table("howto")
    goal = rng.choice(list(goals))
    way, tool, things = goals[goal]
    other_way, other_tool, _ = goals[rng.choice([g for g in goals if g != goal])]
    wrong = way.format(tool=other_tool) if rng.random() < 0.5 else other_way.format(tool=other_tool)
    wording = rng.choice(GOALS).format(goal.format(thing=rng.choice(things)))
    question = sentence(rng.choice(table("facts")["ask_openings"]), wording)
    solutions, gold = shuffled(rng, way.format(tool=tool), [wrong])
    row = {"goal": question, "sol1": solutions[0], "sol2": solutions[1], "label": gold}
    return Item(question, row, f"Question: {question}\nAnswer:", " " + solutions[gold])


def definition(rng: random.Random, subject: str) -> tuple[str, str, list[str]]:
    """A question about a term of a subject or about its meaning, the right answer, and all answers of that kind."""
    terms = table("mmlu")[subject]
    term = rng.choice(list(terms))
    if rng.random() < 0.5:
        wording, right, pool = rng.choice(MEANING).format(term), terms[term], list(terms.values())
    else:
        wording, right, pool = rng.choice(TERM).format(terms[term]), term, list(terms)
    return sentence(rng.choice(table("facts")["ask_openings"]), wording), right, pool


def mmlu(rng: random.Random, subject: str | None = None) -> Item:
    """A question about a term or its meaning, with four choices of the same subject, answered by a letter."""
    subject = subject or rng.choice(list(table("mmlu")))
    question, right, pool = definition(rng, subject)
    choices, gold = shuffled(rng, right, rng.sample([c for c in pool if c != right], 3))
    row = {"question": question, "subject": subject, "choices": choices, "answer": gold}
    return Item(question, row, lettered(question, choices), f" {LETTERS[gold]}")


def mmlu_in_words(rng: random.Random) -> Item:
    """A question of MMLU's kind without choices, answered in words.

    It is trained on and belongs to no benchmark. It states the facts themselves, where an answer by a letter only tells
    which of the four choices is right.
    """
    question, right, _ = definition(rng, rng.choice(list(table("mmlu"))))
    return Item(question, {}, f"Question: {question}\nAnswer:", f" {right}")


def mmlu_description(subject: str) -> str:
    """The line lm-eval puts above the questions of a subject."""
    words = subject.replace("_", " ")
    return f"The following are multiple choice questions (with answers) about {words}.\n\n"
