"""An environment in which nothing can be hidden is warned about."""

import warnings

import pytest

from fcsd.parallel.process_settings import DEFAULTS, OverlapWarning, set_defaults, warn

GOOD = {"PATH": "/bin", **DEFAULTS}


@pytest.mark.parametrize(
    "name, value",
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("CUDA_LAUNCH_BLOCKING", "1"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1"),
        ("TORCH_NCCL_HIGH_PRIORITY", "0"),
    ],
)
def test_a_wrong_environment_is_warned_about(name, value):
    with pytest.warns(OverlapWarning, match=name) as caught:
        warn(GOOD | {name: value})
    assert len(caught) == 1


def test_what_we_choose_is_right_and_what_the_user_chose_stays():
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    set_defaults(environment)
    assert environment == {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "TORCH_NCCL_HIGH_PRIORITY": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(environment)
