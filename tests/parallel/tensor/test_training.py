"""Tensor-parallel training: overlapped is blocking to the last bit, and both are one process up to rounding."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cpu_device
import pytest
import tiny
import torch
import torch.distributed as dist
from late import late_sums
from ranks import in_group
from representatives import by_day_and_night
from rewired import backward
from torch import Tensor

from fcsd.config import Parallel
from fcsd.distill.experts import expert_parallel
from fcsd.engine.weights import load_tensor_parallel
from fcsd.errors import ConfigError
from fcsd.kernels.packed_attention import attend, document_borders
from fcsd.models.archs import ARCHS
from fcsd.models.build import wire
from fcsd.models.schedule import Output, Read, reads_of
from fcsd.models.wiring import Wiring
from fcsd.parallel.all_reduce import host
from fcsd.parallel.tensor.layer import RowGroups, SummedStream, wire_training
from fcsd.parallel.tensor.shard import SHARDED, check_trainable, prepare
from fcsd.parallel.tensor.tp_plan import TensorGroup, own_part

ALL = (0, 1, 2, 3)
STANDARD, LADDER = Wiring("standard", ()), Wiring("ladder", ALL)
EVERY = [
    STANDARD,
    LADDER,
    Wiring("farskip", ALL),
    Wiring("parallel", ALL),
    *(Wiring(name, ALL, variant=variant) for name in ("farskip", "ladder") for variant in ("attn-only", "mlp-only")),
    Wiring("ladder", (2, 3)),
    Wiring("farskip", (1, 2, 3), border="partial"),
    Wiring("ladder", ALL, distance=2),
    Wiring("farskip", ALL, distance=3),
    Wiring("desync-2x", ALL, tp_degree=2),
    Wiring("desync-4x", (1, 2, 3), tp_degree=2),
    Wiring("desync", (0, 1, 3), tp_degree=2, reduce="-,am"),
]
DENSE = [arch for arch in tiny.CONFIGS if ARCHS[arch].dense and ARCHS[arch].no_tp is None]
# Biases inside and after the products, norms of each head, norms on arrival, and norms over all heads.
BIASES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
}
CLOSE = 2e-5  # of the largest element of a tensor, in fp32


def model_of(folder: Path, arch: str) -> Any:
    """A tiny checkpoint with four key-value heads, and its model."""
    heads = {} if ARCHS[arch].blocks.linear else {"num_key_value_heads": 4}
    model: Any = tiny.model(arch, initializer_range=0.1, **heads, **BIASES.get(arch, {}))
    generator = torch.Generator().manual_seed(5)
    for name, tensor in model.named_parameters():
        if name.endswith((".bias", "norm.weight")):
            tensor.data += torch.randn(tensor.shape, generator=generator) * 0.1
    model.save_pretrained(folder)
    return model


def batches() -> list[Tensor]:
    return [tiny.tokens(batch=1 + i, length=8 - 4 * i, seed=i) for i in range(2)]


def passes(model: Any) -> dict[str, Tensor]:
    """Logits of two batches, and the gradient of every parameter that they give together."""
    model.zero_grad()
    found = {}
    for number, ids in enumerate(batches()):
        out = model(ids, labels=ids, use_cache=False)
        backward(out.loss)
        found[f"logits {number}"] = out.logits.detach().clone()
    return found | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> str | None:
    if one.keys() != other.keys():
        return f"{sorted(one.keys() ^ other.keys())}"
    return next((name for name in one if not torch.equal(one[name], other[name])), None)


_all_reduce = dist.all_reduce


def _compare(rank: int, cases: list[tuple[str, str, list[Wiring]]], references: str, degree: int) -> list[str]:
    """Overlapped and eager sums against blocking ones, with recompute and without; and all against one process."""
    ranks, problems = TensorGroup(dist.group.WORLD, degree, rank), []
    for arch, folder, wirings in cases:
        model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks, whole_vocabulary=True)
        shardings = prepare(model.train(), ranks)
        for number, wiring in enumerate(wirings):
            found = {}
            modes = [("off", False), ("on", False)]
            # A recompute depends on the wiring, and on what arrives: of families with one wiring those that norm it.
            if len(wirings) > 1 or ARCHS[arch].blocks.normed:
                modes += [("on", True)]
            if arch == "qwen3" and wiring == LADDER:
                modes += [("eager-sync", False), ("off", True)]
            for mode, recompute in modes:
                if recompute:
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                wire_training(model, wiring, ranks, mode)
                with late_sums() if mode == "on" else nullcontext():
                    found[mode, recompute] = passes(model)
                model.gradient_checkpointing_disable()
                if difference := differing(found["off", False], found[mode, recompute]):
                    problems.append(f"{arch} {wiring} {mode} recompute {recompute}: {difference}")
            reference = torch.load(Path(references, f"{arch}-{number}.pt"))
            for name, mine in found["on", False].items():
                expected = reference[name]
                if name in shardings:
                    expected = own_part(
                        expected, shardings[name], ranks, model.config.get_text_config().num_key_value_heads
                    )
                error = float((mine - expected).abs().max() / reference[name].abs().max().clamp(min=1e-3))
                if not error < CLOSE:
                    problems.append(f"{arch} {wiring} {name}: {error:.1e}")
    return problems


def literal(group: Any, format: Any, otherwise: Any) -> Any:
    """Sums in the order of ranks, in fp32."""

    def start(x: Tensor) -> None:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.detach(), group=group)
        x.detach().copy_(sum(parts[1:], parts[0]))

    return start


def _by_host(rank: int, built: dict[int, Path], folder: str, degree: int) -> list[str]:
    """Through memory of the host, overlapped and blocking, against literal sums: all passes of a run's models."""
    ranks, found = TensorGroup(dist.group.WORLD, degree, rank), {}
    sums, made = cpu_device.sums(built), []

    def at_once(x: Tensor, run: Any) -> None:
        made.append(x.numel())
        run()

    def refuse(x: Tensor) -> None:
        raise AssertionError(f"{x.shape} is not summed through the host")

    by_host = lambda group, format, otherwise: host.in_place(sums, at_once, format, refuse)  # noqa: E731
    for name, starter, overlap in (("literal", literal, "off"), ("host", by_host, "off"), ("flying", by_host, "on")):
        host.starter = starter  # pyright: ignore[reportAttributeAccessIssue]: this process ends with the test
        model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks, whole_vocabulary=True)
        prepare(model.train(), ranks)
        parallel = Parallel(tp_size=degree, all_reduce="host", overlap=overlap, fused=False)
        expert_parallel.wire_sharded(model, 1, parallel, wiring=LADDER, ranks=ranks)
        found[name] = passes(model)
    every = [differing(found["literal"], found[name]) for name in ("host", "flying")]
    forward = 2 * 2 * 2 * len(ALL)  # two ways, two batches, two sub-blocks of each layer
    return [*filter(None, every), *([f"{len(made)} sums"] if len(made) < 1.5 * forward else [])]


