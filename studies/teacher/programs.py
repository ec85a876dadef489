"""Items that ask for a small Python function: HumanEval+ and MBPP+, the latter as lm-eval and as EvalPlus print it.

A function is a composition of three parts: it keeps some elements, changes each, and combines them. Its
key names the composition, so a function seen in training in any form is in neither mirror.
"""

import random

from world import Item

# name of the part -> (words, expression in x); {k} is a number, {c} a letter
NUMBER_MAPS = {
    "numbers": ("{}", "x"),
    "squares": ("the squares of {}", "x * x"),
    "doubles": ("the doubles of {}", "2 * x"),
    "negatives": ("the negations of {}", "-x"),
    "halves": ("the halves, rounded down, of {}", "x // 2"),
    "shifted": ("{} plus {k}", "x + {k}"),
    "lowered": ("{} minus {k}", "x - {k}"),
    "multiples": ("{} times {k}", "x * {k}"),
    "remainders": ("the remainders by {k} of {}", "x % {k}"),
}
NUMBER_FILTERS = {
    "all": ("all numbers", ""),
    "even": ("the even numbers", "x % 2 == 0"),
    "odd": ("the odd numbers", "x % 2 == 1"),
    "positive": ("the positive numbers", "x > 0"),
    "negative": ("the negative numbers", "x < 0"),
    "above": ("the numbers greater than {j}", "x > {j}"),
    "below": ("the numbers less than {j}", "x < {j}"),
    "divisible": ("the numbers divisible by {j}", "x % {j} == 0"),
}
WORD_MAPS = {
    "words": ("{}", "x"),
    "uppers": ("the upper case forms of {}", "x.upper()"),
    "reversed": ("the reversals of {}", "x[::-1]"),
    "doubled": ("the repetitions of {}", "x + x"),
    "first_letters": ("the first letters of {}", "x[0]"),
    "marked": ("{} followed by '{c}'", "x + '{c}'"),
    "prefixes": ("the first {k} letters of {}", "x[:{k}]"),
}
WORD_FILTERS = {
    "all": ("all words", ""),
    "longer": ("the words longer than {j}", "len(x) > {j}"),
    "shorter": ("the words shorter than {j}", "len(x) < {j}"),
    "containing": ("the words that contain '{d}'", "'{d}' in x"),
    "starting": ("the words that start with '{d}'", "x.startswith('{d}')"),
    "ending": ("the words that end with '{d}'", "x.endswith('{d}')"),
}
NUMBER_FOLDS = {
    "list": ("a list of {}", "[{}]", "List[int]"),
    "sum": ("the sum of {}", "sum({})", "int"),
    "largest": ("the largest of {} or 0", "max(({}), default=0)", "int"),
    "smallest": ("the smallest of {} or 0", "min(({}), default=0)", "int"),
    "sorted": ("a sorted list of {}", "sorted({})", "List[int]"),
}
WORD_FOLDS = {
    "list": ("a list of {}", "[{}]", "List[str]"),
    "joined": ("a string that joins {}", "''.join({})", "str"),
    "sorted": ("a sorted list of {}", "sorted({})", "List[str]"),
    "longest": ("the length of the longest of {} or 0", "max((len(y) for y in ({})), default=0)", "int"),
}
WORDS = (
    "tree",
    "stone",
    "ant",
    "river",
    "cat",
    "note",
    "tea",
    "star",
    "rain",
    "sun",
    "nest",
    "art",
    "oats",
    "rose",
)
# The name of a function cannot be derived from its task. It has to be copied from the signature or from the tests.
NAMES = (
    "{fold}_{change}_{keep}",
    "{keep}_{change}_{fold}",
    "{change}_of_{keep}",
    "{verb}_{fold}_{change}",
    "{verb}_{keep}_{fold}",
    "{verb}_{change}",
)
VERBS = ("get", "find", "make", "compute", "take", "build", "give", "collect", "work_out", "solve")


