"""bf16 moments follow those in fp32, and an optimizer on the host takes the same steps as one beside the weights."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import runs
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fcsd.config import ResolvedRecipe
from fcsd.distill import loop
from fcsd.distill.optim import adamw_chunked as chunked
from fcsd.distill.optim.adamw_chunked import ChunkedAdamW, round_into
from fcsd.distill.optim.update import update
from fcsd.distill.run.identity import run_identity
from fcsd.distill.run.manifest import read_manifest
from fcsd.distill.run.report import opening
from fcsd.errors import ConfigError
from fcsd.launch.world import World

HOST, BF16 = {"optim__offload": "host"}, {"optim__moments": "bf16"}
MOMENTS = {"optim__offload": "moments"}
SAVED = {"checkpoint__every_steps": 1, "checkpoint__overlap": True}


def test_rounding_takes_a_neighbour_by_its_nearness_and_keeps_what_bf16_has() -> None:
    noise = torch.arange(2**16, dtype=torch.int32)  # each number once, so that the shares are exact
    low, gap = 1.0, 2.0**-7
    for value in (low + gap / 4, -(low + gap * 3 / 4), low + gap * 2.0**-16, 0.0, -low, 3e-39, float("inf")):
        rounded = torch.empty(2**16, dtype=torch.bfloat16)
        values = torch.full((2**16,), value)
        round_into(rounded, values.clone(), noise)
        found = set(rounded.float().unique().tolist())
        if bool((values.bfloat16().float() == values).all()):
            assert found == {value}
        else:
            assert len(found) == 2 and rounded.double().mean().item() == pytest.approx(value, rel=1e-9)


def test_the_two_moments_are_rounded_by_independent_numbers() -> None:
    """Every number from 0 to 65535 is as likely as another, and one moment's says nothing of the other's."""
    first, second = (noise.double() for noise in chunked._noise(3, 100_000, torch.device("cpu")))
    for noise in (first, second):
        assert noise.min() >= 0 and noise.max() <= 65535
        assert float(noise.mean()) == pytest.approx(32767.5, rel=0.01)
        assert float(noise.std()) == pytest.approx(65536 / 12**0.5, rel=0.01)
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.02


def trained(make: Any, steps: int, beta2: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the second moments of a small network after training on noisy batches, both flat and in fp32."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
    target = torch.nn.Linear(16, 8).requires_grad_(False)
    optimizer = make(model.parameters(), lr=2e-3, betas=(0.9, beta2), eps=1e-8, weight_decay=0.1)
    for _ in range(steps):
        batch = torch.randn(32, 16)
        optimizer.zero_grad()
        F.mse_loss(model(batch), target(batch).sin()).backward()
        optimizer.step()
    parameters = list(model.parameters())
    moments = torch.cat([optimizer.state[parameter]["exp_avg_sq"].float().flatten() for parameter in parameters])
    return torch.cat([parameter.detach().flatten() for parameter in parameters]), moments


@pytest.mark.parametrize(("beta2", "near"), [(0.95, 0.005), (0.999, 0.01)])
def test_bf16_moments_follow_fp32_where_rounding_to_nearest_does_not(
    monkeypatch: pytest.MonkeyPatch, beta2: float, near: float
) -> None:
    steps = 400
    (expected, moments), (start, _) = (trained(torch.optim.AdamW, count, beta2) for count in (steps, 1))
    travelled = (expected - start).norm()

    def compare() -> tuple[float, float]:
        weights, found = trained(ChunkedAdamW, steps, beta2)
        return ((weights - expected).norm() / travelled).item(), (found.sum() / moments.sum()).log().abs().item()

    apart, ratio = compare()
    assert apart < 0.02 and ratio < near, "the way of the weights, and the mean of the second moments"
    monkeypatch.setattr(chunked, "round_into", lambda target, values, _: target.copy_(values))
    nearest, stalled = compare()
    if beta2 == 0.999:
        assert nearest > apart and stalled > 0.1, "the second moments of nearest rounding cannot fall"


def test_chunks_skipped_steps_and_saved_states_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(optimizer: ChunkedAdamW, weights: torch.nn.Parameter, numbers: range) -> None:
        for number in numbers:
            weights.grad = torch.sin(torch.arange(1.0, 33.0) * (number + 1)).view(4, 8)
            optimizer.step()

    def made() -> tuple[torch.nn.Parameter, ChunkedAdamW]:
        weights = torch.nn.Parameter(torch.ones(4, 8))
        return weights, ChunkedAdamW([weights], lr=0.1, betas=(0.9, 0.999))

    whole, optimizer = made()
    steps(optimizer, whole, range(3))
    saved = {name: value.clone() for name, value in optimizer.state[whole].items()}
    assert {name: value.dtype for name, value in saved.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    state = optimizer.state_dict()
    again, resumed = made()
    again.data.copy_(whole)
    resumed.load_state_dict(state)
    for one, weights in ((optimizer, whole), (resumed, again)):
        steps(one, weights, range(3, 6))
    assert torch.equal(again, whole) and resumed.param_groups[0]["draws"] == 6
    assert all(torch.equal(resumed.state[again][name], value) for name, value in optimizer.state[whole].items())

    before = {"weights": whole.detach().clone(), **{k: v.clone() for k, v in optimizer.state[whole].items()}}
    optimizer.found_inf = torch.ones(())
    steps(optimizer, whole, range(6, 8))
    assert all(torch.equal(v, before[k]) for k, v in {"weights": whole, **optimizer.state[whole]}.items())

    # Without noise, the number of elements that are updated at a time changes nothing but the compiler's rounding.
    silent = (torch.zeros(32, dtype=torch.int32),) * 2
    monkeypatch.setattr(chunked, "_noise", lambda *_: silent)
    results = []
    for chunk in (32, 5):
        monkeypatch.setattr(chunked, "CHUNK", chunk)
        weights, optimizer = made()
        steps(optimizer, weights, range(3))
        results.append((weights.detach(), optimizer.state[weights]))
    assert results[0][1]["step"] == results[1][1]["step"] == 3
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=0)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(results[0][1][name], results[1][1][name], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moments_that_travel_give_the_bits_of_moments_that_stay(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """Chunks of many sizes, several of which are on their way at the same time on a GPU."""
    chunk = 320 if device == "cpu" else 2**20
    monkeypatch.setattr(chunked, "CHUNK", chunk)

    def steps(make: Any) -> tuple[list[torch.Tensor], dict[str, Any]]:
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(n, device=device)) for n in (9 * chunk + 37, 40, chunk)]
        optimizer = make(parameters, lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        for number in range(6):
            for parameter in parameters:
                parameter.grad = torch.sin(parameter.detach() * number + 1)
            optimizer.step()
        return [parameter.detach() for parameter in parameters], optimizer.state_dict()["state"]

    def travelling(*arguments: Any, **options: Any) -> ChunkedAdamW:
        return ChunkedAdamW(*arguments, **options, on_host=True)

    pairs = [
        (partial(torch.optim.AdamW, fused=True), partial(travelling, dtype=torch.float32)),
        (ChunkedAdamW, travelling),
    ]
    for staying, away in pairs:
        (expected, moments_there), (found, moments_here) = steps(staying), steps(away)
        assert all(map(torch.equal, expected, found))
        for number, state in moments_here.items():
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name].device.type == "cpu" and state[name].is_pinned() == (device == "cuda")
                assert torch.equal(state[name], moments_there[number][name].cpu())


def distill(recipes: list[ResolvedRecipe]) -> list[set[str]]:
    """Runs recipes one after the other. Those with checkpoints are cut back to the first one and resumed.

    The first run writes its checkpoints beside its steps, but for the last one. The resumed run waits for each.

    Returns: the dtypes of the moments in each checkpoint.
    """
    found = []
    for resolved in recipes:
        out = Path(resolved.recipe.output_dir)
        loop.distill_model(resolved)
        if resolved.recipe.checkpoint.every_steps:
            if dist.get_rank() == 0:
                shutil.copytree(out, out.with_suffix(".whole"))
                shutil.rmtree(out / "final")
                for step in (2, 3):
                    shutil.rmtree(out / "checkpoints" / f"step-{step}")
            dist.barrier()
            waits = resolved.recipe.checkpoint.model_copy(update={"overlap": False})
            loop.distill_model(replace(resolved, recipe=resolved.recipe.model_copy(update={"checkpoint": waits})))
            files = (out / "checkpoints" / "step-2" / "optimizer").iterdir()
            found.append({str(dtype) for file in files for dtype in moments(torch.load(file, weights_only=False))})
    return found


def stored(checkpoint: Path) -> dict[str, Any]:
    """By file, what a checkpoint holds: the hash of the file, or the bits of the values in an optimizer's pickle.

    Pickles of equal values may differ in the order in which they name them.
    """
    files = dict(read_manifest(checkpoint)["files"])
    pickles = [name for name in files if name.startswith("optimizer/")]
    assert pickles
    return files | {name: bits(torch.load(checkpoint / name, weights_only=False)) for name in pickles}


def bits(value: Any) -> Any:
    """The value, with a comparable one in place of each tensor and of each object of DeepSpeed."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.shape, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [bits(each) for each in value]
    return value if isinstance(value, int | float | str | None) else (type(value).__name__, repr(vars(value)))


