"""Experts that move between ranks during a run change neither losses, weights, moments nor files."""

import json
import shutil
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import runs
import torch
from safetensors.torch import load_file, save_file

from fcsd.config import Parallel, ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.run.report import read_metrics
from fcsd.errors import ConfigError
from fcsd.experimental.placement.search import Level
from fcsd.experimental.placement.swaps import FILE, expert_shares, levels_of, objective_of
from fcsd.kernels.bit_split import Format
from fcsd.parallel.expert.autoep import expert_blocks

SWAPS = {"parallel__placement": {"every": 2}}
EXPERTS = 8
# Four ranks. In groups of two that divide the experts, two ranks have the same experts. Without ZeRO both have all
# states of them. With it they divide the states, at a border inside of an expert.
COMMON = {"parallel__ep_size": 2, "train__batch_tokens": 512, "train__steps": 3, "optim__grad_clip": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "bf16 stage 2": {"parallel__zero_stage": 2, "train__dtype": "bf16"},
    "by node": {"parallel__ep_size": 4, "parallel__dedup": "node", "parallel__node_size": 2},
}
OTHERS: dict[str, dict[str, Any]] = {
    "fp32": {"parallel__zero_stage": 0},
    "bf16": {"parallel__zero_stage": 0, "train__dtype": "bf16"},
    "recomputed": {"parallel__zero_stage": 2, "train__activation_checkpointing": True, "train__micro_batch_size": 1},
}


def write_lopsided(folder: Path) -> None:
    """Make the student's tokens go to the first four of eight experts, which begin on the first ranks."""
    weights = load_file(folder / "student" / "model.safetensors")
    for name, gate in weights.items():
        if name.endswith("mlp.gate.weight"):
            gate[:4] = gate[0].clone() * torch.tensor([1.0, -1.0, 0.5, -0.5]).unsqueeze(1)
            gate[4:] = 0
    save_file(weights, folder / "student" / "model.safetensors", metadata={"format": "pt"})


def states(run: Any) -> dict[str, torch.Tensor]:
    """Weights, fp32 weights and moments of all experts, ``[experts, elements]`` in the order of their numbers."""
    found: dict[str, torch.Tensor] = {}
    for path, block in expert_blocks(run.student).items():
        shares = expert_shares(run.training.engine, block)
        everyone = run.world.everywhere(lambda: {name: (s.start, s.values.clone()) for name, s in shares.items()})  # noqa: B023
        numbers, ep_size = torch.tensor(block.placement.numbers), block.placement.ranks
        for name in {name for of in everyone for name in of}:
            size = block.experts.get_parameter(name.split()[0])[0].numel()
            by_position = torch.full((EXPERTS * size,), torch.nan)
            for rank, of in enumerate(everyone):
                if name in of:
                    start, values = of[name]
                    start += rank % ep_size * block.placement.slots * size
                    by_position[start : start + len(values)] = values
            rows = by_position.view(EXPERTS, size)
            found[f"{path} {name}"] = torch.empty_like(rows).index_copy_(0, numbers, rows)
    return found


def distill(recipes: list[ResolvedRecipe]) -> None:
    """Runs recipes one after the other, and leaves the states of their experts beside the runs.

    A run named ``resumed`` begins as the run before it was after its second step.
    """
    take_steps = loop.take_steps

    def watched(run: Any, tools: Any, steps: range) -> None:
        take_steps(run, tools, steps)
        every = states(run)
        run.world.on_first(lambda: save_file(every, run.directory.with_suffix(".states")))

    loop.take_steps = watched
    before = None
    for recipe in recipes:
        run = Path(recipe.recipe.output_dir)
        if run.name == "resumed" and before is not None and torch.distributed.get_rank() == 0:
            shutil.copytree(before / "checkpoints" / "step-2", run / "checkpoints" / "step-2")
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        loop.distill_model(recipe)
        before = run


