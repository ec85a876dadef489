"""TRL, Liger and fcsd train the same thing: the same divergence, and the same weights after the same steps."""

import copy
import json
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from benchmarks.distill.baselines import compare, layers, loop
from benchmarks.distill.baselines import master_weights as optimizers
from benchmarks.distill.baselines.prepare import prepare
from benchmarks.distill.baselines.setting import Setting, Watch
from ranks import on_ranks
from torch import Tensor
from transformers.models.qwen3_moe import modeling_qwen3_moe

from fcsd import extras
from fcsd.distill.experts.expert_parallel import randomise
from fcsd.distill.loss.losses import IGNORE, kl_divergence
from fcsd.errors import ConfigError
from fcsd.parallel.expert.autoep import expert_block
from fcsd.parallel.weights.tensor_map import pieces, state

pytestmark = pytest.mark.lab

TOKENS, HIDDEN, VOCAB = 24, 16, 40
SIDES = ("trl", "loop-liger", "loop-trl", "fcsd-plain")
# These run Liger's kernels, which take seconds for each layer in Triton's interpreter.
LAYERS = ("loop-liger-model", "loop-liger-grouped", "loop-liger-compiled", "autoep")


@pytest.fixture(scope="module")
def inputs() -> list[Tensor]:
    """Student's hidden states and head, those of a different teacher, and labels of which some do not count."""
    torch.manual_seed(0)
    student, teacher = (torch.randn(TOKENS, HIDDEN) for _ in range(2))
    heads = [torch.randn(VOCAB, HIDDEN) / 2 for _ in range(2)]
    labels = torch.randint(VOCAB, (TOKENS,))
    labels[5::6] = IGNORE
    return [student, heads[0], teacher, heads[1], labels]