def _function(rng: random.Random) -> tuple[str, str, str, str, str, str]:
    """A random composition: key, name, words, argument, annotated signature's types, expression."""
    numbers = rng.random() < 0.6
    maps, filters, folds = (
        (NUMBER_MAPS, NUMBER_FILTERS, NUMBER_FOLDS) if numbers else (WORD_MAPS, WORD_FILTERS, WORD_FOLDS)
    )
    change, keep, fold = rng.choice(list(maps)), rng.choice(list(filters)), rng.choice(list(folds))
    fill = {
        "k": rng.randint(2, 5),
        "j": rng.randint(2, 5),
        "c": rng.choice("!?ab"),
        "d": rng.choice("aenrst"),
    }
    condition = filters[keep][1].format(**fill)
    arg = "numbers" if numbers else "words"
    each = f"{maps[change][1].format(**fill)} for x in {arg}" + (f" if {condition}" if condition else "")
    text = folds[fold][0].format(maps[change][0].format(filters[keep][0], **fill).format(**fill))
    types = f"List[{'int' if numbers else 'str'}]) -> {folds[fold][2]}"
    # Doubled parentheses would be correct, but nobody writes them.
    expression = folds[fold][1].format(each)
    name = rng.choice(NAMES).format(fold=fold, change=change, keep=keep, verb=rng.choice(VERBS))
    return f"{arg} {expression}", name, text, arg, types, expression


def _calls(rng: random.Random, name: str, arg: str, expression: str, count: int) -> list[tuple[str, str]]:
    """``count`` calls and the reprs of their results, computed by running the expression."""
    calls = []
    for _ in range(count):
        if arg == "numbers":
            value = [rng.randint(-9, 20) for _ in range(rng.randint(3, 6))]
        else:
            value = rng.sample(WORDS, rng.randint(2, 4))
        calls.append((f"{name}({value!r})", repr(eval(expression, {arg: value}))))
    return calls


def humaneval_plus(rng: random.Random) -> Item:
    """Complete a function from its signature and docstring."""
    key, name, text, arg, types, expression = _function(rng)
    calls = _calls(rng, name, arg, expression, 8)
    prompt = (
        f"from typing import List\n\n\ndef {name}({arg}: {types}:\n"
        f'    """ Return {text}.\n    >>> {calls[0][0]}\n    {calls[0][1]}\n    """\n'
    )
    body = f"    return {expression}\n"
    asserts = "".join(f"    assert {call.replace(name, 'candidate', 1)} == {out}\n" for call, out in calls)
    row = {
        "task_id": "HumanEval/0",
        "prompt": prompt,
        "canonical_solution": body,
        "entry_point": name,
        "test": f"def check(candidate):\n{asserts}",
    }
    return Item(key, row, prompt, body)


def mbpp_plus(rng: random.Random) -> Item:
    """Write a function from one sentence and three assertions."""
    key, name, text, arg, _, expression = _function(rng)
    asserts = [f"assert {call} == {out}" for call, out in _calls(rng, name, arg, expression, 8)]
    code = f"def {name}({arg}):\n    return {expression}"
    task = f"Write a function to return {text}."
    row = {
        "task_id": 0,
        "code": code,
        "prompt": task,
        "source_file": "world",
        "test_imports": [],
        "test_list": asserts[:3],
        "test": "\n".join(asserts),
    }
    return Item(key, row, mbpp_prompt(task, asserts[:3]), f"{code}\n[DONE]")


def mbpp_prompt(task: str, asserts: list[str]) -> str:
    """The prompt that lm-eval makes of a task and its assertions."""
    tests = "\n".join(asserts)
    return (
        f"You are an expert Python programmer, and here is your task: {task} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


def evalplus_prompt(row: dict) -> str:
    """The prompt of EvalPlus' own file for a row of MBPP+: a docstring with the task and the first assertion."""
    return f'"""\n{row["prompt"]}\n{row["test_list"][0]}\n"""\n'


def mbpp_evalplus(rng: random.Random) -> Item:
    """A problem of MBPP+ in the form of EvalPlus, where the program ends the document."""
    item = mbpp_plus(rng)
    return Item(item.key, item.row, evalplus_prompt(item.row), f"{item.row['code']}\n")