def test_sums_through_the_host_are_the_literal_ones_forward_and_backward(tmp_path: Path) -> None:
    model_of(tmp_path / "llama", "llama")
    found = in_group(2, _by_host, cpu_device.libraries(2), str(tmp_path / "llama"), 2)
    assert found == [[]] * 2


def _without_gpus(rank: int, folder: str) -> str:
    ranks = TensorGroup(dist.group.WORLD, 2, rank)
    model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks, whole_vocabulary=True)
    prepare(model, ranks)
    with pytest.raises(ConfigError) as raised:
        expert_parallel.wire_sharded(model, 1, Parallel(tp_size=2, all_reduce="host"), wiring=LADDER, ranks=ranks)
    return str(raised.value)


def test_sums_through_the_host_are_refused_before_the_first_step_without_gpus(tmp_path: Path) -> None:
    model_of(tmp_path / "llama", "llama")
    assert in_group(2, _without_gpus, str(tmp_path / "llama")) == ["sums through the host are for GPUs"] * 2
    with pytest.raises(ValueError, match="all_reduce host needs parallel"):
        Parallel(all_reduce="host")


def write_references(folder: Path, cases: dict[str, list[Wiring]]) -> list[tuple[str, str, list[Wiring]]]:
    """What one process computes, in files; and the cases for ``_compare``."""
    for arch, wirings in cases.items():
        model = model_of(folder / arch, arch).train()
        for number, wiring in enumerate(wirings):
            torch.save(passes(wire(model, wiring)), folder / f"{arch}-{number}.pt")
    return [(arch, str(folder / arch), wirings) for arch, wirings in cases.items()]


def _check(size: int, folder: Path, cases: dict[str, list[Wiring]]) -> None:
    for problems in in_group(size, _compare, write_references(folder, cases), str(folder), size):
        assert problems == []