def moments(value: Any) -> set[torch.dtype]:
    """The dtypes of all second moments in a checkpoint."""
    if not isinstance(value, dict | list | tuple):
        return set()
    own = {value["exp_avg_sq"].dtype} if isinstance(value, dict) and "exp_avg_sq" in value else set()
    return own.union(*(moments(item) for item in (value.values() if isinstance(value, dict) else value)))


ARCH = "qwen3_moe"
TWO = {"train__dtype": "bf16", "parallel__zero_stage": 2}
SUMMED = {**TWO, "optim__accumulate_dtype": "fp32", "train__micro_batch_size": 1}
EVERY_DAY: dict[str, dict[str, Any]] = {
    "bf16": TWO,
    "bf16 on the host": {**TWO, **HOST},
    "bf16 moments on the host": {**TWO, **BF16, **HOST, **SAVED},
    "bf16 moments without ZeRO": {"train__dtype": "bf16", "parallel__zero_stage": 0, **BF16},
    "bf16 with its moments on the host": {**TWO, **MOMENTS, **SAVED},
}
AT_NIGHT: dict[str, dict[str, Any]] = {
    "fp32": {"parallel__zero_stage": 1},
    "fp32 on the host": {"parallel__zero_stage": 1, **HOST, **SAVED},
    "summed in fp32": SUMMED,
    "summed in fp32 on the host": {**SUMMED, **HOST},
    "bf16 moments": {**TWO, **BF16, **SAVED},
    "bf16 moments on the host": {**TWO, **BF16, **HOST},
    "bf16 moments with its moments on the host": {**TWO, **BF16, **MOMENTS, **SAVED},
    "bf16 moments without ZeRO": {"train__dtype": "bf16", "parallel__zero_stage": 0, **BF16, **SAVED},
    "without ZeRO": {"train__dtype": "bf16", "parallel__zero_stage": 0},
    "without ZeRO with its moments on the host": {"train__dtype": "bf16", "parallel__zero_stage": 0, **MOMENTS},
    "fp32 with its moments on the host": {"parallel__zero_stage": 1, **MOMENTS, **SAVED},
}


