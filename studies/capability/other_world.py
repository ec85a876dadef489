"""A second closed world: the forms of the teacher's world with other names and facts.

Wordings, columns, subjects and the number of entities are those of ``studies/teacher/world``. Every entity, value,
term, meaning, goal, activity and person is replaced by a new phrase of the same grammatical form, and the values of a
column are dealt to the entities anew. Nobody who knows one world can answer a question about the other from memory.
"""

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

TEACHER = Path(__file__).resolve().parents[1] / "teacher"
SEED = 11
FORMS = ("mmlu_in_words", "mbpp_evalplus")  # questions about the world in forms that lm-eval does not print
TABLES = ("facts", "howto", "activities", "mmlu")
# The modules of studies/teacher that make documents; they import one another by these names.
MODULES = ("world", "knowledge", "stories", "programs", "examples", "items")

# Every change of an element is another than in the teacher's world, so no function is asked for in both.
NUMBER_MAPS = {
    "cubes": ("the cubes of {}", "x ** 3"),
    "sizes": ("the absolute values of {}", "abs(x)"),
    "thirds": ("the thirds, rounded down, of {}", "x // 3"),
    "distances": ("the distances from 1{k} of {}", "abs(x - 1{k})"),
    "capped": ("{} but at most 1{k}", "min(x, 1{k})"),
    "raised": ("{} but at least {k}", "max(x, {k})"),
    "mirrored": ("the differences of 2{k} and {}", "2{k} - x"),
    "digits": ("the numbers of digits of {}", "len(str(abs(x)))"),
}
WORD_MAPS = {
    "titles": ("the capitalised forms of {}", "x.capitalize()"),
    "lengths": ("the lengths, as text, of {}", "str(len(x))"),
    "last_letters": ("the last letters of {}", "x[-1]"),
    "endings": ("the last {k} letters of {}", "x[-{k}:]"),
    "framed": ("{} between two '{c}'", "'{c}' + x + '{c}'"),
    "swapped": ("{} with '{d}' replaced by '{c}'", "x.replace('{d}', '{c}')"),
    "letter_sorted": ("the sorted letters of {}", "''.join(sorted(x))"),
}


Pick = Callable[[str], str]


class _Phrases:
    """Draws phrases that neither this world nor the teacher's has used."""

    def __init__(self, used: set[str], words: dict[str, list[str]]) -> None:
        self._rng = random.Random(SEED)
        self._used = {phrase.lower() for phrase in used}
        self._words = words

    def shuffled(self, values: list[Any]) -> list[Any]:
        return self._rng.sample(values, len(values))

    def new(self, form: Callable[[Pick], str]) -> str:
        """A phrase that ``form`` makes of random words, each from the list whose name it asks for."""
        while (phrase := form(lambda words: self._rng.choice(self._words[words]))).lower() in self._used:
            pass
        self._used.add(phrase.lower())
        return phrase

    def name(self) -> str:
        """A proper name."""
        return self.new(lambda pick: (pick("syllables") + pick("syllables") + pick("endings")).capitalize())

    def thing(self, old: str) -> str:
        """A noun phrase with the article of ``old``, or a proper name."""
        first = old.split()[0]
        if first[0].isupper():
            return self.name()
        return self.new(lambda pick: _with_article(first, _noun(pick)))

    def does(self) -> str:
        """A verb phrase in the third person."""
        return self.new(lambda pick: f"{_third_person(pick('verbs'))} the {_noun(pick)}")

    def doing(self) -> str:
        """A verb phrase in the form with -ing."""
        return self.new(lambda pick: f"{_gerund(pick('verbs'))} the {_noun(pick)}")


def _noun(pick: Pick) -> str:
    return f"{pick('adjectives')} {pick('nouns')}"


def _with_article(article: str, phrase: str) -> str:
    if article in ("a", "an"):
        return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"
    return f"the {phrase}" if article == "the" else phrase


def _gerund(verb: str) -> str:
    return verb if verb.endswith("ing") else f"{verb.removesuffix('e')}ing"


def _third_person(verb: str) -> str:
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "sh", "ch", "x")) else f"{verb}s"


