"""Numbers in options have the digits 0 to 9: other digits of Unicode end up in files that other programs read."""

from collections.abc import Callable

import pytest

from fcsd.cli.options import gpu_memory, numbers
from fcsd.errors import ConfigError
from fcsd.load_options import check_device
from fcsd.models.selection import is_auto, select_layers
from fcsd.models.wiring_block import Wiring

TWO = "\N{FULLWIDTH DIGIT TWO}"
READERS: dict[str, Callable[[str], object]] = {
    "last:{}": lambda text: select_layers(text, 27),
    "{}-3": lambda text: select_layers(text, 27),
    "5{}%": lambda text: select_layers(text, 27),
    "8{} GB": gpu_memory,
    "1,{}": numbers,
    "cuda:{}": check_device,
    "1{}x": lambda text: Wiring("desync", (0, 1), tp_degree=2, reduce=text),
}


@pytest.mark.parametrize("form", READERS)
def test_other_digits_than_those_of_ascii_are_refused(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    READERS[form](form.format(2))
    with pytest.raises((ConfigError, ValueError)):
        READERS[form](form.format(TWO))


def test_a_number_of_layers_to_choose_has_digits_of_ascii() -> None:
    assert is_auto("auto:2") and not is_auto(f"auto:{TWO}")


@pytest.mark.parametrize("text", ["0", "0.5", "0.9 GiB", "-80", "80 TB", ""])
def test_a_gpu_has_at_least_one_gib(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number of GiB, at least 1"):
        gpu_memory(text)
    assert gpu_memory("80GB") == gpu_memory("80") == 80 and gpu_memory("1") == 1
