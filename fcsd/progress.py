"""Shows the progress of long work, as a bar on a terminal and elsewhere as log lines, and formats durations."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

# Seconds between two lines in a log file.
INTERVAL_S = 60.0
# A time left is said after this share of the work, or after so many seconds: the first pieces are often the slowest.
_SHARE, _SECONDS = 0.02, 600.0

# On a narrow terminal the bar gives way first, and the time left is cut off before the count and the rate.
_BAR = "{desc} {percentage:2.0f}%|{bar}| {n_fmt}/{total_fmt}, {rate_noinv_fmt}, {remaining} left"

log = logging.getLogger(__name__)


@contextmanager
def progress(
    what: str, total: float, *, quiet: bool = False, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[float], None]]:
    """Yields a function that the caller calls with the amount of work that was done since the call before.

    On a terminal a bar shows percentage, count, rate and time left. Elsewhere a line is logged at most every
    ``INTERVAL_S`` seconds, with what is done, the total, the percentage and, once enough is done, the time left. The
    time left is estimated as if the rest were as fast. Work that takes less than ``INTERVAL_S`` seconds logs nothing.

    Args:
        what: the kind of work, e.g. ``scoring``, and its unit, if it is not a number of things.
        quiet: show nothing, as on all ranks but the first.
        clock: a function that returns the time in seconds.
    """
    done, began = 0.0, clock()
    said = began
    short = total > 9999 or total % 1 > 0  # 1.23M in place of 1234567
    shown: dict[str, Any] = {"bar_format": _BAR, "unit": "", "unit_scale": short, "leave": False, "smoothing": 0}
    with tqdm(
        total=total, desc=what, disable=True if quiet or not log.isEnabledFor(logging.INFO) else None, **shown
    ) as bar:

        def advance(amount: float) -> None:
            nonlocal done, said
            done += amount
            bar.update(amount)
            now = clock()
            if bar.disable and not quiet and now - said >= INTERVAL_S and done < total:
                said = now
                log.info("%s", line(what, done, total, now - began))

        yield advance


def line(what: str, done: float, total: float, seconds: float) -> str:
    """The log line after ``seconds`` of work, for example ``scoring: 1200 of 4800 (25 %), 12 min left``."""
    text = f"{what}: {done:.0f} of {total:.0f} ({int(100 * done / total)} %)"
    if done <= 0 or (done < _SHARE * total and seconds < _SECONDS):
        return text
    return f"{text}, {duration(seconds / done * (total - done))} left"


def duration(seconds: float) -> str:
    """A readable duration: ``under 1 s``, ``45 s``, ``12 min``, ``3 h 20 min``, ``2 d 1 h``."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 1:
        return "under 1 s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
