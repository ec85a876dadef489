import pytest

from fcsd.errors import ConfigError
from fcsd.models.selection import select_layers


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("all", range(27)),
        ("none", ()),
        ("last:24", range(3, 27)),
        ("first:8", range(8)),
        ("50%", range(13, 27)),  # 13.5 layers: the nearest, half rounded up
        ("75%", range(7, 27)),
        ("100%", range(27)),
        ("0%", ()),
        ("12-26", range(12, 27)),
        ("5", (5,)),
        ("0, 4-6,11", (0, 4, 5, 6, 11)),
        ("3,3,1-3", (1, 2, 3)),
        ("last:0", ()),
    ],
)
def test_forms(spec, chosen):
    assert select_layers(spec, 27) == tuple(chosen)


@pytest.mark.parametrize(
    "spec", ["", "some", "-1", "27", "3-27", "5-2", "last:28", "101%", "last:", "1;2", "1.5", "0x3"]
)
def test_what_is_refused(spec):
    with pytest.raises(ConfigError):
        select_layers(spec, 27)
