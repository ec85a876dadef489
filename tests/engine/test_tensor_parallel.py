"""A tensor-parallel model gives the reference's logits; overlapped reductions give the bits of blocking ones."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import quantised
import tiny
import torch
import torch.distributed as dist
from late import late_sums, sums_at_once
from ranks import results
from representatives import by_day_and_night
from safetensors.torch import load_file, save_file
from torch import Tensor

from fcsd.checkpoint import SINGLE
from fcsd.checkpoint.weights import Reader
from fcsd.engine.decode import generate_in_slots
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.slots import why_no_slots
from fcsd.engine.weights import load_tensor_parallel, random_tensor_parallel
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.archs import ARCHS
from fcsd.models.build import wire
from fcsd.models.schedule import Output, kind_of, reductions
from fcsd.models.wiring import Wiring, hf_parts
from fcsd.parallel.all_reduce import reduce
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.weights.random_init import random_model
from fcsd.parallel.weights.tensor_map import state

ALL = (0, 1, 2, 3)
STANDARD, FARSKIP, LADDER = Wiring("standard", ()), Wiring("farskip", (1, 2, 3)), Wiring("ladder", (1, 2, 3))
EVERY = [
    STANDARD,
    Wiring("farskip", ALL),
    Wiring("ladder", ALL),
    Wiring("parallel", ALL),
    *(Wiring(name, ALL, variant=v) for name in ("farskip", "ladder") for v in ("attn-only", "mlp-only")),
    Wiring("farskip", (1, 3)),
    Wiring("farskip", (1, 2, 3), border="partial"),
    Wiring("ladder", (2, 3)),
    Wiring("ladder", (1, 2), border="full"),
    Wiring("farskip", ALL, distance=2),
    Wiring("ladder", ALL, distance=3),
]
DESYNC = [
    Wiring("desync-2x", ALL, tp_degree=2),
    Wiring("desync-4x", (1, 2, 3), tp_degree=2),
    Wiring("desync", ALL, tp_degree=2, reduce="a"),
]
# A dense model, shared experts with a gate, norms on arrival, and dense layers between MoE layers; Desync needs dense
# layers. Every other architecture has the wirings of ``COMMON``.
WIRINGS = {
    "llama": EVERY,
    "qwen2_moe": EVERY,
    "olmo2": EVERY,
    "qwen3_moe": [STANDARD, Wiring("farskip", ALL), Wiring("ladder", ALL)],
    "qwen3": [FARSKIP, *DESYNC],
}
COMMON = [STANDARD, FARSKIP, LADDER]
EXPECTED = "expected.pt"
SHARED = [arch for arch in tiny.CONFIGS if ARCHS[arch].no_tp is None] + [*tiny.INSIDE]


def write(folder: Path, arch: str, **changes: Any) -> Any:
    """A tiny checkpoint whose biases, sinks and norms are not the defaults; returns its model."""
    model: Any = tiny.llama4_vision() if arch == "llama4" else tiny.model(arch, initializer_range=0.1, **changes)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith((".bias", "_bias", "sinks", "norm.weight", "layer_scalar")):
            tensor.data += torch.randn(tensor.shape, generator=generator) * 0.1
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the checkpoint of an architecture, in whose folder are the reference's logits under each wiring."""
    root = tmp_path_factory.mktemp("models")
    own = {
        "llama": {"attention_bias": True, "mlp_bias": True},
        "gpt_oss": {"attention_bias": True},
        "ernie4_5_moe": {"use_bias": True},
        "laguna": {"num_attention_heads_per_layer": [4, 8, 4, 8]},
    }

    @cache
    def written(arch: str) -> Path:
        odd = {} if arch == "llama4" else {"vocab_size": 255}  # which no number of ranks divides
        reference = write(root / arch, arch, **odd, **own.get(arch, {}))
        ids = tiny.tokens(batch=2, length=20).clamp(max=254)
        with torch.no_grad():
            wirings = {*WIRINGS.get(arch, []), *COMMON}
            expected = {str(one): wire(reference, one)(ids, use_cache=False).logits for one in wirings}
        torch.save((ids, expected), root / arch / EXPECTED)
        return root / arch

    return written


