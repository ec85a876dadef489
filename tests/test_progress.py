"""How far long work is, without a terminal: lines with total and time left, and never too many."""

import fcntl
import logging
import os
import pty
import re
import struct
import termios
import time
from contextlib import suppress

import pytest

from fcsd.progress import duration, line, progress


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "fcsd.progress")
    return caplog


def run(pieces: int, seconds_each: float, quiet: bool = False) -> None:
    now = 0.0
    with progress("scoring", pieces, quiet=quiet, clock=lambda: now) as advance:
        for _ in range(pieces):
            now += seconds_each
            advance(1)


def test_long_work_says_total_and_time_left(said: pytest.LogCaptureFixture) -> None:
    run(20, 30.0)
    assert said.messages[0] == "scoring: 2 of 20 (10 %), 9 min left"
    assert len(said.messages) == 9, "one line a minute, none at the end"


def test_no_time_left_is_said_before_enough_is_measured(said: pytest.LogCaptureFixture) -> None:
    """The first piece of a thousand took a minute; it says nothing about the rest."""
    assert line("scoring", 1, 1000, 60.0) == "scoring: 1 of 1000 (0 %)"
    assert line("scoring", 0, 1000, 6000.0) == "scoring: 0 of 1000 (0 %)"
    assert line("scoring", 20, 1000, 60.0) == "scoring: 20 of 1000 (2 %), 49 min left"
    assert line("scoring", 1, 1000, 600.0).endswith("6 d 22 h left"), "work that is so slow must say so"
    run(1000, 61.0)
    assert said.messages[0] == "scoring: 1 of 1000 (0 %)"


def test_a_short_one_and_another_rank_say_nothing(said: pytest.LogCaptureFixture) -> None:
    run(500, 0.1)
    run(20, 30.0, quiet=True)
    assert said.messages == []


@pytest.mark.parametrize(("total", "count"), [(5_000_000, "2.50M/5.00M"), (4, "2/4")])
def test_count_and_rate_stay_on_a_narrow_terminal(total: int, count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    with os.fdopen(terminal, "w", encoding="utf-8") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        with progress("generating, tokens", total) as advance:
            time.sleep(0.11)  # tqdm draws at most ten times a second
            advance(total // 2)
    said = b""
    with os.fdopen(ours, "rb"), suppress(OSError):  # the end of a terminal that nobody holds is an error
        while block := os.read(ours, 1 << 12):
            said += block
    (shown,) = (line for line in said.decode().split("\r") if "50%" in line)
    assert len(shown) <= 60 and re.fullmatch(
        rf"generating, tokens 50%\|.+\| {count}, +[0-9.]+[kM]?/s, 00:0. left", shown
    ), shown


def test_hours() -> None:
    assert line("generating", 100, 400, 3600.0) == "generating: 100 of 400 (25 %), 3 h 0 min left"
    assert line("copying, GB", 7.3, 61.06, 60.0) == "copying, GB: 7 of 61 (11 %), 7 min left"


SAID = {
    0.4: "under 1 s",
    89: "89 s",
    90: "2 min",
    3540: "59 min",
    3600: "1 h 0 min",
    12_000: "3 h 20 min",
    176_400: "2 d 1 h",
}


@pytest.mark.parametrize(("seconds", "said"), SAID.items())
def test_durations_are_read_at_a_glance(seconds: float, said: str) -> None:
    assert duration(seconds) == said