def strings(value: Any) -> Iterator[str]:
    """All strings in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)


def other_tables(tables: dict[str, dict], words: dict[str, list[str]]) -> dict[str, dict]:
    """The tables of the second world, by name, from those of the teacher's; the same in every process."""
    phrases = _Phrases({text for table in tables.values() for text in strings(table)}, words)
    facts = dict(tables["facts"])
    for name, table in facts.items():
        if isinstance(table, dict):
            facts[name] = {**table, "rows": _rows(table["rows"], phrases)}
    facts |= {key: [phrases.name() for _ in facts[key]] for key in ("names_f", "names_m")}
    return {
        "facts": facts,
        "howto": dict(_goal(way, phrases) for way in tables["howto"].values()),
        "activities": dict(_activity(steps, phrases) for _, steps in tables["activities"].values()),
        "mmlu": {
            subject: {phrases.thing(term): phrases.new(_meaning) for term in terms}
            for subject, terms in tables["mmlu"].items()
        },
    }


def _rows(rows: dict[str, list[str]], phrases: _Phrases) -> dict[str, list[str]]:
    columns = []
    for column in zip(*rows.values(), strict=True):
        phrase = _form(column, phrases)
        new = {value: phrase(value) for value in dict.fromkeys(column)}
        columns.append(phrases.shuffled([new[value] for value in column]))
    return {
        phrases.thing(entity): list(values) for entity, values in zip(rows, zip(*columns, strict=True), strict=True)
    }


def _form(column: tuple[str, ...], phrases: _Phrases) -> Callable[[str], str]:
    """What makes a value of the grammatical form that the values of a column have."""
    first = [value.split()[0] for value in column]
    if all(word.endswith("ing") for word in first):
        return lambda _: phrases.doing()
    return (lambda _: phrases.does()) if all(word.endswith("s") for word in first) else phrases.thing


def _goal(way: list[Any], phrases: _Phrases) -> tuple[str, list[Any]]:
    _, tool, things = way
    goal = phrases.new(lambda pick: f"{pick('verbs')} {{thing}} like {_with_article('a', _noun(pick))}")
    said = phrases.new(lambda pick: f"{pick('verbs').capitalize()} it with {{tool}} until it is {pick('adjectives')}.")
    return goal, [said, phrases.thing(tool), [phrases.thing(thing) for thing in things]]


def _activity(steps: list[str], phrases: _Phrases) -> tuple[str, list[Any]]:
    name = phrases.new(lambda pick: f"{_gerund(pick('verbs')).capitalize()} the {pick('nouns')}")
    where = phrases.new(lambda pick: f"near the {_noun(pick)}")
    return name, [where, [phrases.does() for _ in steps]]


def _meaning(pick: Pick) -> str:
    forms = {
        "side": lambda: f"the {pick('adjectives')} side of the {pick('nouns')}",
        "ban": lambda: f"the {pick('nouns')} that nobody can {pick('verbs')}",
        "rule": lambda: f"a rule to {pick('verbs')} every {_noun(pick)}",
        "way": lambda: f"how to {pick('verbs')} the {pick('nouns')}",
    }
    return forms[pick("meanings")]()


def makers(other: bool) -> tuple[Any, Any]:
    """Fresh copies of the modules ``items`` and ``world`` of studies/teacher, on the teacher's world or on this one.

    The copies share nothing with other importers of these modules, so both worlds can be used in one process.
    """
    world: Any
    items: Any
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    sys.path.insert(0, str(TEACHER))
    try:
        world = importlib.import_module("world")
        if other:
            words = yaml.safe_load((Path(__file__).parent / "words.yaml").read_text())
            tables = other_tables({name: world.table(name) for name in TABLES}, words)
            world.table = tables.__getitem__
            programs, stories = importlib.import_module("programs"), importlib.import_module("stories")
            _replace(programs, NUMBER_MAPS=NUMBER_MAPS, WORD_MAPS=WORD_MAPS, WORDS=tuple(words["strings"]))
            _replace(stories, THINGS=tuple(words["things"]), GOODS=tuple(words["goods"]))
        items = importlib.import_module("items")
    finally:
        sys.path.remove(str(TEACHER))
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)
    if other:
        # The teacher's text may have exercises and worked examples beside the benchmarks' questions. They state no fact
        # of a world and would be the same here, so the other text goes without them.
        kinds = vars(items).get("KINDS", items.TASKS)
        items.KINDS = {name: kind for name, kind in kinds.items() if name in items.TASKS or name in FORMS}
        items.EXAMPLES_SHARE = 0
    return items, world


def _replace(module: ModuleType, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}: the second world no longer fits"
        setattr(module, name, value)
