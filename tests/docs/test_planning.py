"""The constants and the recipes' hours in docs/planning.md are those of fcsd.plan."""

import re
from pathlib import Path

import pytest

from fcsd.config import load_recipe
from fcsd.plan import Hardware, plan_run
from fcsd.plan.offload import BUS, HOST
from fcsd.plan.speed import (
    BENCHMARK,
    COPY,
    GRAPH,
    LAUNCH,
    MASKED_ATTENTION,
    MICRO_BATCH,
    ROUND,
    SHARE,
    TRAFFIC,
    UPDATE,
    UPDATE_ALONE,
    WRITE,
)

SAID = (
    f"at {100 * SHARE[True, 'bf16']:.1f} % of the H200's peak in bf16 if experts are divided, at "
    f"{100 * SHARE[False, 'bf16']:.1f} % otherwise; and {1e3 * MICRO_BATCH:.1f} ms for each micro-batch",
    f"{1e12 * TRAFFIC:.0f} ps for each value of the residual stream",
    f"{1e3 * LAUNCH['divided experts']:.1f} ms with divided experts, {1e3 * LAUNCH['experts']:.2f} ms with experts "
    f"that are not divided, and at most {1e3 * LAUNCH['dense']:.2f} ms in dense models",
    f"at most {1e3 * GRAPH:.2f} ms for each pass",
    f"Attention with a mask takes {MASKED_ATTENTION:.1f} times as long",
    f"takes {1e12 * UPDATE:.0f} ps in the optimizer, its communication included, and {1e12 * UPDATE_ALONE:.1f} ps on",
    f"The {1e12 * UPDATE:.0f} ps are from",
    f"A step takes {1e12 * ROUND:.0f} ps more for each updated parameter with bf16 moments, and moments travel at "
    f"{BUS / 1e9:.0f} GB/s",
    f"share {HOST / 1e9:.0f} GB/s of host memory",
    f"written at {WRITE / 1e9:.0f} GB/s by each node",
    f"copies to host memory count, at {COPY / 1e9:.0f} GB/s for each process",
    f"early stopping, {BENCHMARK:.0f} s each",
)


@pytest.fixture(scope="module")
def page(repo: Path) -> str:
    return " ".join((repo / "docs/planning.md").read_text().split())


def test_the_constants_are_those_of_the_plan(page: str) -> None:
    assert [phrase for phrase in SAID if phrase not in page] == []


def test_the_hours_of_recipes_are_those_of_the_plan(page: str) -> None:
    rows = re.findall(
        r"\| (?:`(\S+)`|the same with `([\w.=]+)`) \| (\d+) \| ([\d,]+) \| ([\d,.]+) \| ([\d,.]+) (?=\|)", page
    )
    assert len(rows) == 6
    name = ""
    for recipe, change, gpus, *said in rows:
        name = recipe or name
        hardware = Hardware(nodes=int(gpus) // 8)
        found = plan_run(load_recipe(name, [change] if change else []).recipe, hardware).speed
        assert said == [f"{found.tokens_per_second:,.0f}", f"{found.hours:,.1f}", f"{found.gpu_hours:,.1f}"], (
            name,
            change,
        )
