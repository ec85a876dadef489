"""What a terminal would obey is printed escaped."""

import json

from fcsd.terminal import printable


def test_control_characters_alone_are_escaped() -> None:
    every = "".join(map(chr, range(0x500)))
    shown = printable(every)
    assert not set(shown) & {chr(c) for c in [*range(9), *range(11, 32), *range(127, 160)]}
    assert printable(shown) == shown and shown[-100:] == every[-100:]


def test_json_keeps_its_meaning() -> None:
    value = {"a": "".join(map(chr, range(256)))}
    assert json.loads(printable(json.dumps(value, ensure_ascii=False))) == value


def test_lines_and_other_scripts_stay() -> None:
    text = "one\n\ttwo — 二 \U0001f600\u2028"
    assert printable(text) == text and printable("a\r\nb\rc") == "a\nb\\u000dc"
