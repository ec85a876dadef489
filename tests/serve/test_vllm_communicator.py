"""The communicator that vLLM gets where sums through the host are asked for."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cpu_device
import pytest
import torch
from ranks import in_group
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce.host_table import HostTables, exact, of_times
from fcsd.serve.vllm import communicator

TIMES = {
    1024: {"stock": 9.0, "one_shot": 1.0},
    4096: {"stock": 1.0, "in_blocks": 9.0},
    16384: {"stock": 9.0, "exchange": 8.0, "exchange:int8": 1.0},
}

IN_GRAPHS = {1024: {"stock": 9.0, "in_blocks": 1.0}}
GATHERS = {64: {"stock": 1.0, "exchange": 9.0}, 512: {"stock": 9.0, "exchange": 1.0}}
EVERY_WAY = {
    256: {"stock": 9.0, "one_shot": 1.0, "in_blocks": 2.0, "exchange": 3.0},
    4096: {"stock": 9.0, "one_shot": 2.0, "in_blocks": 1.0, "exchange": 3.0},
    1 << 20: {"stock": 9.0, "in_blocks": 8.0, "exchange": 1.0},
}


class Stock:
    """What a communicator of vLLM has of the things that are used."""

    def __init__(self, unique_name: str, world_size: int = 2) -> None:
        self.unique_name, self.world_size, self.cpu_group = unique_name, world_size, None

    def all_reduce(self, input_: Tensor) -> Any:
        return "stock"

    def all_gather(self, input_: Tensor, dim: int = -1) -> Any:
        return "stock"

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        return "stock"

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Any:
        return "stock"

    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Any:
        return "stock"


class Sums:
    """Notes what is asked of ``HostSums``."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def supports(self, x: Tensor) -> bool:
        return x.is_contiguous()

    def all_reduce(self, x: Tensor, out: Tensor, method: str | None = None, format: Format | None = None) -> None:
        self.asked.append((method, format))
        out.copy_(2 * x)

    def gathered(self, x: Tensor, method: str) -> Tensor:
        return torch.stack((x, 2 * x))


def opened(format: Format | None = None) -> Any:
    made = communicator.communicator_of(Stock)("pp:0")
    tables = HostTables(*map(of_times, (IN_GRAPHS, TIMES, GATHERS, GATHERS)))
    made._sums, made._tables, made._exact, made._format = Sums(), tables, exact(tables), format
    return made


