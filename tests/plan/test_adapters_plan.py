"""The plan of a run with adapters: one copy of the weights, the states of what trains, and what it is offered for."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import runs
import tiny
import torch

from fcsd.config import Adapter
from fcsd.models.adapters.lora import add_adapters
from fcsd.models.adapters.nf4 import BYTES
from fcsd.models.adapters.targets import choose
from fcsd.models.wiring import Wiring
from fcsd.plan import Hardware, Setup, plan_run, plan_setup
from fcsd.plan.activations import AdaptedLinear, measure_layer
from fcsd.plan.memory import decoded_bytes, disk_bytes, host_bytes, moments, saved_bytes, shard, teacher_bytes
from fcsd.plan.model import MetaModel
from fcsd.plan.report import to_text
from fcsd.plan.setup import GIB, Parts, with_parts
from fcsd.plan.speed import DECODE, flops_per_token, forward_flops, layer_passes, micro_batch_seconds

DEFAULT = ("attention", "mlp", "shared_experts")
SMALL = Setup(world=2, micro_batch_size=2, seq_len=64, batch_tokens=512, tokens=5120, teacher="replicated")


@pytest.fixture
def model(tmp_path: Path) -> MetaModel:
    tiny.config("deepseek_v2").save_pretrained(tmp_path)
    return MetaModel(str(tmp_path))


def test_what_trains_is_counted_as_it_is_made(model: MetaModel) -> None:
    found = model.parts(Adapter(rank=4), ("norms",))
    real = tiny.model("deepseek_v2")
    chosen = choose(real, DEFAULT, ["norms"])
    layers = add_adapters(real, {path: path for path in chosen.adapted}, 4, 4.0, seed=0)
    own = sum(real.get_parameter(name).numel() for name in chosen.trained)
    made = sum(p.numel() for layer in layers.values() for name, p in layer.named_parameters() if "lora_" in name)
    assert (found.in_adapters, found.own) == (made, own)


def test_no_second_copy_and_states_of_what_trains_alone(model: MetaModel) -> None:
    parts = model.parts(Adapter(rank=4), ("norms",))
    setup, numbers = with_parts(SMALL, parts), model.numbers
    own = shard(numbers, setup)
    assert own.trained == parts.trained and own.trained + own.frozen == numbers.total + parts.in_adapters
    assert sum(own.partition) == -(-parts.trained // 2)
    assert teacher_bytes(numbers, setup) == 2 * parts.own
    assert teacher_bytes(numbers, SMALL) == 2 * numbers.total
    assert saved_bytes(numbers, setup) == 14 * parts.trained
    assert disk_bytes(numbers, setup) == 3 * 14 * parts.trained + 2 * numbers.total
    full, light = (moments(numbers, numbers, model.layer_bytes(one), one) for one in (SMALL, setup))
    assert max(moment.weights for moment in light) == 2 * (numbers.total + parts.in_adapters)
    assert max(moment.optimizer for moment in light) == 12 * sum(own.partition)
    assert max(moment.total for moment in light) < max(moment.total for moment in full)


def test_no_gradients_of_frozen_weights_are_computed(model: MetaModel) -> None:
    alone = replace(SMALL, teacher="none")
    full = flops_per_token(model.numbers, model.numbers, alone)
    light = flops_per_token(model.numbers, model.numbers, with_parts(alone, model.parts(Adapter(rank=1), ())))
    assert 2 / 3 * full < light < 0.8 * full


def test_the_stand_in_keeps_what_the_layer_of_peft_keeps() -> None:
    with torch.device("meta"):
        hidden = torch.empty(1, 32, 64, dtype=torch.bfloat16)
        base = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        holder = torch.nn.Sequential(base)
    ours = AdaptedLinear(base, 4)
    theirs = add_adapters(holder, {"0": "0"}, 4, 8.0, seed=0)["0"]
    found = [measure_layer(partial(layer), list(layer.parameters()), hidden).kept for layer in (ours, theirs)]
    assert found[0] == found[1] > 0


def test_adapters_are_offered_first_where_full_training_does_not_fit(model: MetaModel) -> None:
    offer = model.parts(Adapter(rank=4), ())
    needed = {
        name: plan_setup("a", model, model.numbers, setup, Hardware(2, 1, 100)).memory.total
        for name, setup in (("full", SMALL), ("light", with_parts(SMALL, offer)))
    }
    between = Hardware(2, 1, sum(needed.values()) / 2 / GIB / 0.99)
    found = plan_setup("a", model, model.numbers, SMALL, between, offer=lambda: offer)
    assert not found.memory.fits and found.adapted is not None
    assert found.adapted.written[-1] == "--set train.adapter.rank=4"
    assert found.advice().startswith("it fits with adapters") and "to train all weights, " in found.advice()
    without = plan_setup("a", model, model.numbers, SMALL, between)
    assert without.adapted is None and without.change == found.change
    assert plan_setup("a", model, model.numbers, SMALL, Hardware(2, 1, 100), offer=lambda: offer).adapted is None


def test_the_plan_of_a_recipe_says_what_trains(tmp_path: Path) -> None:
    runs.write_models(tmp_path)
    lora: dict[str, Any] = {"train__adapter": {"rank": 4}, "optim__train": ["norms"]}
    planned = plan_run(runs.resolved(tmp_path, **lora).recipe, Hardware(1))
    assert isinstance(planned.setup.parts, Parts) and planned.setup.parts.rank == 4
    text = to_text(planned)
    assert "in adapters of rank 4, and" in text and "the teacher is the student with its adapters off" in text
    assert "computed once" not in text
    half = {"model": str(tmp_path / "teacher"), "init": {"wiring": "farskip", "layers": "50%"}}
    lora = {"train__adapter": {"rank": 4, "layers": "converted"}, **half}
    assert "and the first 2 layers are computed once for both" in to_text(
        plan_run(runs.resolved(tmp_path, **lora).recipe, Hardware(1))
    )
    assert "not counted  train.adapter" in text
    planned = plan_run(runs.resolved(tmp_path, optim__train=["converted"], **half).recipe, Hardware(1))
    text = to_text(planned)
    assert "of the model itself (converted); the teacher is the student with its first weights, and the first 2" in text
    assert "adapters" not in text


def test_the_converted_layers_alone_are_counted_with_the_experts_that_a_token_takes(model: MetaModel) -> None:
    wiring = Wiring("farskip", (2, 3))
    parts, numbers = model.parts(None, ["converted"], wiring), model.numbers
    layers = numbers.layers[2:]
    assert (parts.rank, parts.in_adapters, parts.frozen, parts.shared) == (0, 0, 2, 2)
    assert parts.own == sum(layer.dense + layer.routed for layer in layers) and parts.routed > 0
    assert parts.routed == sum(layer.routed for layer in layers)
    setup = with_parts(replace(SMALL, world=1), parts)
    assert teacher_bytes(numbers, setup) == 2 * parts.own and shard(numbers, setup).trained == parts.own
    # Two of four alike layers: their gradients, 5 passes in place of 8; the head has no gradient of its own.
    passes = layer_passes(numbers, numbers, setup), layer_passes(numbers, numbers, replace(SMALL, world=1))
    assert [sum(one) for one in passes] == [10, 16]
    active = sum(layer.dense + layer.routed * numbers.top_k // numbers.experts for layer in layers)
    alone = replace(setup, teacher="none")
    student = flops_per_token(numbers, numbers, alone)
    whole = sum(forward_flops(numbers, setup.seq_len)) + 2 * (numbers.head + numbers.hidden)  # of head and last norm
    half = 2 * (2 * active + numbers.attention * setup.seq_len * 2)
    assert student == pytest.approx(whole + half, rel=1e-6)
    # Two GPUs that divide the experts have half of those that train, and of the teacher's copies of them.
    two = replace(setup, world=2, ep_size=2)
    assert setup.possible(numbers.experts) and two.possible(numbers.experts)
    half_of_experts = parts.own - parts.routed // 2
    assert shard(numbers, two).trained == half_of_experts and teacher_bytes(numbers, two) == 2 * half_of_experts
    assert sum(shard(numbers, two).partition) == (parts.own - parts.routed) // 2 + parts.routed // 2
    assert sum(shard(numbers, two).groups) == sum(shard(numbers, two).partition)


def test_first_layers_that_are_shared_cost_one_pass_and_no_memory(model: MetaModel) -> None:
    wiring = Wiring("farskip", (2, 3))
    late, all_of_it = (model.parts(Adapter(rank=4, layers=layers), (), wiring) for layers in ("converted", "all"))
    assert (late.frozen, late.shared) == (2, 2) and (all_of_it.frozen, all_of_it.shared) == (0, 0)
    assert late.trained < all_of_it.trained
    setups = [with_parts(replace(SMALL, world=1), one) for one in (late, all_of_it)]
    few, many = (moments(model.numbers, model.numbers, model.layer_bytes(one), one) for one in setups)
    backward = [moment.name for moment in few if moment.name.startswith("backward pass")]
    assert backward == ["backward pass of layer 3", "backward pass of layer 2"]
    kept = {moment.name: moment.activations for moment in few}["loss"]
    assert kept < 0.75 * {moment.name: moment.activations for moment in many}["loss"]
    numbers, (first, whole) = model.numbers, setups
    assert layer_passes(numbers, numbers, first)[0] == 3 * 2 and layer_passes(numbers, numbers, whole)[0] == 3 * 4
    alone = replace(first, teacher="none")
    before = flops_per_token(numbers, numbers, alone) - (
        flops_per_token(numbers, numbers, first) - sum(forward_flops(numbers, first.seq_len))
    )
    active = sum(layer.dense + layer.routed * numbers.top_k // numbers.experts for layer in numbers.layers[:2])
    assert before == pytest.approx(2 * active + numbers.attention * first.seq_len * 2)
    assert layer_passes(numbers, numbers, replace(first, ep_size=2))[0] == 4 + 2 + 2


def test_weights_in_nf4_are_counted_as_they_are_held(tmp_path: Path) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    model = MetaModel(str(tmp_path))
    plain, rounded = (with_parts(SMALL, model.parts(Adapter(rank=4, base=base), ("norms",))) for base in (None, "nf4"))
    assert plain.parts is not None and rounded.parts is not None and rounded.parts.rounded is not None
    linear = [module for module in tiny.model("llama").model.layers.modules() if isinstance(module, torch.nn.Linear)]
    values = sum(layer.weight.numel() for layer in linear)
    assert rounded.parts.rounded.values == values
    full, light = (moments(model.numbers, model.numbers, model.layer_bytes(one), one) for one in (plain, rounded))
    saved = int((2 - BYTES) * values)
    for one, other in zip(full, light, strict=True):
        assert one.weights - other.weights == saved
        more = decoded_bytes(rounded) if "pass" in one.name else 0
        assert other.activations - one.activations == more
        assert (one.gradients, one.optimizer, one.teacher) == (other.gradients, other.optimizer, other.teacher)
    assert decoded_bytes(rounded) >= 2 * max(layer.weight.numel() for layer in linear) > decoded_bytes(plain) == 0
    host = [host_bytes(model.numbers, one) for one in (plain, rounded)]
    assert host[0] - host[1] == saved  # the merged weights are made one after the other
    times = [micro_batch_seconds(model.numbers, model.numbers, one)[0] for one in (plain, rounded)]
    # Forward, backward and the teacher's pass decode every weight once; layers that are computed once do so once less.
    assert times[0] < times[1] <= times[0] + 3 * 2.5 * values / DECODE


def test_a_plan_says_that_weights_in_nf4_are_on_every_gpu(tmp_path: Path) -> None:
    tiny.config("llama").save_pretrained(tmp_path)
    recipe = runs.resolved(tmp_path, model=str(tmp_path), train__adapter={"base": "nf4"}, train__dtype="bf16").recipe
    found = plan_run(recipe, Hardware(gpus=2, memory=0.5))
    assert not found.memory.fits and found.change is None
    assert "every GPU holds all weights" in found.advice()
    assert "on every GPU" in to_text(plan_run(recipe, Hardware(gpus=2, memory=24)))