@pytest.mark.parametrize("cases", [EVERY_DAY, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)])
def test_runs_on_the_host_equal_runs_beside_the_weights_and_resume(
    folder: Path, tmp_path: Path, cases: dict[str, dict[str, Any]]
) -> None:
    """Two processes that divide the experts; all runs in one pair of processes, which is cheaper."""
    common = {"parallel__ep_size": 2, "optim__grad_clip": 0.3, "train__steps": 3, "checkpoint__every_steps": 0}
    common |= {"checkpoint__keep": 9, "optim__schedule": "constant", "optim__warmup_steps": 0, "data__held_out": None}
    recipes = [
        runs.resolved(folder, output_dir=str(tmp_path / name), **{**common, **changes})
        for name, changes in cases.items()
    ]
    saved = [name for name, changes in cases.items() if changes.keys() >= SAVED.keys()]
    results = ranks.on_ranks(2, distill, recipes)
    kinds = [{"torch.bfloat16" if cases[name].keys() >= BF16.keys() else "torch.float32"} for name in saved]
    assert results == [kinds] * 2, results
    found = {name: runs.outcome(tmp_path / name) for name in cases}
    for name in saved:
        assert runs.outcome(tmp_path / f"{name}.whole") == found[name], "resumed to the last bit"
        # A checkpoint that was written beside the steps, and one that they waited for.
        beside, blocking = (stored(tmp_path / run / "checkpoints" / "step-2") for run in (f"{name}.whole", name))
        assert beside == blocking
    ends = (" on the host", " with its moments on the host")
    pairs = [(name, f"{name}{end}") for name in cases for end in ends if f"{name}{end}" in cases]
    assert pairs and all(found[here] == found[there] for here, there in pairs)
    if cases is EVERY_DAY:
        for name in (name for name in cases if cases[name].keys() >= BF16.keys()):
            losses = [[float.fromhex(loss) for loss, *_ in found[case][0]] for case in (name, "bf16")]
            assert losses[0] == pytest.approx(losses[1], rel=0.03) and found[name][1] != found["bf16"][1]


def test_a_norm_that_the_host_has_computed_is_a_number(folder: Path) -> None:
    """On a GPU it could not be read back together with the loss, which is on the device."""
    engine = SimpleNamespace(optimizer=None, step=lambda: None, get_global_grad_norm=lambda: torch.tensor(2.0))
    world = World(0, 1, torch.device("cpu"))
    found = [update(engine, runs.resolved(folder, **changes).recipe, world) for changes in ({}, HOST)]
    assert isinstance(found[0], torch.Tensor) and found[1] == 2.0 and isinstance(found[1], float)


def test_what_cannot_work_is_refused_and_what_runs_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.offload host needs parallel\.zero_stage 1 or 2"):
        runs.resolved(folder, parallel__zero_stage=0, **HOST)
    plain, away = runs.resolved(folder).recipe, runs.resolved(folder, **HOST, **BF16).recipe
    assert "AdamW" not in opening(plain, tmp_path, 0)
    moments = runs.resolved(folder, **MOMENTS, parallel__zero_stage=0).recipe
    assert opening(moments, tmp_path, 0).endswith("AdamW. Its fp32 moments are in host memory. Nothing is compiled.")
    line = opening(away, tmp_path, 0).splitlines()[-1]
    assert line.startswith("The optimizer is torch's fused AdamW with bf16 moments on the host, with ")
    assert line.endswith("Nothing is compiled.")
    # Runs from before the fields existed had the defaults; another value is another run.
    world = World(0, 1, torch.device("cpu"))
    one, other = (run_identity(recipe, [], world) for recipe in (plain, away))
    assert {key: value for key, value in other.items() if key not in one} == {
        "optim.moments": "bf16",
        "optim.offload": "host",
    }
