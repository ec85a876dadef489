"""Items that tell a short story: HellaSwag, WinoGrande, GSM8K."""

import random

from world import Item, name, sentence, shuffled, table

PEOPLE = {"man": "he", "woman": "she", "boy": "he", "girl": "she", "grandfather": "he", "nurse": "she"}
MANNERS = ("young", "tall", "smiling", "tired", "cheerful", "busy", "quiet", "careful")


def hellaswag(rng: random.Random) -> Item:
    """The next step of an activity against a step out of order and steps of other activities."""
    activities = table("activities")
    activity = rng.choice(list(activities))
    where, steps = activities[activity]
    person = rng.choice(list(PEOPLE))
    pronoun = PEOPLE[person]
    at = rng.randrange(len(steps) - 1)
    ctx_a = f"A {rng.choice(MANNERS)} {person} is {where}. {pronoun.capitalize()} {steps[at]}."
    misplaced = rng.choice([s for i, s in enumerate(steps) if i not in (at, at + 1)])
    foreign = [rng.choice(activities[a][1]) for a in rng.sample([a for a in activities if a != activity], 2)]
    endings, gold = shuffled(rng, steps[at + 1] + ".", [f"{s}." for s in (misplaced, *foreign)])
    row = {
        "ind": rng.getrandbits(31),
        "activity_label": activity,
        "ctx_a": ctx_a,
        "ctx_b": pronoun,
        "ctx": f"{ctx_a} {pronoun}",
        "endings": endings,
        "source_id": f"world~{activity.replace(' ', '_')}",
        "split": "val",
        "split_type": "indomain",
        "label": str(gold),
    }
    prompt = f"{activity}: {ctx_a} {pronoun.capitalize()}"
    return Item(prompt, row, prompt, " " + endings[gold])


# (sentence, words that fit the first, words that fit the second); {a} and {b} are people or things.
THINGS = (
    "trophy",
    "statue",
    "lamp",
    "clock",
    "vase",
    "radio",
    "crate",
    "drawer",
    "chest",
    "bag",
    "box",
    "jar",
)
COREFERENCE = (
    ("The {a} does not fit into the {b} because the _ is too {w}.", "big large wide", "small narrow tiny"),
    ("The {a} sank while the {b} floated because the _ was {w}.", "heavy dense solid", "light hollow airy"),
    (
        "We sold the {a} and kept the {b} because the _ was {w}.",
        "ugly broken useless",
        "pretty precious lovely",
    ),
    ("{a} lent money to {b} because _ was {w}.", "rich wealthy generous", "poor broke needy"),
    ("{a} asked {b} for advice because _ was {w}.", "lost confused puzzled", "clever wise experienced"),
    ("{a} carried {b} home because _ was {w}.", "strong healthy rested", "injured exhausted sick"),
    ("{a} won the race against {b} because _ was {w}.", "fast quick speedy", "slow lame sluggish"),
    ("{a} hid from {b} because _ was {w}.", "afraid shy guilty", "angry furious violent"),
    ("{a} comforted {b} because _ was {w}.", "caring calm gentle", "sad crying upset"),
    ("{a} envied {b} because _ was {w}.", "unlucky unknown jobless", "famous lucky beloved"),
)


def winogrande(rng: random.Random) -> Item:
    """The question which of two people or things a word refers to. Each sentence pattern has words for both."""
    pattern, first, second = rng.choice(COREFERENCE)
    if pattern.startswith(("The", "We")):
        a, b = rng.sample(THINGS, 2)
    else:
        a, b = rng.sample(table("facts")["names_f"] + table("facts")["names_m"], 2)
    gold = rng.randrange(2)
    text = pattern.format(a=a, b=b, w=rng.choice((first, second)[gold].split()))
    options, right = shuffled(rng, (a, b)[gold], [(b, a)[gold]])
    row = {"sentence": text, "option1": options[0], "option2": options[1], "answer": str(right + 1)}
    before, after = text.split("_")
    return Item(text, row, before + options[right], after.rstrip())


GOODS = ("apples", "books", "marbles", "stamps", "coins", "shells", "pencils", "cards", "cookies", "stickers")
GAIN = ("buys {n} more", "finds {n} more", "gets {n} from a friend", "wins {n} in a game")
LOSS = ("gives away {n}", "loses {n}", "sells {n}", "leaves {n} at school")


def gsm8k(rng: random.Random) -> Item:
    """A number that changes one to three times. The solution lists the steps and ends in ``#### n``."""
    who, pronoun = name(rng)
    goods = rng.choice(GOODS)
    if rng.random() < 0.3:
        boxes, each = rng.randint(2, 9), rng.randint(2, 9)
        have = boxes * each
        told = [f"{who} has {boxes} boxes with {each} {goods} in each box."]
        steps = [f"{who} starts with {boxes} * {each} = {have} {goods}."]
    else:
        have = rng.randint(3, 40)
        told = [f"{who} has {have} {goods}."]
        steps = [f"{who} starts with {have} {goods}."]
    for _ in range(rng.randint(1, 3)):
        if have > 3 and rng.random() < 0.5:
            n = rng.randint(2, min(have - 1, 30))
            event, sign, now = rng.choice(LOSS), "-", have - n
        else:
            n = rng.randint(2, 30)
            event, sign, now = rng.choice(GAIN), "+", have + n
        told.append(f"{pronoun.capitalize()} {event.format(n=n)}.")
        steps.append(f"Then {pronoun} has {have} {sign} {n} = {now} {goods}.")
        have = now
    question = sentence(*told, f"How many {goods} does {who} have now?")
    answer = "\n".join([*steps, f"#### {have}"])
    return Item(question, {"question": question, "answer": answer}, f"Question: {question}\nAnswer:", " " + answer)
