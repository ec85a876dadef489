"""The rule of ``parallel.dedup: auto`` chooses what was fastest on four GPUs that imitated two nodes."""

import json
from pathlib import Path

import pytest

from fcsd.parallel.cost import Dedup, Line, Links, Rows, Sent
from fcsd.parallel.expert.choice import options

pytestmark = pytest.mark.lab

WAYS: dict[Dedup, str] = {"off": "flat", "rank": "HD1", "node": "HD2"}  # setting -> its name in the raw file


@pytest.mark.parametrize(("part", "name"), [("sweep", "slow"), ("near-sweep", "near")])
def test_the_choice_is_the_fastest_way_at_every_measured_point(repo: Path, part: str, name: str) -> None:
    """Without any cover. Over NVLink alone all ranks are one node, so there is no second level."""
    found = json.loads((repo / "benchmarks/results/hierarchy_4xh200.json").read_text())
    model = found["models"][name]
    near, far, direct = (Line(**model["lines"][line]) for line in ("near", "far", "direct"))
    fixed: dict[Dedup, float] = {dedup: model["fixed"][way] / 2 for dedup, way in WAYS.items()}
    links = Links(2, near, far, 0.0, model["copy"], 1.0, direct, fixed=fixed)
    assert len(found[part]) == 32
    for point in found[part]:
        sent = {}
        for dedup, way in WAYS.items():
            inside, between = (point["rows"][way][kind] * 4096 for kind in ("near", "far"))
            sent[dedup] = Sent(inside + between, 0) if model["one_link"] else Sent(inside, between)
        if model["one_link"]:
            del sent["node"]
        rows = Rows(point["tokens"], point["top_k"], point["experts"], 4, 2048)
        chosen = options(sent, rows, links, covers=(0.0, 0.0))[0].dedup
        assert point["seconds"][WAYS[chosen]] <= 1.03 * point["seconds"][point["best"]], point["tokens"]