def test_two_ranks_train_every_wiring(tmp_path: Path) -> None:
    _check(2, tmp_path, {"qwen3": EVERY, "olmo2": [Wiring("parallel", ALL), Wiring("ladder", ALL, distance=2)]})


@pytest.mark.parametrize("archs", by_day_and_night("shards", "layer", "mlp", "attention", of=DENSE))
def test_two_ranks_train_every_dense_family(tmp_path: Path, archs: list[str]) -> None:
    _check(2, tmp_path, {arch: [LADDER] for arch in archs})


def test_four_ranks_train_every_schedule(tmp_path: Path) -> None:
    _check(4, tmp_path, {"qwen3": [LADDER, Wiring("farskip", (1, 3)), Wiring("desync-4x", ALL, tp_degree=4)]})


def _steps(rank: int, folder: str, degree: int) -> list[Any]:
    """The weights after four steps of AdamW, in each mode; and which weights every rank has."""
    ranks, found = TensorGroup(dist.group.WORLD, degree, rank), []
    for mode in ("on", "off"):
        model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks, whole_vocabulary=True)
        prepare(model.train(), ranks)
        wire_training(model, LADDER, ranks, mode)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            ids = tiny.tokens(seed=step)
            backward(model(ids, labels=ids, use_cache=False).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    whole = [name for name, parameter in model.named_parameters() if not getattr(parameter, SHARDED)]
    return [*found, whole]


@pytest.mark.parametrize("size", [2, 4])
def test_steps_are_those_of_blocking_sums_and_what_every_rank_has_stays_alike(size: int, tmp_path: Path) -> None:
    model_of(tmp_path, "qwen3")
    results = in_group(size, _steps, str(tmp_path), size)
    (first, _, whole), *_ = results
    assert {"model.norm.weight", "lm_head.weight", "model.layers.0.self_attn.q_norm.weight"} <= set(whole)
    for overlapped, blocking, _ in results:
        assert differing(overlapped, blocking) is None
        assert all(torch.equal(overlapped[name], first[name]) for name in whole)


def _order(rank: int, folder: str, wiring: Wiring, recompute: bool = False) -> list[Any]:
    """When the parts compute backward, and when the sums of the gradients of their inputs start and are awaited."""
    ranks, events = TensorGroup(dist.group.WORLD, 2, rank), []
    model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks, whole_vocabulary=True)
    prepare(model.train(), ranks)
    wire_training(model, wiring, ranks)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for index, layer in enumerate(model.model.layers):
        for name, module in (
            (Output(index, "attn"), layer.self_attn.o_proj),
            (Output(index, "shared"), layer.mlp.down_proj),
        ):
            module.weight.register_hook(lambda grad, name=name: events.append(("computes", name)))
        for name, module in (
            (Output(index, "attn"), layer.self_attn.q_proj),
            (Output(index, "shared"), layer.mlp.up_proj),
        ):
            module.weight.register_hook(lambda grad, name=name: events.append(("own weights", name)))

    class Seen:
        def __init__(self, work: Any, number: int) -> None:
            self.work, self.number = work, number
            events.append(("starts", number))

        def wait(self) -> None:
            events.append(("awaited", self.number))
            self.work.wait()

    ids = tiny.tokens()
    loss = model(ids, labels=ids, use_cache=False).loss
    count = iter(range(100))
    dist.all_reduce = lambda tensor, *args, group=None, async_op=False: (
        Seen(_all_reduce(tensor, group=group, async_op=True), next(count))
        if async_op
        else _all_reduce(tensor, *args, group=group)
    )
    try:
        backward(loss)
    finally:
        dist.all_reduce = _all_reduce
    return events


@pytest.mark.parametrize("wiring", [STANDARD, LADDER, Wiring("parallel", ALL), Wiring("ladder", ALL, distance=2)])
def test_a_gradient_is_in_flight_as_long_as_no_part_needs_it(wiring: Wiring, tmp_path: Path) -> None:
    """Under a sum run the backward passes of all earlier parts whose outputs are not in the read that it belongs to."""
    model_of(tmp_path, "llama")
    events = in_group(2, _order, str(tmp_path), wiring)[0]
    reads = reads_of(wiring, ["dense"] * 4)
    parts = [Output(layer, part) for layer in reversed(ALL) for part in ("shared", "attn")]
    assert [name for kind, name in events if kind == "computes"] == parts
    for number, part in enumerate(parts[:-1]):
        place = Read(part.layer, "attn" if part.part == "attn" else "mlp")
        starts, awaited = events.index(("starts", number)), events.index(("awaited", number))
        assert ("own weights", part) in events[starts:awaited]
        under = [name for kind, name in events[starts:awaited] if kind == "computes"]
        free = [other for other in parts[number + 1 :] if other not in reads[place]]
        assert under == free[: max(1, *wiring.reads)], (part, under)


