import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import quantised
import runs
import tiny
import torch
import transformers
from representatives import representatives
from typer.testing import CliRunner

from fcsd.bench.shapes import SHAPES
from fcsd.checkpoint import read_layout
from fcsd.cli.main import app
from fcsd.config import Adapter, load_recipe
from fcsd.convert import convert_checkpoint
from fcsd.distill.optim.adamw_choice import updates_alone
from fcsd.errors import BadInputError, ConfigError, DoesNotFitError
from fcsd.models.build import decoder_of
from fcsd.plan import Hardware, Setup, plan_run, plan_setup
from fcsd.plan.memory import (
    BUCKET,
    copy_bytes,
    disk_bytes,
    host_optimizer_bytes,
    loss_bytes,
    optimizer_bytes,
    saved_bytes,
    shard,
    state_width,
)
from fcsd.plan.model import MetaModel, ModelNumbers, of_rank
from fcsd.plan.report import to_text
from fcsd.plan.search import candidates, changes, larger_micro_batches
from fcsd.plan.setup import GIB, USABLE, present, setup_of, uncounted, with_parts
from fcsd.plan.speed import (
    BENCHMARK,
    BUS,
    COPY,
    HOST,
    LAUNCH,
    MASKED_ATTENTION,
    MICRO_BATCH,
    PEAK,
    UPDATE,
    UPDATE_ALONE,
    WRITE,
    attention_flops,
    flops_per_token,
    forward_flops,
    micro_batch_seconds,
    speed,
    update_seconds,
    work_per_token,
)
from fcsd.progress import duration

SMALL = Setup(world=2, micro_batch_size=2, seq_len=64, batch_tokens=512, tokens=5120)


def meta(folder: Path, config) -> MetaModel:
    config.save_pretrained(folder)
    return MetaModel(str(folder))


@pytest.mark.parametrize("arch", representatives("layer", "moe"))
def test_the_numbers_of_every_architecture_are_its_models(tmp_path, arch):
    model = meta(tmp_path, tiny.config(arch))
    whole = tiny.model(arch)
    numbers = model.numbers
    experts = sum(p.numel() for name, p in whole.named_parameters() if ".experts." in name)
    text = {*decoder_of(whole).parameters(), *whole.get_output_embeddings().parameters()}
    assert (numbers.total, numbers.routed) == (sum(p.numel() for p in text), experts)
    assert len(numbers.layers) == 4 and numbers.vocab == tiny.VOCAB
    sizes = (1, 2) if numbers.experts else (1,)
    for ep_size in sizes:
        found = model.layer_bytes(replace(SMALL, ep_size=ep_size))
        assert all(one.kept > 0 and one.forward > 0 for one in found.values())
        assert {layer.kind for layer in numbers.layers} < found.keys()


def test_a_model_whose_widths_are_no_multiples_of_16_bytes_is_planned(tmp_path):
    model = meta(tmp_path, tiny.config("glm4_moe", hidden_size=60, moe_intermediate_size=28))
    assert all(one.kept > 0 and one.backward > 0 for one in model.layer_bytes(replace(SMALL, ep_size=1)).values())


