"""The families of the daily run: whatever differs in a part has a family there, and the others run every night."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import representatives
import tiny

from fcsd.models.archs import ARCHS

PARTS = sorted(representatives._FIELDS)


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    yield
    representatives.group.cache_clear()
    representatives._code.cache_clear()


def daily(*parts: str, **how: Any) -> list[str]:
    return [one.values[0] for one in representatives.representatives(*parts, **how) if not one.marks]


@pytest.mark.parametrize("part", PARTS)
def test_every_group_has_one_family_each_day_and_all_families_are_cases(part: str) -> None:
    cases = representatives.representatives(part)
    assert [one.values[0] for one in cases] == list(tiny.CONFIGS)
    groups = {arch: representatives.group(arch, part) for arch in tiny.CONFIGS}
    chosen = [groups[arch] for arch in daily(part)]
    assert set(chosen) == set(groups.values()) and len(chosen) == len(set(chosen)) < len(groups)


def test_the_families_of_day_and_night_are_all_families() -> None:
    day, night = representatives.by_day_and_night("norm", "mlp")
    assert day.values[0] == daily("norm", "mlp") and not day.marks
    assert sorted(day.values[0] + night.values[0]) == sorted(tiny.CONFIGS)
    assert [mark.name for mark in night.marks] == ["nightly"]


def test_the_code_decides_and_neither_the_name_of_a_family_nor_its_texts_do() -> None:
    assert representatives.group("qwen3", "norm") == representatives.group("llama", "norm")
    assert representatives.group("olmo2", "norm") != representatives.group("llama", "norm")
    assert representatives.group("olmo2", "layer") != representatives.group("llama", "layer")
    assert representatives.group("qwen3", "attention") != representatives.group("llama", "attention")
    assert representatives.group("mixtral", "moe") != representatives.group("olmoe", "moe")


def test_a_family_with_code_of_its_own_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "qwen3" not in daily("norm")
    code = representatives._code
    other = [("RMSNorm", "class RMSNorm(nn.Module):\n    def forward(self, x):\n        return x / x.norm()\n")]
    representatives.group.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(representatives, "_code", lambda arch: other if arch == "qwen3" else code(arch))
        assert "qwen3" in daily("norm")


def test_a_family_of_which_our_row_says_something_else_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "qwen3" not in daily("norm")
    representatives.group.cache_clear()
    monkeypatch.setitem(ARCHS, "qwen3", replace(ARCHS["qwen3"], norm_offset=1))
    assert "qwen3" in daily("norm")


def test_a_type_that_takes_any_language_model_has_the_code_of_the_one_inside() -> None:
    text = tiny.CONFIGS["internvl"][1]["text_config"]["model_type"]
    assert representatives.group("internvl", "attention") == representatives.group(text, "attention")
    assert representatives.group("internvl", "head") != representatives.group(text, "head")


def test_what_stands_behind_a_family_stays_with_it() -> None:
    found = representatives.representatives("norm", of=["llama", "qwen3"], also=(True,))
    assert [one.values for one in found] == [("llama", True), ("qwen3", True)]
    assert [bool(one.marks) for one in found] == [False, True]
