"""Worked examples as lm-eval puts before a question of MBPP+: small functions by other authors, in other styles.

MBPP's examples differ from the functions of the closed world: several arguments, loops, imports, other indentation,
line ends of Windows, tests without spaces. A model that had not seen such neighbours failed the questions after them.
The functions here were written for this purpose. None is taken from MBPP, and no benchmark asks for one.
"""

import random
from collections.abc import Callable

from programs import WORDS, mbpp_prompt
from world import Item

VERBS = ("find", "get", "count", "check", "is", "make", "remove", "test", "my", "do", "new", "sum", "max", "first")
NOUNS = (
    "items",
    "list",
    "tuple",
    "number",
    "digits",
    "word",
    "string",
    "pair",
    "area",
    "power",
    "value",
    "index",
    "letters",
    "queue",
    "prime",
    "elements",
    "lists",
    "even",
    "string_list",
    "text",
    "nums",
    "time",
    "side",
    "of_two",
)
ARGUMENTS = ("n", "x", "nums", "lst", "text", "items", "test_list", "arr", "data", "values", "list1", "word", "num")


def _number(rng: random.Random) -> tuple:
    return (rng.randint(0, 60),)


def _two_numbers(rng: random.Random) -> tuple:
    return rng.randint(1, 40), rng.randint(1, 40)


def _numbers(rng: random.Random) -> tuple:
    return ([rng.randint(0, 90) for _ in range(rng.randint(3, 8))],)


def _two_lists(rng: random.Random) -> tuple:
    length = rng.randint(3, 5)
    return [rng.randint(1, 15) for _ in range(length)], [rng.randint(1, 15) for _ in range(length)]


def _two_tuples(rng: random.Random) -> tuple:
    first, second = _two_lists(rng)
    return tuple(first), tuple(second)


def _word(rng: random.Random) -> tuple:
    return (rng.choice(WORDS),)


def _word_and_letter(rng: random.Random) -> tuple:
    return rng.choice(WORDS), rng.choice("aenrst")


# (task, code, maker of the arguments); {f} is the function, {a} and {b} are its arguments, {k} is a number
FUNCTIONS: tuple[tuple[str, str, Callable[[random.Random], tuple]], ...] = (
    (
        "Write a function to keep the items of the first list which the second list lacks.",
        "def {f}({a}, {b}):\n  kept = [i for i in {a} if i not in {b}]\n  return (kept)",
        _two_lists,
    ),
    (
        "Write a function to add up the elements of two given tuples one by one.",
        "def {f}({a}, {b}):\n  res = tuple(i + j for i, j in zip({a}, {b}))\n  return (res) ",
        _two_tuples,
    ),
    (
        "Write a function to collect all elements of two tuples without repetition.",
        "def {f}({a}, {b}):\n  res = tuple(sorted(set({a}) | set({b})))\n  return (res) ",
        _two_tuples,
    ),
    (
        "Write a python function to check whether a number can be divided by {k}.",
        "def {f}({a}):\n    if {a} % {k} == 0:\n        return True\n    else:\n        return False",
        _number,
    ),
    (
        "Write a python function to check whether a number is a perfect square.",
        "import math\ndef {f}({a}):\n    root = int(math.sqrt({a}))\n    return root * root == {a}",
        _number,
    ),
    (
        "Write a python function to count the divisors of a number.",
        "def {f}({a}):\n    count = 0\n    for i in range(1, {a} + 1):\n        if {a} % i == 0:\n"
        "            count = count + 1\n    return count",
        _number,
    ),
    (
        "Write a python function to find the sum of the digits of a number.",
        "def {f}({a}):\n    total = 0\n    while {a} > 0:\n        total = total + {a} % 10\n"
        "        {a} = {a} // 10\n    return total",
        _number,
    ),
    (
        "Write a function to find the greatest common divisor of two numbers.",
        "import math\ndef {f}({a}, {b}):\n  return math.gcd({a}, {b})",
        _two_numbers,
    ),
    (
        "Write a function to find the area of a rectangle with a border of {k}.",
        "def {f}({a}, {b}):\n  area = ({a} + 2 * {k}) * ({b} + 2 * {k})\n  return area",
        _two_numbers,
    ),
    (
        "Write a function to find the {k} smallest integers of a list using a heap queue.",
        "import heapq\ndef {f}({a}):\n  smallest = heapq.nsmallest({k}, {a})\n  return smallest",
        _numbers,
    ),
    (
        "Write a function to leave out the first {k} elements of a list.",
        "def {f}({a}):\n  return {a}[{k}:]",
        _numbers,
    ),
    (
        "Write a function to swap the first and the last element of a list.",
        "def {f}({a}):\n    {a}[0], {a}[-1] = {a}[-1], {a}[0]\n    return {a}",
        _numbers,
    ),
    (
        "Write a python function to find the differences of neighbours in a list.",
        "def {f}({a}):\n    result = []\n    for i in range(len({a}) - 1):\n"
        "        result.append({a}[i + 1] - {a}[i])\n    return result",
        _numbers,
    ),
    (
        "Write a python function to count how often a letter occurs in a word.",
        "def {f}({a}, {b}):\n    count = 0\n    for c in {a}:\n        if c == {b}:\n            count += 1\n"
        "    return count",
        _word_and_letter,
    ),
    (
        "Write a python function to remove a letter from a word.",
        "def {f}({a}, {b}):\n    return {a}.replace({b}, '')",
        _word_and_letter,
    ),
    (
        "Write a function to repeat a word {k} times with spaces in between.",
        'def {f}({a}):\n  words = [{a}] * {k}\n  return " ".join(words)',
        _word,
    ),
    (
        "Write a function to check whether a word has the letter at position {k} twice.",
        "import re\ndef {f}({a}):\n  letter = {a}[{k} % len({a})]\n  return len(re.findall(letter, {a})) == 2",
        _word,
    ),
    (
        "Write a function to convert minutes into a tuple of hours and minutes.",
        "def {f}({a}):\n  hours = {a} // 60\n  return (hours, {a} % 60)",
        _number,
    ),
)


def example(rng: random.Random) -> Item:
    """A worked example with its solution. The key is the task, so the numbers in it tell the splits apart."""
    task, code, arguments = rng.choice(FUNCTIONS)
    function = "_".join([rng.choice(VERBS), *rng.sample(NOUNS, rng.randint(1, 2))])
    a, b = rng.sample(ARGUMENTS, 2)
    k = rng.randint(2, 9)
    code = code.format(f=function, a=a, b=b, k=k)
    scope: dict = {}
    exec(code, scope)
    equals, space = rng.choice((" == ", " == ", "==")), rng.choice(("", "", " "))
    asserts = []
    for _ in range(3):
        values = arguments(rng)
        shown = f"{', ' if rng.random() < 0.7 else ','}".join(map(repr, values))
        asserts.append(f"assert {function}({space}{shown}){equals}{scope[function](*values)!r}{space}")
    if rng.random() < 0.6:
        code = code.replace("\n", "\r\n")
    return Item(f"{task} {k}", {}, mbpp_prompt(task.format(k=k), asserts), f"{code}\n[DONE]")