def test_what_a_layer_keeps_is_what_autograd_saves(tmp_path):
    """Against a real forward pass on the CPU."""
    config = tiny.config("llama", hidden_size=64, intermediate_size=256)
    model = meta(tmp_path, config)
    setup = replace(SMALL, micro_batch_size=1, fused=False)
    found = model.layer_bytes(setup)[0]
    layer = tiny.model("llama", dtype=torch.bfloat16, intermediate_size=256).train().model.layers[0]
    parameters = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage  # kept, so that no address comes twice
        return tensor

    hidden = torch.randn(1, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    rope = tuple(torch.ones(1, 64, 16, dtype=torch.bfloat16) for _ in range(2))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(hidden, position_embeddings=rope)
    there = {hidden.untyped_storage().data_ptr(), *(part.untyped_storage().data_ptr() for part in rope)}
    real = sum(storage.nbytes() for address, storage in saved.items() if address not in there)
    assert found.kept == pytest.approx(real, rel=0.06)
    # Fused, silu(gate) is not kept. A norm keeps its input alone, not an fp32 copy and the normalised input as well.
    saved_by_gate, saved_by_norms = 64 * 256 * 2, 2 * 64 * 64 * (4 + 2)
    fused = model.layer_bytes(replace(setup, fused=True))[0]
    assert found.kept - fused.kept == pytest.approx(saved_by_gate + saved_by_norms, rel=0.1)


def test_gradients_summed_in_fp32_take_twice_the_memory_of_bf16(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe"))
    found = {}
    for dtype in ("bf16", "fp32"):
        setup = replace(SMALL, zero_stage=0, accumulate_dtype=dtype)
        memory = plan_setup("tiny", model, model.numbers, setup, Hardware(gpus=2)).memory
        found[dtype] = next(moment for moment in memory.moments if moment.name == "gradient reduction").gradients
    assert found["bf16"] == 2 * model.numbers.total and found["fp32"] == 4 * model.numbers.total


def test_loss_temporaries_as_measured():
    """distillation.md, fused KL at 512 tokens a chunk: 315 MB at 102 400 words, 467 at 151 936, 621 at 202 048."""
    head_alone = ModelNumbers((), 0, 8, False, 0, 8, 1, 0, 0, 0, 1)
    for vocab, measured in ((102400, 315), (151936, 467), (202048, 621)):
        setup = replace(SMALL, micro_batch_size=4, seq_len=4096, terms=("kl",), chunk_tokens=512)
        assert loss_bytes(replace(head_alone, vocab=vocab), setup)[0] / 1e6 == pytest.approx(measured, rel=0.01)


def test_shares_of_weights_and_optimizer(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe")).numbers
    for stage, ranks, expert_ranks in ((0, 1, 1), (1, 8, 2), (2, 8, 2)):
        setup = replace(SMALL, world=8, ep_size=4, zero_stage=stage)
        own = shard(model, setup)
        assert own.trained == model.dense + model.routed // 4
        partition = model.dense / ranks + model.routed / 4 / expert_ranks
        assert optimizer_bytes(own, setup) == pytest.approx(12 * partition, rel=1e-3)
    frozen = shard(model, replace(SMALL, freeze_embeddings=True, freeze_lm_head=True))
    assert frozen.frozen == model.embedding + model.head and frozen.trained + frozen.frozen == model.total


def test_flops_are_two_a_parameter_and_attention(tmp_path):
    numbers = meta(tmp_path, tiny.config("llama")).numbers
    layers, head = forward_flops(numbers, 256)
    products = numbers.total - numbers.embedding - numbers.head
    assert head == 2 * 64 * tiny.VOCAB
    assert layers == 2 * products + 4 * 256 * (4 * (16 + 16))  # four layers, four heads of width 16


def test_each_knob_saves_memory(tmp_path):
    model = meta(tmp_path, SHAPES["deepseek-v2-lite"](4))

    def total(**changes) -> int:
        base = dict(world=8, micro_batch_size=4, seq_len=4096, batch_tokens=2**20, teacher="replicated")
        setup = replace(SMALL, **{**base, **changes})
        return plan_setup("x", model, model.numbers, setup, Hardware()).memory.total

    whole = total()
    for change in (
        {"recompute": True},
        {"micro_batch_size": 1},
        {"zero_stage": 2},
        {"ep_size": 4},
        {"freeze_lm_head": True, "freeze_embeddings": True},
        {"teacher": "none", "terms": ("sft",)},
    ):
        assert total(**change) < whole, change
    assert total(ep_size=8, teacher="sharded") < total(ep_size=8)
    assert total(zero_stage=0) > whole


def test_shards_are_suggested_where_a_dense_model_does_not_fit_otherwise(tmp_path):
    model = meta(tmp_path, SHAPES["llama3-8b"](16))
    setup = replace(
        SMALL, world=8, seq_len=4096, batch_tokens=2**20, teacher="replicated", recompute=True, zero_stage=2
    )

    def planned(gib=141.0, **changes):
        return plan_setup("x", model, model.numbers, replace(setup, **changes), Hardware(8, memory=gib))

    two = planned(tp_size=2)
    tight = planned(gib=(two.memory.total / GIB + 1) / USABLE)
    assert tight.change is not None and tight.change.written == ["--set parallel.tp_size=2"]
    assert (tight.change.total, tight.change.hours) == (two.memory.total, two.speed.hours)
    assert any(one.tp_size == 8 for one, _ in candidates(setup, Hardware(8), experts=0))
    assert not any(one.tp_size > 1 for one, _ in candidates(setup, Hardware(8), experts=8))
    assert all(one.tp_size <= 8 for one, _ in candidates(setup, Hardware(8, nodes=2), experts=0)), "inside a node"
    wide = meta(tmp_path / "wide", SHAPES["llama3-70b"](4)).numbers
    for numbers in (model.numbers, wide):  # a rank computes, and reads and writes, its part of each layer
        ranks = [of_rank(numbers, degree) for degree in (4, 8)]
        four, eight = (
            micro_batch_seconds(rank, rank, replace(setup, tp_size=degree))[0]
            for rank, degree in zip(ranks, (4, 8), strict=True)
        )
        assert eight < 0.8 * four


def test_adapters_that_do_not_fit_are_told_of_nf4(tmp_path):
    model = meta(tmp_path, SHAPES["llama3-70b"](80))
    setup = replace(SMALL, world=8, seq_len=4096, batch_tokens=2**20, teacher="replicated", recompute=True)
    planned = plan_setup(
        "x", model, model.numbers, with_parts(setup, model.parts(Adapter(), [])), Hardware(8, memory=80)
    )
    assert planned.change is None and "train.adapter.base: nf4" in planned.advice()


def test_masked_attention_weighs_every_pass_over_a_layer(tmp_path):
    """Forward, twice as much backward, the forward pass that is recomputed, and the teacher's."""
    numbers = meta(tmp_path, tiny.config("llama")).numbers
    masked = replace(SMALL, masked=True, teacher="none", terms=("sft",))
    one = (MASKED_ATTENTION - 1) * attention_flops(numbers, SMALL.seq_len)
    for setup, passes in (
        (masked, 3),
        (replace(masked, recompute=True), 4),
        (replace(masked, teacher="replicated"), 4),
        (replace(masked, recompute=True, teacher="replicated"), 5),
    ):
        added = work_per_token(numbers, numbers, setup) - flops_per_token(numbers, numbers, setup)
        assert added == pytest.approx(passes * one)


@pytest.mark.parametrize(("config", "total", "active"), [("DeepseekV3Config", 671, 37), ("Llama4Config", 108, 17)])
def test_the_largest_models_are_planned_from_their_config_alone(tmp_path, config, total, active):
    model = meta(tmp_path, getattr(transformers, config)())
    assert model.numbers.total / 1e9 == pytest.approx(total, rel=0.01)
    assert model.numbers.active / 1e9 == pytest.approx(active, rel=0.03)
    setup = Setup(world=64, micro_batch_size=1, seq_len=4096, batch_tokens=2**22, tokens=2**30, teacher="replicated")
    planned = plan_setup("large", model, model.numbers, setup, Hardware(nodes=8))
    assert not planned.memory.fits and planned.change is not None


def test_the_advice_fits_and_is_the_first_that_does(tmp_path):
    model = meta(tmp_path, SHAPES["deepseek-v2-lite"](27))
    setup = Setup(
        **dict(world=8, micro_batch_size=4, seq_len=4096, batch_tokens=2**18, tokens=2**30, teacher="replicated")
    )
    planned = plan_setup("v2", model, model.numbers, setup, Hardware())
    assert not planned.memory.fits and planned.change is not None
    with pytest.raises(DoesNotFitError, match="does not fit") as caught:
        planned.check()
    assert "train.activation_checkpointing=true" in str(caught.value.hint)
    tried = 0
    for changed, hardware in candidates(setup, Hardware(), 64):
        fits = plan_setup("v2", model, model.numbers, changed, hardware).memory
        tried += 1
        if fits.fits:
            assert fits.total == planned.change.total
            break
    assert tried > 1

    def refused(values):  # as by a recipe that cannot have it
        return "train.activation_checkpointing" not in values

    other = plan_setup("v2", model, model.numbers, setup, Hardware(), None, refused).change
    assert other is not None and other.written and not any("checkpointing" in one for one in other.written)
    nothing = plan_setup("v2", model, model.numbers, setup, Hardware(memory=1))
    assert nothing.change is None and "none of the settings" in nothing.advice()


def test_qwen3_30b_a3b_on_eight_cards_of_80_gb(monkeypatch):
    """The packaged recipe: 66 GB of states today, 21 with the optimizer on the host."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = MetaModel("Qwen/Qwen3-30B-A3B", rewired=True)

    def planned(*sets):
        setup = setup_of(load_recipe("qwen3-30b-a3b", list(sets)).recipe, 8, len(model.numbers.layers), model.plain)
        return plan_setup("qwen3-30b-a3b", model, model.numbers, setup, Hardware(8, memory=80))

    today, away = planned(), planned("optim.offload=host")
    numbers = today.numbers
    mine = numbers.dense + numbers.routed // 8
    updated = -(-numbers.dense // 8) + numbers.routed // 8
    states = 4 * mine + 12 * updated  # two models of two bytes, AdamW
    assert states / 1e9 == pytest.approx(66.5, abs=0.1)
    peak = today.memory.peak
    assert peak.weights + peak.teacher + peak.optimizer == states
    assert [one.memory.total / GIB for one in (today, away)] == pytest.approx([85.8, 38.1], abs=0.1)
    assert [one.memory.fits for one in (today, away)] == [False, True]
    assert today.change is not None and today.change.written == ["--set optim.offload=host"]

    buffer = 2 * numbers.embedding  # the gradient of the largest tensor
    assert away.memory.peak.optimizer == buffer
    # In host memory are the masters, their gradients and the copy for the way back, all pinned, and the moments.
    assert away.host > 18 * updated
    assert away.speed.parts["optimizer"] > 10 * today.speed.parts["optimizer"]


def test_the_time_of_an_optimizer_on_the_host_is_bytes_over_rates(tmp_path):
    model = meta(tmp_path, tiny.config("llama")).numbers
    base = replace(SMALL, world=4, offload="host")
    updated = sum(shard(model, base).partition)
    measured = update_seconds(model, replace(base, offload="none"), 4)
    for stage in (1, 2):
        found = update_seconds(model, replace(base, zero_stage=stage), 4)
        assert found - measured == pytest.approx(updated * (6 / BUS + 42 * 4 / HOST))
    # Under ZeRO-2 each micro-batch sends its gradients; all but the first read the sum back.
    several = replace(base, zero_stage=2, batch_tokens=4 * base.batch_tokens)
    assert several.accumulation == 4
    more = update_seconds(model, several, 4) - update_seconds(model, replace(base, zero_stage=2), 4)
    assert more == pytest.approx(updated * 2 * 7 / BUS)
    assert update_seconds(model, several, 8) > update_seconds(model, several, 4), "more processes share the memory"


def test_the_optimizer_moves_to_the_host_only_after_everything_but_more_nodes(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe")).numbers
    setup = replace(SMALL, teacher="replicated")
    tried = list(candidates(setup, Hardware(2), model.experts))
    first = [
        next(n for n, (one, _) in enumerate(tried) if one.teacher == "sharded"),
        next(n for n, (one, _) in enumerate(tried) if one.offload == "host"),
        next(n for n, (one, _) in enumerate(tried) if one.moments == "8bit"),
        next(n for n, (_, hardware) in enumerate(tried) if hardware.nodes > 1),
    ]
    assert first == sorted(first)
    assert changes(setup, replace(setup, offload="host"), Hardware(2)) == ["--set optim.offload=host"]
    without = candidates(replace(setup, zero_stage=0), Hardware(2), 8)
    assert not any(one.zero_stage == 0 and (one.offload == "host" or one.moments == "8bit") for one, _ in without)


def test_moments_in_8_bits_leave_half_of_the_states(tmp_path):
    numbers = meta(tmp_path, tiny.config("llama")).numbers
    for world in (1, 4):  # one process then has ZeRO, which holds a flat gradient in its step
        setup = replace(SMALL, world=world, zero_stage=2)
        small = replace(setup, moments="8bit")
        assert optimizer_bytes(shard(numbers, setup), setup) == 12 * sum(shard(numbers, setup).partition)
        assert state_width(small) * 256 == 256 * (4 + 2) + 2 * 4  # and a scale of each block of both moments
        assert optimizer_bytes(shard(numbers, small), small) == int(
            state_width(small) * sum(shard(numbers, small).partition)
        )
        assert small.zero == 2
    assert changes(setup, small, Hardware(4)) == ["--set optim.moments=8bit"]


def test_a_plan_that_fits_only_with_the_optimizer_on_the_host_says_what_it_takes(tmp_path):
    model = meta(tmp_path, SHAPES["deepseek-v2-lite"](4))
    setup = Setup(world=1, micro_batch_size=1, seq_len=64, batch_tokens=64, tokens=6400, terms=("sft",), recompute=True)

    def planned(memory, **changes):
        return plan_setup("x", model, model.numbers, replace(setup, **changes), Hardware(1, memory=memory))

    bytes_needed = [planned(141, zero_stage=2, offload=offload).memory.total for offload in ("host", "none")]
    between = planned(sum(bytes_needed) / 2 / USABLE / GIB)
    assert bytes_needed[0] < bytes_needed[1] and between.change is not None
    assert "--set optim.offload=host" in between.change.written and between.change.hours > between.speed.hours
    assert (
        between.change.host
        == planned(141, offload="host").host
        == host_optimizer_bytes(shard(model.numbers, replace(setup, offload="host")), replace(setup, offload="host"))
        + 2 * GIB
    )
    assert f"{between.change.host / GIB:,.0f} GiB of host memory for each process instead of" in between.advice()


def test_hours_are_steps_and_what_runs_between_them(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe"))
    alone = replace(SMALL, tokens=512 * 100, teacher="replicated")

    def parts(**changes):
        return plan_setup("x", model, model.numbers, replace(alone, **changes), Hardware(2)).speed

    bare = parts()
    assert [name for name, hours in bare.parts.items() if hours] == ["forward and backward", "optimizer"]
    assert bare.hours == pytest.approx(100 * 512 / bare.tokens_per_second / 3600)
    more = parts(saves=4, evaluations=3, held_out=64, benchmarks=2)
    written = saved_bytes(model.numbers, alone)
    assert more.parts["checkpoints"] == pytest.approx(4 * written / WRITE / 3600)
    assert more.parts["evaluations"] > 2 * BENCHMARK / 3600 and more.hours == pytest.approx(sum(more.parts.values()))
    timed = parts(saves=1, saves_per_hour=10**4)
    assert timed.parts["checkpoints"] > parts(saves=1).parts["checkpoints"]
    copied = copy_bytes(model.numbers, alone)
    assert copied == pytest.approx(written / 2, rel=1e-3), "two processes share the copy"
    slow = parts(saves=4, saves_beside=True)  # such short runs wait for most of the writing
    rest = written / WRITE - bare.hours / 4 * 3600
    expected = 3 * (copied / COPY + max(0, rest)) + written / WRITE
    assert slow.parts["checkpoints"] * 3600 == pytest.approx(expected)
    long = plan_setup("x", model, model.numbers, replace(alone, tokens=10**9, saves=4, saves_beside=True), Hardware(2))
    assert long.speed.parts["checkpoints"] * 3600 == pytest.approx(3 * copied / COPY + written / WRITE)
    assert "for the copy that checkpoints are written from" in to_text(long)


def test_utilisation_is_of_the_whole_step_without_recompute(tmp_path):
    model = meta(tmp_path, tiny.config("llama")).numbers
    for recompute in (False, True):
        setup = replace(SMALL, recompute=recompute)
        found = speed(model, model, setup, Hardware(2), 0.5)
        counted = flops_per_token(model, model, replace(setup, recompute=False))
        assert found.tokens_per_second == pytest.approx(2 * PEAK["bf16"] * 0.5 / counted)
        assert not found.limited_by_host and found.utilisation == pytest.approx(0.5)
    assert speed(model, model, SMALL, Hardware(2)).limited_by_host  # it is very small


def test_attention_of_short_documents_is_cheaper_and_a_mask_costs_more(tmp_path):
    model = meta(tmp_path, tiny.config("llama")).numbers
    setup = replace(SMALL, seq_len=4096)
    whole = work_per_token(model, model, setup)
    assert whole == flops_per_token(model, model, setup)
    quarter = work_per_token(model, model, replace(setup, document=1024))
    assert whole - quarter == pytest.approx(0.75 * 3 * attention_flops(model, 4096))
    assert work_per_token(model, model, replace(setup, masked=True)) > whole


def test_disk_counts_the_best_checkpoint(tmp_path):
    numbers = meta(tmp_path, tiny.config("llama")).numbers
    one = saved_bytes(numbers, SMALL)
    assert disk_bytes(numbers, SMALL) == 3 * one
    assert disk_bytes(numbers, replace(SMALL, best=True)) == 4 * one


def test_a_dry_run_is_planned_for_the_gpus_that_are_present(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert present(4).memory == 141 and "assumes H200s" in present(4).source
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = present(4)
    assert found.world == 4 and found.memory * USABLE == pytest.approx(79) and "A100" in found.source


def test_plan_command_and_dry_run(tmp_path):
    runs.write_models(tmp_path)
    resolved = runs.resolved(tmp_path, parallel__zero_stage=2)
    recipe = str(tmp_path / "recipe.yaml")
    run = CliRunner().invoke(app, ["plan", recipe, "--gpus", "2", "--price", "2.5", "--mfu", "0.5", "--json"])
    assert run.exit_code == 0, run.output
    told = json.loads(run.stdout)
    assert told["fits"] and told["speed"]["utilisation"] == pytest.approx(0.5) and told["hardware"]["gpus"] == 2
    assert told["speed"]["cost"] == pytest.approx(2.5 * told["speed"]["gpu_hours"])
    assert told["memory"]["total"] >= told["memory"]["peak_allocated"] > BUCKET * 4  # an fp32 bucket
    assert told["setup"]["tokens"] == resolved.recipe.train.steps * resolved.recipe.train.batch_tokens
    text = CliRunner().invoke(app, ["plan", recipe, "--gpus", "2"])
    assert text.exit_code == 0 and "verdict      fits" in text.stdout
    assert f" tokens/s: {duration(3600 * told['speed']['hours'])}, " in text.stdout and "hours" not in text.stdout

    tight = CliRunner().invoke(app, ["plan", recipe, "--gpus", "2", "--gpu-mem", "2"])
    assert tight.exit_code == 8 and "does not fit" in tight.stderr
    assert "of each GPU" in tight.stderr and "\nhint:" in tight.stderr
    split = CliRunner().invoke(app, ["plan", recipe, "--gpus", "3"])
    assert split.exit_code == 2

    dry = CliRunner().invoke(app, ["distill", recipe, "--dry-run", "--gpus", "2"])
    assert dry.exit_code == 0 and "verdict      fits" in dry.stderr and not (tmp_path / "run").exists()
    assert dry.stderr.index(" count") < dry.stderr.index("assumes H200s") < dry.stderr.index("memory of one GPU")


def test_a_model_directory_is_planned_without_a_recipe(tmp_path):
    """Converted or not; the values of the recipe that stands in can be changed, as always."""
    tiny.model("llama").save_pretrained(tmp_path / "model")
    convert_checkpoint(tmp_path / "model", tmp_path / "converted", wiring="ladder")
    for name in ("model", "converted"):
        run = CliRunner().invoke(app, ["plan", str(tmp_path / name), "--set", "data.seq_len=128", "--json"])
        assert run.exit_code == 0, run.output
        told = json.loads(run.stdout)
        assert told["fits"] and told["setup"]["seq_len"] == 128
        assert told["parameters"]["total"] == sum(p.numel() for p in tiny.model("llama").parameters())


def test_a_model_that_no_setting_fits_is_told_how_many_gpus_it_takes(tmp_path):
    SHAPES["llama3-70b"](80).save_pretrained(tmp_path)
    run = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpus", "4", "--gpu-mem", "24"])
    assert run.exit_code == 8
    # 70.6 B weights, and 34.2 B of them a second time for the teacher, with gradients in fp32, moments and fp32 copies
    held = (2 * (70.6e9 + 34.2e9) + (4 + 12) * 34.2e9) / GIB
    usable = 24 * USABLE - 0.8 - 0.5
    found = int(run.stderr.split("at least ")[1].split()[0])
    assert found == pytest.approx(held / usable, rel=0.1) and "seq_len" not in run.stderr


def test_a_quantised_model_that_does_not_fit_is_told_that_training_decodes_it(tmp_path):
    SHAPES["llama3-70b"](80).save_pretrained(tmp_path)
    block = quantised.methods(128)["awq"][1]
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": block}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = CliRunner().invoke(app, ["plan", str(tmp_path), "--gpus", "4", "--gpu-mem", "24"])
    assert run.exit_code == 8 and "training decodes the 4-bit integers in groups of 128 (awq)" in run.stderr
    assert "train.adapter.base: nf4" in run.stderr


def test_the_files_of_a_quantised_model_are_told_beside_what_is_in_memory(tmp_path):
    quantised.write_by("awq", "llama", tmp_path)
    command = ["plan", str(tmp_path), "--set", "data.seq_len=128"]
    planned = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert planned["stored"]["as"] == "4-bit integers in groups of 16 (awq)"
    held = sum(t.end - t.start for name, t in read_layout(tmp_path).tensors.items())
    assert planned["stored"]["bytes"] == pytest.approx(held, rel=0.01)
    text = CliRunner().invoke(app, command).stdout
    assert "GB of 4-bit integers in groups of 16 (awq)" in text
    refused = CliRunner().invoke(app, [*command, "--gpus", "2", "--set", "parallel.tp_size=2"])
    assert refused.exit_code == 3 and "is quantised (awq), and parallel.tp_size above 1 cannot load" in refused.stderr


def test_shards_that_cannot_load_quantised_weights_are_not_suggested(tmp_path):
    config = SHAPES["llama3-8b"](16)
    config.save_pretrained(tmp_path / "student")
    changes = {"teacher": str(tmp_path / "student"), "train__dtype": "bf16", "parallel": {"zero_stage": 2}}
    recipe = runs.resolved(tmp_path, **changes, train__batch_tokens=512).recipe
    parallel = recipe.parallel.model_copy(update={"tp_size": 2})
    needed = plan_run(recipe.model_copy(update={"parallel": parallel}), Hardware(8)).memory.total / GIB
    tight = Hardware(8, memory=(needed + 1) / USABLE)
    plain = plan_run(recipe, tight).change
    assert plain is not None and plain.written[-1] == "--set parallel.tp_size=2"
    config.quantization_config = {"quant_method": "awq", "bits": 4, "group_size": 128}
    config.save_pretrained(tmp_path / "student")
    change = plan_run(recipe, tight).change
    assert change is None or not any("tp_size" in written for written in change.written)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu-mem", "9" * 400], "no GPU has inf GiB of memory"),
        (["--gpu-mem", "20000000"], "no GPU has 2e+07 GiB of memory"),
        (["--price", "inf"], "no GPU costs inf per hour"),
        (["--set", "checkpoint.every_minutes=1e-320"], "the checkpoints take no finite time"),
    ],
)
def test_nonsense_rates_are_refused_before_anything_is_printed(options, said):
    run = CliRunner().invoke(app, ["plan", "llama3.1-8b-ladder-kl", *options])
    assert run.exit_code == 2 and said in run.stderr and "hint:" in run.stderr and not run.stdout


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, 1e-320, float("nan")])
def test_a_share_of_the_peak_that_no_run_reaches_is_refused(tmp_path, share):
    model = meta(tmp_path, tiny.config("llama")).numbers
    with pytest.raises(ConfigError, match="of the peak"):
        speed(model, model, SMALL, Hardware(2), share)


def test_bad_models_and_batches(tmp_path):
    runs.write_models(tmp_path)
    recipe = runs.resolved(tmp_path).recipe
    with pytest.raises(BadInputError):
        plan_run(recipe.model_copy(update={"model": str(tmp_path / "nothing")}), Hardware(2))
    with pytest.raises(ConfigError, match="no multiple"):
        plan_run(recipe, Hardware(3))
    for gpus, size, what in ((2, 4, "2 processes"), (6, 3, "8 experts of")):
        parallel = recipe.parallel.model_copy(update={"ep_size": size})
        train = recipe.train.model_copy(update={"batch_tokens": gpus * recipe.train.batch_tokens})
        changed = recipe.model_copy(update={"parallel": parallel, "train": train})
        with pytest.raises(ConfigError, match=f"parallel.ep_size {size} does not divide the {what}"):
            plan_run(changed, Hardware(gpus))
    tiny.config("gpt_oss").save_pretrained(tmp_path / "gpt_oss")
    parallel = recipe.parallel.model_copy(update={"ep_size": 2})
    changed = recipe.model_copy(update={"model": str(tmp_path / "gpt_oss"), "parallel": parallel})
    with pytest.raises(ConfigError, match="gpt_oss cannot be expert-parallel"):
        plan_run(changed, Hardware(2))
    parallel = recipe.parallel.model_copy(update={"tp_size": 2})
    with pytest.raises(ConfigError, match="tensor-parallel training does not shard experts"):
        plan_run(recipe.model_copy(update={"parallel": parallel}), Hardware(2))
    tiny.config("llama").save_pretrained(tmp_path / "dense")
    dense = {"model": str(tmp_path / "dense"), "teacher": None, "parallel": parallel}
    with pytest.raises(ConfigError, match=r"parallel\.tp_size 2 does not divide the 1 processes"):
        plan_run(recipe.model_copy(update=dense), Hardware(1))
    init = recipe.init.model_copy(update={"wiring": "desync-2x", "gpus": 4})
    with pytest.raises(ConfigError, match=r"2 tensor-parallel ranks cannot train .*dense: desync-2x of tp_degree 4"):
        plan_run(recipe.model_copy(update=dense | {"init": init}), Hardware(2))


def test_a_model_rewired_on_the_way_in_has_two_streams(tmp_path):
    runs.write_models(tmp_path)
    original = {"model": str(tmp_path / "teacher"), "train__activation_checkpointing": True}
    recomputed = [
        plan_run(runs.resolved(tmp_path, **changes).recipe, Hardware(2)).numbers.streams
        for changes in ({}, original, original | {"init": {"wiring": "farskip"}})
    ]
    assert recomputed == [2, 1, 2]


def test_the_first_line_of_a_plan_says_which_gpus_it_assumes(tmp_path, monkeypatch):
    runs.write_models(tmp_path)
    runs.resolved(tmp_path)
    recipe = str(tmp_path / "recipe.yaml")

    def first_line(*options: str) -> str:
        done = CliRunner().invoke(app, ["plan", recipe, "--gpus", "2", *options])
        assert done.exit_code == 0, done.output
        return done.stdout.splitlines()[0]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_line().startswith("hardware     no GPU is present here, so the plan assumes H200s of 141 GiB")
    for written in ("80", "80.0", "80GB", "80GiB", "80G", "80 gb"):
        assert first_line("--gpu-mem", written).startswith("hardware     GPUs of 80 GiB, as --gpu-mem says")
    for written in ("80MB", "0", "-80", "eighty", "80GBs", "nan", "1e9999", ""):
        refused = CliRunner().invoke(app, ["plan", recipe, f"--gpu-mem={written}"])
        line = f"error: --gpu-mem {written}: expected a number of GiB, at least 1: 80, 80GB, 80GiB or 80G\n"
        assert (refused.exit_code, refused.stderr) == (2, line)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-80GB", total_memory=79 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    assert first_line().startswith("hardware     NVIDIA A100-SXM4-80GB with 79.0 GiB, as present here")


def test_the_best_setting_names_the_change_that_gains_most_first(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe"))
    setup = replace(SMALL, micro_batch_size=1, batch_tokens=1024, recompute=True)
    large = Hardware(2)
    found = plan_setup("x", model, model.numbers, setup, large).faster
    assert found is not None
    assert found.written == ["--set train.micro_batch_size=8", "--set train.activation_checkpointing=false"]
    known = lambda values: "train.activation_checkpointing" not in values  # noqa: E731
    kept = plan_setup("x", model, model.numbers, setup, large, accepted=known).faster
    assert kept is not None and kept.written == ["--set train.micro_batch_size=8"] and kept.hours > found.hours
    assert plan_setup("x", model, model.numbers, setup, large, utilisation=0.4).faster is None


def test_a_run_that_the_host_limits_is_told_the_fastest_micro_batch(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe"))
    setup = replace(SMALL, micro_batch_size=1, batch_tokens=1024)  # eight micro-batches on each of two GPUs
    planned = plan_setup("x", model, model.numbers, setup, Hardware(2))
    assert planned.speed.limited_by_host and planned.faster is not None
    assert planned.faster.written == ["--set train.micro_batch_size=8"] and planned.faster.hours < planned.speed.hours
    assert to_text(planned).endswith(", with\n--set train.micro_batch_size=8")
    assert f"; {duration(3600 * planned.faster.hours)} with the settings of `faster`" in to_text(planned)
    whole = plan_setup("x", model, model.numbers, replace(setup, micro_batch_size=8), Hardware(2))
    assert whole.faster is None and whole.speed.hours == pytest.approx(planned.faster.hours)
    assert list(larger_micro_batches(replace(setup, micro_batch_size=3, batch_tokens=3 * 128), 8)) == []


def test_settings_whose_effect_the_plan_does_not_know_are_named(tmp_path):
    runs.write_models(tmp_path)
    plain = runs.resolved(tmp_path).recipe
    assert uncounted(plain, Hardware(2)) == []
    more = {"train__compile": True, "optim__moments": "8bit", "early_stop": {"metric": "mbpp_plus"}}
    found = uncounted(runs.resolved(tmp_path, **more).recipe, Hardware(2))
    assert [text.split(":")[0] for text in found] == ["train.compile", "optim.moments", "early_stop"]
    divided = runs.resolved(tmp_path, parallel={"ep_size": 2, "dedup": "rank", "overlap": "off"}).recipe
    names = [text.split(":")[0] for text in uncounted(divided, Hardware(1, nodes=2))]
    assert names == ["parallel.overlap", "parallel.dedup", "all-to-alls between nodes"]
    baseline = uncounted(load_recipe("pretrain-farskip-baseline").recipe, Hardware(8))
    assert baseline[0].startswith("init.wiring: ")
    runs.write_models(tmp_path / "dense", "llama")
    desync = runs.resolved(tmp_path / "dense", model=str(tmp_path / "dense" / "teacher"), optim__train=["converted"])
    for wiring, said in (("desync-2x", ["desync: each GPU computes 2 ranks"]), ("ladder", [])):
        init = desync.recipe.init.model_copy(update={"wiring": wiring, "layers": "50%"})
        init = init.model_copy(update={"gpus": 2 if said else 1})
        told = plan_run(desync.recipe.model_copy(update={"init": init}), Hardware(1)).not_counted
        assert [text.split(" of converted")[0] for text in told] == said
    planned = plan_run(divided, Hardware(2))
    assert planned.not_counted and f"not counted  {planned.not_counted[0]}" in to_text(planned)


def test_divided_experts_take_the_host_longer_and_one_process_updates_without_zero(tmp_path):
    model = meta(tmp_path, tiny.config("qwen3_moe")).numbers
    alone = replace(SMALL, world=1, teacher="replicated")
    device, host = micro_batch_seconds(model, model, alone)
    passes = 4 * len(model.layers)  # three of the student, one of the teacher
    assert device > MICRO_BATCH and host == pytest.approx(passes * LAUNCH["experts"])
    divided = replace(alone, world=2, ep_size=2, teacher="sharded")
    assert micro_batch_seconds(model, model, divided)[1] == pytest.approx(passes * LAUNCH["divided experts"])
    updated = sum(shard(model, alone).partition)
    assert update_seconds(model, alone) == pytest.approx(UPDATE_ALONE * updated)
    for other in ({"alone": False}, {"zero_stage": 0}):
        assert update_seconds(model, replace(alone, **other)) == pytest.approx(UPDATE * updated)


def test_one_process_updates_without_copies_of_its_gradients(tmp_path):
    model = meta(tmp_path, tiny.config("llama"))
    alone, zero = (
        {moment.name: moment for moment in plan_setup("x", model, model.numbers, each, Hardware(gpus=1)).memory.moments}
        for each in (replace(SMALL, world=1), replace(SMALL, world=1, alone=False))
    )
    trained = model.numbers.total
    assert alone["optimizer step"].gradients == alone["gradient reduction"].gradients == 2 * trained
    assert alone["gradient reduction"].communication == 0 < zero["gradient reduction"].communication
    assert zero["optimizer step"].gradients > 3 * 2 * trained
    assert alone["optimizer step"].optimizer == zero["optimizer step"].optimizer == 12 * trained


def test_a_recipe_becomes_a_setup(tmp_path):
    runs.write_models(tmp_path)
    recipe = runs.resolved(tmp_path, objective__kl=0.0, train__activation_checkpointing=True).recipe
    setup = setup_of(recipe, 2, 4)
    assert setup.teacher == "none" and setup.terms == ("sft",) and setup.recompute and setup.accumulation == 2
    assert setup.masked and setup.document is None  # fp32 takes a mask
    half = runs.resolved(tmp_path, train__dtype="bf16").recipe
    assert not setup_of(half, 2, 4).masked and setup_of(half, 2, 4, plain=False).masked
    times = {"checkpoint": {"every_steps": 2, "every_minutes": 30}, "train__eval_every": 2, "train__steps": 5}
    timed = setup_of(runs.resolved(tmp_path, early_stop={"metric": "mbpp_plus", "every": 2}, **times).recipe, 2, 4)
    assert (timed.saves, timed.saves_per_hour, timed.benchmarks, timed.best) == (3, 2.0, 2, True)
    # Steps 2 and 4 save and are measured once, although a score is taken after them, too; step 5 is the last.
    assert timed.evaluations == 3
    for steps, every, saves in ((4, 2, 2), (5, 2, 3), (5, 0, 1)):
        saved = {"train__steps": steps, "checkpoint": {"every_steps": every}}
        assert setup_of(runs.resolved(tmp_path, **saved).recipe, 2, 4).saves == saves
    rounded = runs.resolved(tmp_path, train__dtype="bf16", parallel={"quantised": {"dispatch": "int8"}}).recipe
    for one, zero in ((half, 0), (rounded, 1), (recipe, 1)):  # the last one is in fp32
        assert setup_of(one, 1, 4).zero == zero and updates_alone(one, 1) == (zero == 0)
    streams = setup_of(runs.resolved(tmp_path, objective__hidden={"weight": 1.0, "layers": "last:3"}).recipe, 2, 4)
    assert streams.compared == 3 and streams.teacher == "replicated"
