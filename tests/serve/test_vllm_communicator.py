"""The communicator that vLLM gets where sums through the host are asked for."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.parallel.all_reduce.host_table import HostTables, of_times
from fcsd.serve.vllm import communicator

TIMES = {
    1024: {"stock": 9.0, "one_shot": 1.0},
    4096: {"stock": 1.0, "in_blocks": 9.0},
    16384: {"stock": 9.0, "exchange": 8.0, "exchange:int8": 1.0},
}

GATHERS = {64: {"stock": 1.0, "exchange": 9.0}, 1024: {"stock": 9.0, "exchange": 1.0}}


class Stock:
    """What a communicator of vLLM has of the things that are used."""

    def __init__(self, unique_name: str) -> None:
        self.unique_name, self.world_size, self.cpu_group = unique_name, 2, None

    def all_reduce(self, input_: Tensor) -> Any:
        return "stock"

    def all_gather(self, input_: Tensor, dim: int = -1) -> Any:
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

    def gathered(self, x: Tensor) -> Tensor:
        return torch.stack((x, 2 * x))


def opened(format: Format | None = None) -> Any:
    made = communicator.communicator_of(Stock)("pp:0")
    made._sums, made._tables, made._format = Sums(), HostTables(of_times(TIMES), of_times(GATHERS)), format
    return made


def test_each_size_goes_its_fastest_way_and_leaves_its_input() -> None:
    made, int8 = opened(Format.parse("int8")), Format.parse("int8")
    small, middle, large, odd = (torch.ones(n, width) for n, width in ((1, 256), (4, 256), (16, 256), (64, 60)))
    assert torch.equal(made.all_reduce(small), 2 * small) and torch.equal(small, torch.ones(1, 256))
    assert made.all_reduce(middle) == "stock"
    made.all_reduce(large)
    made.all_reduce(odd)  # its rows are not divided by the groups of the format
    assert made._sums.asked == [("one_shot", None), (None, int8), (None, None)]
    assert made.all_reduce(large.t()) == "stock"


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_logits_are_gathered_as_vllm_lays_them_out(dim: int) -> None:
    made, x = opened(), torch.randn(8, 16)
    assert torch.equal(made.all_gather(x, dim), torch.cat((x, 2 * x), dim))
    assert made.all_gather(x[:1], dim) == "stock" and made.all_gather(x.t(), dim) == "stock"


def test_other_groups_keep_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(communicator.ASKED, "host")
    made = communicator.communicator_of(Stock)("ep:0")
    assert made.all_reduce(torch.ones(4)) == "stock"


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
