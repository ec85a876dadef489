"""``parallel.dedup: auto`` chooses once, by the links in the machine file, and a resumed run has the same choice."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import ranks
import runs
import torch
from safetensors.torch import load_file

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.experts.dedup_choice import FILE, summary
from fcsd.distill.experts.expert_parallel import check_machine
from fcsd.distill.run.identity import differences, run_identity
from fcsd.distill.run.report import read_metrics
from fcsd.errors import ConfigError
from fcsd.launch.world import World
from fcsd.parallel.cost import Dedup, Links, Rows, Sent
from fcsd.parallel.expert.choice import arrangements, options, rows_by_link, told
from fcsd.parallel.expert.levels import rows_sent
from fcsd.parallel.machine import Link, read_machine

LINKS: dict[str, Any] = {"gpus_per_node": 2, "near": {"latency_us": 1, "gb_per_s": 300}}
# Between nodes each byte is dear, or every level costs more than it can save.
SLOW = LINKS | {"far": {"latency_us": 1, "gb_per_s": 0.01}}
COSTLY = LINKS | {"far": {"latency_us": 1, "gb_per_s": 300}, "fixed_us": {"off": 0, "rank": 5000, "node": 9000}}
COMMON = {"parallel__ep_size": 4, "train__batch_tokens": 512, "train__steps": 3}


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other. The last one begins as the run before it was after its second step."""
    for number, recipe in enumerate(recipes):
        run = Path(recipe.recipe.output_dir)
        if number == len(recipes) - 1 and torch.distributed.get_rank() == 0:
            before = Path(recipes[number - 1].recipe.output_dir)
            shutil.copytree(before / "checkpoints" / "step-2", run / "checkpoints" / "step-2")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        loop.distill_model(recipe)


def test_a_run_chooses_once_and_resumes_with_its_choice(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    cases: dict[str, dict[str, Any]] = {}
    for name, machine in (("slow", SLOW), ("costly", COSTLY)):
        (tmp_path / f"{name}.json").write_text(json.dumps(machine))
        cases[name] = {"parallel__dedup": "auto", "parallel__machine": str(tmp_path / f"{name}.json")}
    cases["resumed"] = cases["costly"]
    recipes = [
        runs.resolved(tmp_path, **COMMON, **case, output_dir=str(tmp_path / name)) for name, case in cases.items()
    ]
    ranks.results(4, distill, recipes)
    keys = ("loss", "wire_bytes", "fullest_rank_rows")
    lines = {name: [[line[key] for key in keys] for line in read_metrics(tmp_path / name)] for name in cases}
    assert lines["costly"][0] == lines["slow"][0]  # both take the first step by node
    assert lines["costly"][1][1] != lines["slow"][1][1] and lines["costly"][1][2] > lines["slow"][1][2]
    assert lines["resumed"] == lines["costly"][2:]
    for name, chosen in (("slow", "node"), ("costly", "off")):
        found = json.loads((tmp_path / name / FILE).read_text())
        assert found and {layer[0]["dedup"] for layer in found.values()} == {chosen}
        exposed = [option["exposed"] for option in next(iter(found.values()))]
        assert exposed == sorted(exposed) and len(exposed) == 3
    assert not (tmp_path / "resumed" / FILE).exists()
    whole, resumed = (load_file(tmp_path / name / "final/model.safetensors") for name in ("costly", "resumed"))
    assert all(torch.equal(resumed[name], values) for name, values in whole.items())


def test_rows_are_counted_by_link_for_the_busiest_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    positions = torch.rand(4, 9, 8, generator=generator).argsort(dim=-1)[..., :3]
    levels = arrangements(4, 2)
    everyone = torch.stack([told(own, 8, levels) for own in positions])
    found = rows_by_link(everyone, levels, node_size=2)
    pairs = [[0] * 4 for _ in range(4)]
    for sender, tokens in enumerate(positions.tolist()):
        for expert in (expert for token in tokens for expert in token):
            pairs[sender][expert // 2] += 1
    out = [sum(pairs[a][b] for b in range(4) if b // 2 != a // 2) for a in range(4)]
    into = [sum(pairs[a][b] for a in range(4) if b // 2 != a // 2) for b in range(4)]
    near = max(max(pairs[a][a ^ 1], pairs[a ^ 1][a]) for a in range(4))
    assert found["off"] == (near, max(out + into))
    far_rows, near_rows = rows_sent(positions, 8, levels["node"])
    assert far_rows / 4 <= found["node"][1] <= far_rows and near_rows / 4 <= found["node"][0] <= near_rows


def test_cover_decides_as_much_as_the_wire() -> None:
    links = Links(2, Link(latency_us=1, gb_per_s=300).line, Link(latency_us=1, gb_per_s=12).line, 0.0, 4e12, 1.0)
    rows = Rows(tokens=4096, top_k=6, experts=64, ranks=4, width=2048)
    sent: dict[Dedup, Sent] = {"off": Sent(3e7, 6e7), "rank": Sent(2e7, 4e7), "node": Sent(2e7, 1e7)}
    exposed = options(sent, rows, links, covers=(0.0,) * 4)
    assert [option.dedup for option in exposed] == ["node", "rank", "off"]
    hidden = options(sent, rows, links, covers=(1.0,) * 4)
    assert hidden[0].dedup == "off" and hidden[0].exposed == 0 < hidden[1].exposed
    assert "1 of 2 layers use node, which exposes" in summary({1: exposed, 2: hidden})[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"parallel__dedup": "auto"}, "needs parallel.machine"),
        ({"parallel__machine": "machine.json"}, "set both or neither"),
        ({"parallel__dedup": "auto", "parallel__machine": "m", "parallel__node_size": 2}, "takes the size of a node"),
        ({"parallel__dedup": "auto", "parallel__machine": "m", "parallel__placement": {"every": 2}}, "one objective"),
    ],
)
def test_recipes_without_what_the_choice_needs_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        runs.resolved(tmp_path, parallel__ep_size=4, **changes)


def test_a_run_resumes_with_other_links_but_not_with_nodes_of_another_size(tmp_path: Path) -> None:
    path, facts = tmp_path / "machine.json", []
    recipe = runs.resolved(tmp_path, **COMMON, parallel__dedup="auto", parallel__machine=str(path)).recipe
    for machine in (SLOW, COSTLY, SLOW | {"gpus_per_node": 4}):
        path.write_text(json.dumps(machine))
        facts.append(run_identity(recipe, [], World(0, 4, torch.device("cpu"))))
    assert facts[0] == facts[1]
    assert differences(facts[1], facts[2]) == ["gpus_per_node of parallel.machine was 2 and is now 4"]


def test_a_machine_file_of_other_hardware_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(LINKS))
    with pytest.raises(ConfigError, match="describes one node of 2 GPUs"):
        check_machine(path, ep_size=4)
    check_machine(path, ep_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="describes nodes of 2 GPUs, and this run has 1 processes in a node"):
        check_machine(path, ep_size=2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # the host imitates two nodes
    path.write_text(json.dumps(SLOW))
    check_machine(path, ep_size=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    with pytest.raises(ConfigError, match=f"describes {read_machine(path).gpu}, and this machine has NVIDIA A100"):
        check_machine(path, ep_size=2)