@pytest.mark.nightly
@pytest.mark.parametrize("cases", [CASES, OTHERS], ids=["", "others"])
def test_swaps_change_no_result(tmp_path: Path, cases: dict[str, dict[str, Any]]) -> None:
    runs.write_models(tmp_path)
    write_lopsided(tmp_path)
    recipes = {}
    for name, case in cases.items():
        recipes[f"{name} fixed"] = {**COMMON, **case}
        recipes[f"{name} swaps"] = {**COMMON, **case, **SWAPS}
    recipes["resumed"] = list(recipes.values())[-1]
    resolved = [runs.resolved(tmp_path, **recipe, output_dir=str(tmp_path / out)) for out, recipe in recipes.items()]
    ranks.results(4, distill, resolved)
    for name in cases:
        fixed, swapped = tmp_path / f"{name} fixed", tmp_path / f"{name} swaps"
        assert_equal_runs(fixed, swapped)
        assert not (fixed / FILE).exists() and "swaps" not in read_metrics(fixed)[0]
        before, *after = [line["swaps"] for line in read_metrics(swapped)]
        assert before == 0 and after[0] == after[1] > 0, name
        before, *seconds = [line["swap_seconds"] for line in read_metrics(swapped)]
        assert before == 0 and seconds[0] == seconds[1] > 0, name
        placed = json.loads((swapped / FILE).read_text())
        assert placed["swaps"] == after[1]
        layers = [list(chain(*by_rank)) for by_rank in placed["experts of each rank"].values()]
        assert all(sorted(numbers) == list(range(EXPERTS)) for numbers in layers)
        assert any(numbers != list(range(EXPERTS)) for numbers in layers), name
    whole, resumed = (tmp_path / name for name in list(recipes)[-2:])
    assert_equal_runs(whole, resumed, first=2)
    assert (resumed / FILE).read_text() == (whole / FILE).read_text()


def assert_equal_runs(one: Path, other: Path, first: int = 0) -> None:
    """The runs have the same losses, states of experts and files; ``other`` began after step ``first``."""
    lines, others = read_metrics(one)[first:], read_metrics(other)
    for key in ("loss", "kl", "sft"):
        assert [line[key] for line in others] == [line[key] for line in lines], (other.name, key)
    # The norm is a sum over ranks, which has other parts if experts are elsewhere.
    norms = [line["grad_norm"] for line in lines]
    assert [line["grad_norm"] for line in others] == pytest.approx(norms, rel=1e-6)
    expected, found = (load_file(run.with_suffix(".states")) for run in (one, other))
    assert expected.keys() == found.keys() and len(expected) > 0
    for name, values in expected.items():
        assert not values.isnan().any() and torch.equal(found[name], values), (other.name, name)
    assert (other / "final/model.safetensors").read_bytes() == (one / "final/model.safetensors").read_bytes()


def test_recipes_that_cannot_swap_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs parallel\.ep_size above 1"):
        runs.resolved(tmp_path, **SWAPS)
    with pytest.raises(ConfigError, match=r"cannot be combined with optim\.offload host"):
        runs.resolved(tmp_path, **SWAPS, parallel__ep_size=2, optim__offload="host")


def test_what_a_search_counts() -> None:
    def levels(deduplicated: bool, placement: dict[str, float], **fields: Any) -> tuple[Level, ...]:
        return levels_of(Parallel.model_validate({"ep_size": 8, "placement": placement, **fields}), deduplicated)

    nodes = {"dedup": "node", "node_size": 4}
    assert levels(True, {"far_cost": 6, "work_cost": 0}, **nodes) == (Level(2, 1.5), Level(8, 1.0))
    assert levels(True, {"work_cost": 0.5}, **nodes)[2:] == (Level(8, 0.5, deduplicated=False),)
    pairs = Level(8, 1.0, deduplicated=False)
    assert levels(False, {}, **nodes) == (pairs, pairs), "without deduplication a row is a pair, and by default as long"


def test_what_a_move_costs_is_counted_in_rows_of_all_passes(tmp_path: Path) -> None:
    """A row travels four times in a step, and dispatch and combine again if layers are recomputed."""
    weights = torch.nn.ParameterDict({"up": torch.zeros(4, 10, 8), "down": torch.zeros(4, 8, 10)})
    block: Any = SimpleNamespace(experts=weights, top_k=2, placement=SimpleNamespace(slots=4))

    def cost(**changes: Any) -> float:
        recipe = runs.resolved(tmp_path, **SWAPS, parallel__ep_size=2, train__steps=4, **changes).recipe
        return objective_of(recipe, 2, block, width=64).move

    stored = 160 * 4 + 160 * (4 + 8)  # an expert's weights, and their fp32 master and moments with ZeRO
    row = 64 * 4
    assert cost() == pytest.approx(stored / (4 * row * 2))
    assert cost(train__activation_checkpointing=True) == pytest.approx(stored / (6 * row * 2))
    rounded = {"parallel__quantised": {"dispatch": "int8:g64", "combine": "int8:g64"}}
    int8 = Format.parse("int8:g64").row_bytes(64)
    assert cost(**rounded) == pytest.approx(stored / ((2 * int8 + 2 * row) * 2))
    assert cost(**rounded, train__activation_checkpointing=True) == pytest.approx(stored / ((4 * int8 + 2 * row) * 2))
