"""The table of training through quantised communication follows from the runs that ended."""

from typing import Any

import pytest
from studies.formats.training import table

pytestmark = pytest.mark.lab


def _ended(format: str, directions: str, seed: int, kl: float, score: float | None = None) -> dict[str, Any]:
    scores = {} if score is None else {"PIQA": {"value": score}, "WG": {"value": score - 0.1}}
    about = {"format": format, "directions": directions, "seed": seed}
    return {**about, "held_out_kl": kl, "scores": scores}


def _row(found: str, place: int) -> list[str]:
    return [cell.strip() for cell in found.splitlines()[2 + place].strip("|").split("|")]


def test_a_format_is_free_within_the_spread_of_bf16() -> None:
    runs = []
    for seed, (exact, int8, int4) in enumerate([(0.10, 0.11, 0.20), (0.12, 0.12, 0.21)]):
        runs += [_ended("bf16", "all", seed, exact, 0.8 + 0.1 * seed)]
        runs += [_ended("int8", "all", seed, int8, 0.8), _ended("int4:g128", "forward", seed, int4, 0.8)]
    runs.append(_ended("int8", "all", 2, 0.13, 0.8))  # of a seed that bf16 does not have yet
    found = table(runs)
    assert _row(found, 0) == ["`bf16`", "-", "16", "2", "0.11000", "spread 0.02000", "80.00", "spread 10.00", "-"]
    expected = ["`int8`", "all", "8.25", "3", "0.12000", "+0.00500 ± 0.00500", "75.00", "-5.00 ± 5.00", "yes"]
    assert _row(found, 1) == expected
    assert _row(found, 2)[1:3] == ["forward", "4.25"] and _row(found, 2)[-1] == "no"


def test_a_format_whose_scores_fall_is_not_free() -> None:
    runs = [_ended("bf16", "all", seed, 0.1 + seed, 0.9) for seed in (0, 1)]
    runs += [_ended("int5", "all", seed, 0.1 + seed, 0.8) for seed in (0, 1)]
    assert _row(table(runs), 1)[-1] == "no"
    assert _row(table([{**run, "scores": {}} for run in runs]), 1)[-3:] == ["-", "-", "yes"]