@pytest.mark.parametrize(("wiring", "recomputed"), [(STANDARD, 4), (LADDER, 0)])
def test_a_recompute_sends_the_sums_that_its_layer_reads_and_no_others(
    wiring: Wiring, recomputed: int, tmp_path: Path
) -> None:
    model_of(tmp_path, "llama")
    events = in_group(2, _order, str(tmp_path), wiring, True)[0]
    assert sum(kind == "starts" for kind, _ in events) == 2 * len(ALL) + recomputed


def _without_grad(rank: int, folder: str) -> list[str]:
    ranks = TensorGroup(dist.group.WORLD, 2, rank)
    model: Any = load_tensor_parallel(folder, dtype=torch.float32, device="cpu", ranks=ranks, whole_vocabulary=True)
    model.requires_grad_(False)
    logits = []
    for wiring in (LADDER, STANDARD):
        wire_training(model, wiring, ranks)
        with torch.no_grad(), late_sums():
            logits += [model(ids, attention_mask=mask, use_cache=False).logits for ids, mask in frozen_batches()]
    said = []
    for call in (lambda: wire_training(model, Wiring("desync-2x", ALL, tp_degree=4), ranks),
                 lambda: wire_training(model, Wiring("ladder", (4,)), ranks),
                 lambda: model(tiny.tokens(), output_hidden_states=True)):  # fmt: skip
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    return [*said, logits]


def frozen_batches() -> list[tuple[Tensor, Tensor | None]]:
    """Three rows, which two groups cannot divide evenly, with and without padding; and a single row."""
    ids = tiny.tokens(batch=3)
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    return [(ids, None), (ids, padded), (ids[:1], None)]


def test_a_frozen_model_gives_the_logits_of_one_process_and_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = model_of(tmp_path, "qwen3")
    *said, logits = in_group(2, _without_grad, str(tmp_path))[1]
    for wiring in (LADDER, STANDARD):
        wire(model, wiring)
        for ids, mask in frozen_batches():
            reference = model(ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(logits.pop(0), reference, rtol=0, atol=2e-5)
    assert said == [
        "2 tensor-parallel ranks cannot train desync-2x of tp_degree 4",
        "layer 4 does not exist: the model has 4",
        "a tensor-parallel model does not return the outputs of single layers",
    ]


def test_a_group_of_rows_attends_inside_the_documents_of_its_rows() -> None:
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2]])
    whole = {"borders": document_borders(positions), "position_ids": positions, "scale": None}
    groups = RowGroups(tuple(SummedStream(rows, rows.shape) for rows in torch.zeros(3, 4, 1).tensor_split(2)))
    query, key, value = torch.randn(3, 3, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    expected = attend(query, key, value, whole["borders"])
    for group, rows in enumerate((slice(0, 2), slice(2, 3))):
        found = groups.of_rows(group, whole)
        assert torch.equal(found["position_ids"], positions[rows])
        torch.testing.assert_close(attend(query[rows], key[rows], value[rows], found["borders"]), expected[rows])


@pytest.mark.parametrize(
    ("arch", "changes", "degree", "message"),
    [
        ("llama", {}, 3, " does not divide num_attention_heads 4"),
        ("llama", {}, 4, " does not divide num_key_value_heads 2"),
        ("llama", {"intermediate_size": 127}, 2, " does not divide intermediate_size 127"),
        ("qwen3_moe", {}, 2, ": tensor-parallel training does not shard experts"),
    ],
)
def test_degrees_and_models_that_do_not_fit_are_refused_by_their_config(
    arch: str, changes: dict[str, int], degree: int, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainable("M", tiny.config(arch, **changes), degree)
    assert str(caught.value) == f"M: parallel.tp_size {degree}{message}"


@pytest.mark.parametrize("arch", [arch for arch in ARCHS if ARCHS[arch].no_tp is not None])
def test_a_type_that_ranks_cannot_share_is_refused_by_its_reason(arch: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_trainable("M", tiny.config(arch), 2)
    assert str(caught.value) == f"M: parallel.tp_size 2: {arch}: {ARCHS[arch].no_tp}"
