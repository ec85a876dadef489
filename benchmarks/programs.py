"""Starts the programs of a folder of the lab: ``python -m FOLDER NAME ...``, and lists them without a NAME.

A program is a file of the folder with ``main(given)``, and its docstring is its help. ``ARGUMENTS`` has by name what
``argparse`` is told of each argument: its type if it has no default, its default, or all words of ``add_argument``.
Where it is None, ``main`` reads ``given.words`` itself.
"""

import argparse
import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from fcsd.errors import FcsdError


def named(text: str) -> tuple[str, Path]:
    """``NAME=PATH`` as a pair."""
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=DIR")
    return name, Path(path)


TEXTS: dict[str, Any] = dict(type=named, action="append", default=[], metavar="NAME=DIR")


def start(package: str, *words: str) -> Any:
    """Run the program that the first word names, and return what its ``main`` returns: an exit status or None."""
    folder = Path(__file__).parents[1].joinpath(*package.split("."))
    sources = {file.stem: file.read_text() for file in sorted(folder.glob("*.py")) if file.stem != "__main__"}
    docs = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in sources.items() if "\ndef main(" in text}
    if not words or words[0] not in docs:
        shown = "\n".join(f"  {name:14}{doc.splitlines()[0]}" for name, doc in docs.items())
        raise SystemExit(f"python -m {package} NAME ...; --help behind a NAME says more\n{shown}")
    program: Any = import_module(f"{package}.{words[0]}")
    given = argparse.Namespace(words=words[1:])
    if program.ARGUMENTS is not None:
        given = parser_of(program, f"python -m {package} {words[0]}").parse_intermixed_args(words[1:])
    given.command = f"python -m {package} {' '.join(words)}"
    try:
        return program.main(given)
    except FcsdError as error:
        raise SystemExit(f"{error}. {error.hint or ''}".rstrip()) from error


def parser_of(program: Any, prog: str) -> argparse.ArgumentParser:
    """What parses the words of a program."""
    parser = argparse.ArgumentParser(
        prog, description=program.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, told in program.ARGUMENTS.items():
        if not isinstance(told, dict):
            told = dict(type=told) if callable(told) else dict(type=type(told), default=told)
        parser.add_argument(name, **told)
    return parser