def exchanges(rank: int, built: dict[int, Path], world: int) -> list[str]:
    """What a rank finds wrong where tokens go to experts and sums come back, in every way, evenly and not."""
    made = communicator.communicator_of(Stock)("pp:0", world)
    made._sums, made._tables = cpu_device.sums(built), HostTables(*[of_times(EVERY_WAY)] * 4)
    wrong = []
    for call, sizes in enumerate(([2] * world, [1, 3, 2][:world], [40, 7, 64][:world], [3000, 100, 2000][:world])):
        draw = torch.Generator().manual_seed(call)
        tokens = [torch.randn(size, 24, generator=draw).bfloat16() for size in sizes]
        chosen = [torch.randint(9, (size, 3), generator=draw) for size in sizes]
        weights = [torch.randn(size, 2, generator=draw) for size in sizes]
        given = [each[rank] for each in (tokens, chosen, weights)]
        right = [torch.cat(each) for each in (tokens, chosen, weights)]
        if not all(map(torch.equal, made.all_gatherv(given, 0, sizes), right)):
            wrong.append(f"gathered {sizes}")
        if not torch.equal(made.all_gatherv(tokens[rank], 0, sizes), right[0]):
            wrong.append(f"gathered one tensor {sizes}")
        parts = [torch.randn(sum(sizes), 24, generator=draw).bfloat16() for _ in range(world)]
        total = torch.zeros(sum(sizes), 24)
        for part in parts:
            total += part.float()
        if not torch.equal(made.reduce_scatterv(parts[rank], 0, sizes), total.bfloat16().split(sizes)[rank]):
            wrong.append(f"scattered {sizes}")
        even = [len(total) // world] * world
        part, own = parts[rank][: sum(even)], total[: sum(even)].bfloat16().split(even)[rank]
        if not torch.equal(made.reduce_scatter(part, 0), own):
            wrong.append(f"scattered evenly {even}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_experts_get_their_tokens_and_every_rank_the_literal_sums_of_its_own(world: int) -> None:
    assert in_group(world, exchanges, cpu_device.libraries(world), world) == [[]] * world


def test_what_is_not_in_lines_or_of_another_dimension_stays_with_vllm() -> None:
    made, x = opened(), torch.randn(64, 16)
    assert made.reduce_scatter(x, 1) == made.reduce_scatterv(x[:, :3], 0, [32, 32]) == "stock"
    assert made.reduce_scatterv(x.long(), 0, [32, 32]) == made.reduce_scatter(x[:63], 0) == "stock"
    assert made.all_gatherv(x[:7, :3], 0, [7, 3]) == made.all_gatherv(x, 0, [64, 0]) == "stock"


@pytest.mark.parametrize(
    ("name", "replicas", "experts", "backend"),
    [("dp:0", 2, True, "allgather_reducescatter"), ("dp:0", 2, False, "allgather_reducescatter"),
     ("ep:0", 1, True, "allgather_reducescatter"), ("ep:0", 2, True, "deepep_low_latency"),
     ("tp:0", 1, False, ""), ("pp:0", 2, True, "allgather_reducescatter")],
)  # fmt: skip
def test_groups_have_sums_where_vllm_sums_or_exchanges_tokens(
    monkeypatch: pytest.MonkeyPatch, name: str, replicas: int, experts: bool, backend: str
) -> None:
    parallel = SimpleNamespace(data_parallel_size=replicas, all2all_backend=backend)
    config = SimpleNamespace(model_config=SimpleNamespace(is_moe=experts), parallel_config=parallel)
    given = SimpleNamespace(get_current_vllm_config_or_none=lambda: config)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(config=given))
    monkeypatch.setitem(sys.modules, "vllm.config", given)
    monkeypatch.setenv(communicator.ASKED, "host")
    cls, asked = communicator.communicator_of(Stock), []
    monkeypatch.setattr(cls, "_open", lambda self, format: asked.append(self.unique_name))
    cls(name)
    wanted = name == "tp:0" or (name == "dp:0" and experts)
    assert asked == ([name] if wanted else [])


def test_each_size_goes_its_fastest_way_and_leaves_its_input(caplog: pytest.LogCaptureFixture) -> None:
    made, int8 = opened(Format.parse("int8")), Format.parse("int8")
    small, middle, large, odd = (torch.ones(n, width) for n, width in ((1, 256), (4, 256), (16, 256), (64, 60)))
    assert torch.equal(made.all_reduce(small), 2 * small) and torch.equal(small, torch.ones(1, 256))
    assert made.all_reduce(middle) == "stock"
    made.all_reduce(large)
    made.all_reduce(odd)
    made.all_reduce(odd)
    assert caplog.messages == ["sums stay exact: groups of 128 values do not divide rows of 60"]
    assert made._sums.asked == [("one_shot", None), ("exchange", int8)] + [("exchange", None)] * 2
    # Where a tensor lies does not decide, because another rank's may lie elsewhere.
    beside = torch.ones(257)[1:].view(1, 256)
    assert torch.equal(made.all_reduce(small.t()), 2 * small.t()) and torch.equal(made.all_reduce(beside), 2 * beside)


def test_a_graph_has_a_table_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = opened(), torch.ones(4, 256)
    monkeypatch.setattr(communicator, "_captures", lambda given: given is x)
    assert torch.equal(made.all_reduce(x), 2 * x) and made._sums.asked == [("in_blocks", None)]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_logits_are_gathered_as_vllm_lays_them_out(dim: int) -> None:
    made, x = opened(), torch.randn(8, 16)
    assert torch.equal(made.all_gather(x, dim), torch.cat((x, 2 * x), dim))
    assert made.all_gather(x[:1], dim) == "stock"
    assert torch.equal(made.all_gather(x.t(), dim), torch.cat((x.t(), 2 * x.t()), dim))


def test_other_groups_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(communicator.ASKED, "host")
    made, x = communicator.communicator_of(Stock)("pp:0"), torch.ones(4, 4)
    assert made.all_reduce(x) == made.all_gather(x) == made.all_gatherv([x], 0, [4, 4]) == "stock"
    assert made.reduce_scatter(x, 0) == made.reduce_scatterv(x, 0, [2, 2]) == "stock"


def test_the_platform_names_the_communicator_only_if_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Platform:
        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "stock"

        def is_cuda(self) -> bool:
            return True

    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = Platform()  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(platforms=platforms))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.delenv(communicator.ASKED, raising=False)
    communicator.use_host_sums()
    assert Platform.get_device_communicator_cls() == "stock"
    monkeypatch.setenv(communicator.ASKED, "host:int8")
    communicator.use_host_sums()
    assert Platform.get_device_communicator_cls() == "fcsd.serve.vllm.communicator.HostCommunicator"


@pytest.mark.parametrize("asked", ["nccl", "host:int99", "auto"])
def test_another_word_is_refused(asked: str) -> None:
    with pytest.raises(ConfigError):
        communicator.format_of(asked)


def test_the_module_is_light() -> None:
    code = "import sys, fcsd.serve.vllm.communicator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