def gradients(loss: Any, inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A loss and its gradients with respect to the student's hidden states and head."""
    student, head = (value.clone().requires_grad_() for value in inputs[:2])
    value = loss(student, head, *inputs[2:])
    return (value.detach(), *torch.autograd.grad(value, (student, head)))


def own(student: Tensor, head: Tensor, teacher: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    counts = labels != IGNORE
    return kl_divergence(student, head, teacher, other, counts, denominator=counts.sum())


def gkd(student: Tensor, head: Tensor, teacher: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    from trl.experimental.gkd import GKDTrainer

    logits = [hidden @ weight.t() for hidden, weight in ((student, head), (teacher, other))]
    return GKDTrainer.generalized_jsd_loss(*(x[None] for x in logits), labels=labels[None], beta=0.0)


@pytest.mark.parametrize("name", ["gkd", "liger", "trl_chunked"])
def test_the_divergence_of_each_baseline_is_ours(name: str, inputs: list[Tensor]) -> None:
    theirs = gkd if name == "gkd" else getattr(loop, name)()
    wanted = gradients(own, inputs)
    assert wanted[0] > 0.1
    torch.testing.assert_close(gradients(theirs, inputs), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
def test_ligers_divergence_with_a_fused_head_is_ours(inputs: list[Tensor]) -> None:
    placed = [value.cuda() for value in inputs]
    torch.testing.assert_close(gradients(loop.liger_kl(), placed), gradients(own, placed), rtol=1e-2, atol=1e-4)


def test_master_weights_are_adamw_in_fp32_rounded_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_TOGETHER", 40)  # so that the tensors are updated in three parts
    torch.manual_seed(0)
    weights = [torch.randn(shape).bfloat16().requires_grad_() for shape in ((4, 8), (3,), (50,), (2, 5))]
    masters = [weight.detach().float().requires_grad_() for weight in weights]
    settings: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    ours, reference = optimizers.MasterWeightsAdamW(weights, **settings), torch.optim.AdamW(masters, **settings)
    for step in range(20):
        for optimizer in (ours, reference):
            optimizer.param_groups[0]["lr"] = 1e-4 * (1 + step)  # as a scheduler does
        for weight, master in zip(weights, masters, strict=True):
            weight.grad = torch.randn_like(weight)
            master.grad = weight.grad.float()
        ours.step()
        reference.step()
    for weight, master in zip(weights, masters, strict=True):
        torch.testing.assert_close(weight, master.bfloat16(), rtol=0, atol=0)


def interpret_liger() -> None:
    """Lets Liger's kernels run in Triton's interpreter, which lacks ``rsqrt``, scalars of floats, and a tuner."""
    import numpy as np
    from triton import language
    from triton.runtime import interpreter

    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"
    from liger_kernel.ops import rms_norm  # pyright: ignore[reportMissingImports]

    rms_norm.rsqrt = lambda x: 1 / language.sqrt(x)
    others = interpreter._implicit_cvt

    def convert(given: Any) -> Any:
        if type(given) is not float:
            return others(given)
        handle = interpreter.TensorHandle(np.array([given], np.float32), language.float32)
        return language.tensor(handle, language.float32)

    interpreter._implicit_cvt = convert
    layers.compile_layers = partial(layers.compile_layers, backend="eager")


def trained(names: tuple[str, ...], load: compare.Workload) -> dict[str, tuple[float, float, Tensor]]:
    """Each side's loss of the first step, its share of data, and by how much its steps changed the weights."""
    kept: list[Any] = []

    class Kept(Setting):
        """Keeps the students, which the sides would drop."""

        def new_student(self) -> Any:
            kept.append(super().new_student())
            return kept[-1]

    interpret_liger()
    setting, _, _ = prepare(load)
    # A teacher far from the student: otherwise rounding would be a large part of the gradients.
    teacher = randomise(setting.teacher.config, 1, dtype=torch.float32, device=setting.world.device, seed=7)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(3)
    setting = Kept(setting.recipe, setting.student, teacher.requires_grad_(False), setting.rows, setting.world)
    before, configured = parameters(Setting.new_student(setting)), copy.deepcopy(setting.student.to_dict())
    written, replaced = parameters(teacher), dict(vars(modeling_qwen3_moe))
    found = {}
    for name in (compare.OWN, *names):
        side = compare.own.distill if name == compare.OWN else compare.BASELINES[name].make()
        watch = Watch(setting.world.device, 1, load.steps, traced=True)
        loss = side(setting, watch)
        block = kept[-1].model.layers[0].mlp
        assert ("Liger" in repr(block.experts)) == (name == "loop-liger-model"), name
        assert (expert_block(block) is not None) == (name == "autoep"), name
        found[name] = (loss, watch.data_wait, parameters(kept.pop()) - before)
        assert watch.seconds > 0 and watch.peak is None and watch.idle is None
        assert setting.student.to_dict() == configured, f"{name} changed the config for the sides after it"
        left = [key for key, value in replaced.items() if vars(modeling_qwen3_moe).get(key) is not value]
        assert not left, f"{name} left its own {left} in transformers' module"
        for module in teacher.modules():
            assert "forward" not in vars(module), f"{name} left a wrapper around the teacher"
        assert torch.equal(parameters(teacher), written)
    assert "LOCAL_RANK" in os.environ, "DeepSpeed needs it again in the next turn"
    return found


def parameters(model: Any) -> Tensor:
    """All weights of a model in one order, whether or not its experts are AutoEP's."""
    held, found = state(model), []
    for piece in sorted(pieces(model), key=lambda piece: (piece.name, piece.expert or 0)):
        parts = [
            held[part].detach() if piece.local is None else held[part][piece.local].detach() for part in piece.parts
        ]
        found.append(torch.cat(parts).flatten())
    return torch.cat(found)


@pytest.mark.parametrize(
    ("names", "load"),
    [
        (SIDES, compare.Workload("tiny", 2, micro_batch=2, seq=16, teacher=True, accumulation=2, steps=2)),
        (LAYERS, compare.Workload("tiny", 1, micro_batch=1, seq=8, teacher=True, steps=1)),
    ],
)
def test_every_side_trains_the_same_weights_on_the_same_rows(names: tuple[str, ...], load: compare.Workload) -> None:
    (found,) = on_ranks(1, trained, names, load)
    loss, _, moved = found[compare.OWN]
    assert loss > 0.01 and moved.abs().max() > 1e-4
    for name in names:
        theirs, data_wait, change = found[name]
        assert theirs == pytest.approx(loss, rel=1e-4), name
        assert 0 <= data_wait < 1, name
        # Adam divides a gradient by its size: where a gradient is almost 0, rounding decides the sign of the change.
        assert (change - moved).abs().mean() < 0.01 * moved.abs().mean(), name


def test_all_settings_of_a_kernel_are_compiled_before_one_is_tried() -> None:
    compiled: list[Any] = []
    kernel = SimpleNamespace(
        nargs={"x": 1}, fn=SimpleNamespace(run=lambda *given, **options: compiled.append((given, options)))
    )
    configs = [triton.Config({"BLOCK": size}, num_warps=2) for size in (16, 32)]
    assert layers.compile_configs(kernel, lambda options: configs, {"warmup": False, "M": 4}) == configs
    assert [
        (given, options["M"], options["warmup"], options["BLOCK"], options["num_warps"]) for given, options in compiled
    ] == [
        ((1,), 4, True, 16, 2),
        ((1,), 4, True, 32, 2),
    ]


def turns(out: Path) -> tuple[list[tuple[int, int]], dict[str, Any], dict[str, Any]]:
    """A comparison of two sides that only report to the watch, and the (micro-batch, rows of a step) of each visit.

    The second comparison tries micro-batches from the largest down.

    The second side needs too much memory for more than two rows at a time.
    """
    asked: list[tuple[int, int]] = []

    def making(most: int) -> Any:
        def side(setting: Setting, watch: Watch) -> float:
            micro = setting.recipe.train.micro_batch_size
            asked.append((micro, setting.recipe.rows_per_step))
            if micro > most:
                raise torch.OutOfMemoryError("too many rows")
            for step in range(1, watch.steps + 1):
                watch.ended(step)
            watch.seconds = 1 / micro
            return 0.5

        return side

    compare.own.distill = making(8)
    compare.BASELINES["small"] = compare.Baseline("torch", "torch", lambda: making(2))
    load = compare.Workload("tiny-dense", 1, 4, 16, teacher=True, accumulation=2, rounds=2)
    result = compare.bench(load, ("small",), out)
    return list(asked), result, compare.bench(load, ("small",), largest=True)


def test_each_side_takes_turns_at_its_fastest_micro_batch(tmp_path: Path) -> None:
    ((asked, result, downward),) = on_ranks(1, turns, tmp_path)
    assert asked == [(micro, 8) for micro in (1, 2, 4, 1, 2, 4, 4, 2, 4, 2)]
    assert [(found["micro_batch"], found["out_of_memory"]) for found in result["sweep"][3:]] == [
        (1, False),
        (2, False),
        (4, True),
    ]
    assert [turn["micro_batch"] for turn in result["turns"]] == [4, 2, 4, 2]
    assert [(found["side"], found["micro_batch"]) for found in downward["sweep"]] == [
        ("fcsd", 4),
        ("small", 4),
        ("small", 2),
    ]
    assert [turn["micro_batch"] for turn in downward["turns"]] == [4, 2, 4, 2]
    assert json.loads((tmp_path / "baselines.json").read_text())["turns"] == result["turns"]
    *_, ours, small = compare.table(result).splitlines()
    assert ours.split()[:5] == ["fcsd", "4", "250.0", "0.0", "512"] and small.split()[5] == "2.000"


def compared_with_adapters(out: Path) -> dict[str, Any]:
    load = compare.Workload("tiny", 2, 1, 16, teacher=True, rounds=1, steps=1)
    return compare.bench(load, ("fcsd-adapters",), out)


def test_adapters_begin_where_full_training_does_and_have_no_second_model(tmp_path: Path) -> None:
    (result,) = on_ranks(1, compared_with_adapters, tmp_path)
    full, adapters = result["turns"]
    assert (full["side"], adapters["side"]) == ("fcsd", "fcsd-adapters")
    assert adapters["loss"] == pytest.approx(full["loss"], rel=1e-6) and full["loss"] > 0
    assert full["seconds"] > 0 and adapters["seconds"] > 0


def test_the_table_relates_memory_above_weights_and_optimizer() -> None:
    turn = {"out_of_memory": False, "seconds": 0.1, "data_wait": 0.0, "idle": 0.25, "exposed": 0.0, "micro_batch": 2}
    each = [turn | {"side": name, "peak": 2**30 * peak} for name, peak in (("fcsd", 12), ("trl", 14))]
    each.append(each[1] | {"seconds": 0.3})
    sweep = [turn | {"side": "fcsd", "peak": 2**30 * 11}]
    result = {"turns": each, "sweep": sweep, "batch_tokens": 1000, "held": 2**30 * 10, "bound": 20_000.0}
    ours, theirs, bound = [line.split() for line in compare.table(result).splitlines()[1:]]
    assert ours[3:] == ["-", "10,000", "1.000", "50.0%", "2.00", "100.0%", "50.0%", "0.0%", "0.0%", "25.0%"]
    assert theirs[2:] == [
        "200.0",
        "100.0",
        "5,000",
        "2.000",
        "25.0%",
        "4.00",
        "50.0%",
        "25.0%",
        "0.0%",
        "0.0%",
        "25.0%",
    ]
    assert bound[:5] == ["bound", "-", "50.0", "-", "20,000"] and set(bound[5:]) == {"-"}


def test_a_baseline_that_is_unknown_or_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown baseline 'lora'"):
        compare.check_names(("trl", "lora"))
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"^--against loop-liger needs liger_kernel: pip install 'fcsd\[dev\]'$"):
        compare.check_names(("loop-liger",))


def refusals(cases: list[str]) -> list[str]:
    """The message with which each assignment to the recipe is refused."""
    told = []
    for assignment in cases:
        with pytest.raises(ConfigError) as caught:
            prepare(compare.Workload("tiny-dense", 1, 1, 16, teacher=True, sets=(assignment,)))
        told.append(str(caught.value))
    return told


def test_settings_that_the_baselines_do_not_have() -> None:
    (told,) = on_ranks(
        1, refusals, ["objective.temperature=2", "objective.sft=1", "optim.offload=host", "train.adapter.rank=4"]
    )
    assert told[0] == told[1] == "the baselines compute KL at temperature 1 only"
    assert told[2].startswith("the baselines keep fp32 moments")
    assert told[3].startswith("this benchmark trains all weights")