def _compare(cases: list[tuple[str, Path, list[Wiring]]], degree: int) -> dict[str, Any]:
    """Logits of every case against the reference, and of overlapped against blocking reductions."""
    from fcsd.launch.world import join_world

    world = join_world()
    ranks, alone = TensorGroup(dist.group.WORLD, degree, world.rank), TensorGroup(dist.new_group([0]), 1, 0)
    found: dict[str, Any] = {}
    with torch.no_grad():
        for arch, path, wirings in cases:
            ids, expected = torch.load(path / EXPECTED)
            model: Any = load_tensor_parallel(path, dtype=torch.float32, device="cpu", ranks=ranks)

            def logits(wiring: Wiring, backend: str = "nccl", ids: Tensor = ids, model: Any = model) -> Tensor:
                wire_tensor_parallel(model, wiring, ranks, backend)
                return model(ids, use_cache=False).logits

            for wiring in wirings:
                with late_sums():
                    overlapped = logits(wiring)
                worst = float((overlapped - expected[str(wiring)]).abs().max())
                with sums_at_once():  # the schedule, and so what overlaps, does not depend on the number of ranks
                    same = degree != 2 or torch.equal(overlapped, logits(wiring))
                found[f"{arch}, {wiring}"] = worst, same
            if degree == 2:  # what the sums are for does not depend on the number of ranks
                without = logits(STANDARD, "none") - expected[str(STANDARD)]
                found[f"{arch}, none"] = float(without.abs().max())
            if world.rank == 0 and degree == 2:
                model = load_tensor_parallel(path, dtype=torch.float32, device="cpu", ranks=alone)
                wire_tensor_parallel(model, STANDARD, alone)
                same = torch.equal(model(ids, use_cache=False).logits, expected[str(STANDARD)])
                errors = []
                for wiring in (FARSKIP, LADDER):
                    wire_tensor_parallel(model, wiring, alone)
                    errors.append(float((model(ids, use_cache=False).logits - expected[str(wiring)]).abs().max()))
                found[f"{arch} alone"] = max(errors), same
    return found


def _check(of_ranks: list[dict[str, Any]], count: int) -> None:
    for found in of_ranks:
        assert len([name for name in found if not name.endswith(("none", "alone"))]) == count
        for name, value in found.items():
            if name.endswith("none"):
                assert value > 1e-2, f"{name}: without reductions the results are wrong"
            else:
                worst, same = value
                assert worst < 2e-5 and same, (name, value)


@pytest.mark.parametrize("archs", by_day_and_night("shards", "attention", "moe", "head", "layer", of=SHARED))
def test_two_ranks_give_the_logits_of_the_reference(checkpoint: Callable[[str], Path], archs: list[str]) -> None:
    cases = [(arch, checkpoint(arch), WIRINGS.get(arch, COMMON)) for arch in (*archs, *tiny.LLAMA4)]
    _check(results(2, _compare, cases, 2), sum(len(wirings) for *_, wirings in cases))


@pytest.mark.parametrize("archs", by_day_and_night("shards", "moe", of=SHARED))
def test_four_ranks_repeat_key_value_heads(checkpoint: Callable[[str], Path], archs: list[str]) -> None:
    """What depends on the number of ranks is how weights are divided; two ranks run the schedules of all wirings."""
    cases = [(arch, checkpoint(arch), [FARSKIP]) for arch in (*archs, *tiny.LLAMA4)]
    cases += [("llama", checkpoint("llama"), [LADDER])]
    _check(results(4, _compare, cases, 4), sum(len(wirings) for *_, wirings in cases))


