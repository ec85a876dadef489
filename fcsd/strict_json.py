"""The reader of JSON that a user passes or may edit: machine files, tables, costs, problems and records.

Python's own reader accepts what hides a mistake: NaN, Infinity, ``1e400`` (infinity), a key that stands twice (the last
one counts), and nesting or digits in which it then fails. Here these are errors in one line. The limits on depth and
digits are those of recipes, too: ``recipes.strict_yaml`` reads them here.
"""

import json
import math
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

from fcsd.disk import read_input
from fcsd.terminal import bounded, printable

MAX_BYTES = 4 << 20  # of a file that is read as a whole
MAX_DEPTH = 32  # of lists and mappings in one another
MAX_DIGITS = 20  # of a whole number, with its sign
MOST = 2**63  # what a whole number stays below, with either sign

_SHOWN = 40  # characters of the text of a mistake


class StrictJsonError(ValueError):
    """A text is not strict JSON; the message says why in one line."""


def read_file(path: Path, limit: int = MAX_BYTES) -> Any:
    """The value of a JSON file; see :func:`parse`.

    Args:
        limit: the most bytes that the file may have.

    Raises:
        StrictJsonError: the file is no strict JSON.
        OSError: it cannot be read, is not a regular file, or is too large.
    """
    return parse(read_input(path, limit))


def parse(
    text: bytes | str, *, measured: bool = False, digits: int = MAX_DIGITS, infinite: Collection[str] = ()
) -> Any:
    """The value of a JSON text.

    Args:
        text: bytes are UTF-8.
        measured: whether numbers may be whatever Python's own reader accepts, because they are data and decide nothing:
            the arguments of a function under test, or an error that is not defined.
        digits: the most digits of a whole number, with its sign; beyond ``MAX_DIGITS`` it may also be ``MOST`` or more.
        infinite: keys whose value may be, or be a list with, ``Infinity``.

    Raises:
        StrictJsonError: it is not JSON, is nested too deeply, names a key of a mapping twice, or has a number that is
            not finite or too long.
    """
    checks: dict[str, Any] = {"object_pairs_hook": partial(_unique, infinite=infinite)}
    if not measured:
        whole = whole_number if digits == MAX_DIGITS else partial(_up_to, digits)
        constant = partial(_constant, infinite=bool(infinite))
        checks |= {"parse_constant": constant, "parse_int": whole, "parse_float": _finite}
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text, **checks)
    except StrictJsonError:
        raise
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:  # that of the JSON, of UTF-8, or of a number with thousands of digits
        raise StrictJsonError(f"it is not JSON: {error}") from None
    _require_flat(value)
    return value


def whole_number(text: str) -> int:
    """The whole number that a text of digits and perhaps a sign stands for.

    Raises:
        StrictJsonError: it is too large.
    """
    if len(text) > MAX_DIGITS or abs(int(text)) >= MOST:
        raise StrictJsonError(f"number too large: {_short(text)}")
    return int(text)


def finite_number(value: Any) -> float:
    """A number as a float.

    Raises:
        StrictJsonError: the value is a boolean, a text or anything else but a number, or not finite.
    """
    if type(value) not in (int, float):
        raise StrictJsonError(f"{_short(json.dumps(value))} is not a number")
    return _finite(str(value))


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise StrictJsonError(f"{_short(text)} is not a finite number")
    return number


def _up_to(digits: int, text: str) -> int:
    if len(text) > digits:
        raise StrictJsonError(f"number too large: {_short(text)}")
    return int(text)


def _constant(literal: str, infinite: bool) -> float:
    """Infinity, which the key above it must allow; see ``_unique``."""
    if infinite and literal == "Infinity":
        return math.inf
    raise StrictJsonError(f"{literal} is not a finite number")


def _unique(pairs: list[tuple[str, Any]], infinite: Collection[str]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise StrictJsonError(f"duplicate key {_short(twice)!r}")
    for key, value in pairs if infinite else ():
        if math.inf in (value if isinstance(value, list) else [value]) and key not in infinite:
            raise StrictJsonError("Infinity is not a finite number")
    return found


def _require_flat(value: Any) -> None:
    """Checks the depth of a value, one level at a time."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        within = (inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer))
        level = [inner for inner in within if isinstance(inner, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> StrictJsonError:
    return StrictJsonError(f"nested more than {MAX_DEPTH} levels deep")


def _short(text: str) -> str:
    return bounded(printable(text), _SHOWN)