def test_a_rank_reads_its_own_part_of_the_files(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parts of all ranks are the whole model, and what is divided by rows is not read elsewhere."""
    read: list[tuple[str, int]] = []
    raw = Reader.raw

    def counted(self: Reader, name: str, *place: Any) -> Tensor:
        value = raw(self, name, *place)
        read.append((name, value.numel()))
        return value

    monkeypatch.setattr(Reader, "raw", counted)
    whole = load_file(checkpoint("qwen2_moe") / SINGLE)
    parts = []
    for rank in range(2):
        read.clear()
        ranks = TensorGroup(None, 2, rank)
        model = load_tensor_parallel(checkpoint("qwen2_moe"), dtype=torch.float32, device="cpu", ranks=ranks)
        parts.append(dict(state(model)))
        for name, size in read:
            halved = name.endswith(("q_proj.weight", "up_proj.weight", "embed_tokens.weight", "k_proj.bias"))
            full = whole[name].numel() * 4
            assert size <= (128 * 64 * 4 if "embed" in name else full // 2) if halved else size <= full, name
    prefix = "model.layers.0."
    for name, dim in (
        ("self_attn.q_proj.weight", 0),
        ("self_attn.o_proj.weight", 1),
        ("mlp.shared_expert.up_proj.weight", 0),
    ):
        assert torch.equal(torch.cat([part[prefix + name] for part in parts], dim), whole[prefix + name])
    for expert in range(8):
        for block, name in enumerate(("gate_proj", "up_proj")):
            slices = [part[f"{prefix}mlp.experts.gate_up_proj"][expert].chunk(2)[block] for part in parts]
            assert torch.equal(torch.cat(slices), whole[f"{prefix}mlp.experts.{expert}.{name}.weight"])
    rows = torch.cat([part["model.embed_tokens.weight"] for part in parts])
    assert torch.equal(rows[:255], whole["model.embed_tokens.weight"]) and not rows[255:].any()


def test_tied_weights_stay_one_tensor_and_random_ones_do_not_depend_on_the_ranks(tmp_path: Path) -> None:
    write(tmp_path, "qwen3", tie_word_embeddings=True)
    model: Any = load_tensor_parallel(tmp_path, dtype=torch.float32, device="cpu", ranks=TensorGroup(None, 2, 1))
    assert model.lm_head.weight is model.model.embed_tokens.weight and len(model.lm_head.weight) == 128
    config = tiny.config("qwen3_moe")
    whole = dict(state(random_model(config, dtype=torch.float32, device="cpu", seed=3)))
    how: Any = {"dtype": torch.float32, "device": "cpu", "seed": 3}
    ranks = [TensorGroup(None, 2, rank) for rank in range(2)]
    parts = [dict(state(random_tensor_parallel(tiny.config("qwen3_moe"), ranks=rank, **how))) for rank in ranks]
    for name, dim in (("self_attn.v_proj.weight", 0), ("mlp.experts.down_proj", 2)):
        name = f"model.layers.1.{name}"
        assert torch.equal(torch.cat([part[name] for part in parts], dim), whole[name])


def test_files_that_do_not_match_are_refused_by_name(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def refused(path: Path, degree: int = 2) -> str:
        with pytest.raises((BadInputError, ConfigError)) as caught:
            load_tensor_parallel(path, dtype=torch.float32, device="cpu", ranks=TensorGroup(None, degree, 0))
        return str(caught.value)

    tensors = load_file(checkpoint("llama") / SINGLE)
    config = (checkpoint("llama") / "config.json").read_text()
    name = "model.layers.2.mlp.up_proj.weight"
    for change, message in (
        ({name: None}, "1 missing"),
        ({"model.layers.2.mlp.new.weight": torch.ones(1)}, "1 unexpected"),
        ({name: torch.ones(128, 63)}, "1 wrong"),
    ):
        folder = tmp_path / message
        folder.mkdir()
        (folder / "config.json").write_text(config)
        kept = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(kept, folder / SINGLE, {"format": "pt"})
        assert message in refused(folder)
    assert "3 ranks cannot share 4 attention heads and 2 key-value heads" in refused(checkpoint("llama"), 3)
    moe = checkpoint("qwen3_moe")
    assert "8 ranks cannot share 4 attention heads" in refused(moe, 8)
    write(tmp_path / "odd", "llama", intermediate_size=126)
    assert "4 ranks cannot share 126 columns of a weight evenly" in refused(tmp_path / "odd", 4)
    fp8 = quantised.write("deepseek_v3", tmp_path / "fp8")
    assert "is quantised (fp8), and tensor parallelism cannot load that" in refused(fp8)


@pytest.mark.parametrize(
    ("arch", "wiring"),
    [
        ("llama", Wiring("ladder", ALL)),
        ("deepseek_v2", Wiring("farskip", (1, 2, 3))),
        ("qwen2_moe", Wiring("farskip", ALL, variant="attn-only")),
        ("qwen2_moe", Wiring("standard", ())),
    ],
)
def test_reductions_start_and_end_where_the_schedule_says(
    arch: str, wiring: Wiring, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the start and the wait of each reduction run exactly the parts that the schedule lists as its cover."""
    events: list[Any] = []

    class Recorded:
        def __init__(self, x: Tensor, number: int) -> None:
            self.x, self.number = x, number
            events.append(("start", number))

        def wait(self) -> Tensor:
            events.append(("wait", self.number))
            return self.x

    numbers = iter(range(100))
    monkeypatch.setattr(reduce, "reduce", lambda x, *_: Recorded(x, next(numbers)))
    model = tiny.model(arch)
    wire_tensor_parallel(model, wiring, TensorGroup(None, 1, 0))
    layers: Any = model.model.layers
    kinds = [kind_of(hf_parts(ARCHS[arch].blocks, layer)) for layer in layers]
    for index, layer in enumerate(layers):
        mlp = layer.mlp
        shared = mlp if kinds[index] == "dense" else getattr(mlp, ARCHS[arch].blocks.shared)
        modules = {"attn": layer.self_attn, "shared": shared, "routed": getattr(mlp, "experts", None)}
        for part, module in modules.items():
            if module is not None:
                output = Output(index, part)  # type: ignore[arg-type]
                module.register_forward_hook(lambda *_, output=output: events.append(output))
    with torch.no_grad():
        model(tiny.tokens(), use_cache=False)
    expected = [reduction for layer in reductions(wiring, kinds) for reduction in layer]
    assert len(expected) > len(layers)
    for number, reduction in enumerate(expected):
        start, wait = events.index(("start", number)), events.index(("wait", number))
        assert events[start - 1] == reduction.starts_after
        assert tuple(event for event in events[start:wait] if isinstance(event, Output)) == reduction.covered_by


def test_what_does_not_fit_the_ranks_is_refused() -> None:
    model = tiny.model("llama")
    with pytest.raises(ConfigError, match="desync-2x model of degree 2 cannot run on 4 tensor-parallel ranks"):
        wire_tensor_parallel(model, Wiring("desync-2x", ALL, tp_degree=2), TensorGroup(None, 4, 0))
    with pytest.raises(ConfigError, match="layer 4 does not exist"):
        wire_tensor_parallel(model, Wiring("ladder", (4,)), TensorGroup(None, 1, 0))


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if ARCHS[arch].no_tp is not None])
def test_what_ranks_cannot_share_runs_on_one_and_is_refused_on_two(arch: str, tmp_path: Path) -> None:
    reference, ids = write(tmp_path, arch), tiny.tokens()
    alone = TensorGroup(None, 1, 0)
    model: Any = load_tensor_parallel(tmp_path, dtype=torch.float32, device="cpu", ranks=alone)
    with torch.no_grad():
        for wiring in COMMON:
            expected = wire(reference, wiring)(ids, use_cache=False).logits
            wire_tensor_parallel(model, wiring, alone, "none")
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=0, atol=2e-5)
        steps = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        expected = reference.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert torch.equal(steps, expected)
    if (reason := why_no_slots(model, 32)) is None:
        assert answers_in_slots(model, ids) == expected[:, ids.shape[1] :].tolist()
    else:
        assert "keeps a" in reason
    with pytest.raises(ConfigError, match=f"2 ranks cannot share a model of {arch}: {ARCHS[arch].no_tp}"):
        load_tensor_parallel(tmp_path, dtype=torch.float32, device="cpu", ranks=TensorGroup(None, 2, 0))


def test_layers_that_differ_in_their_heads_decode_in_slots() -> None:
    model = tiny.model("gemma4_text", initializer_range=0.1, hidden_size_per_layer_input=0, num_kv_shared_layers=0)
    wire(model, FARSKIP)
    ids = tiny.tokens()
    assert why_no_slots(model, 32) is None
    expected = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert answers_in_slots(model, ids) == expected[:, ids.shape[1] :].tolist()


def answers_in_slots(model: Any, ids: Tensor) -> list[list[int]]:
    """Four tokens after each of two prompts."""
    options: dict[str, Any] = {"count": 2, "length": 32, "max_new_tokens": 4, "graphs": False}
    answers = dict(generate_in_slots(model, ids.tolist(), [[0, 1]], ended=lambda *_: None, **options))
    return [answers[0], answers[1]]
