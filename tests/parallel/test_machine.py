"""A machine file is read as it is written, by ``fcsd bench links`` or by hand, and refused in one line."""

import json
from pathlib import Path

import pytest

from fcsd.errors import ConfigError
from fcsd.parallel.machine import read_machine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not a machine file: it is not JSON"),
        ("[]", "is not a machine file: Input should be an object"),
        ('{"gpus_per_node": 4}', "'near' is missing"),
        ('{"gpu_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1}}', "did you mean 'gpus_per_node'?"),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gbps": 1}}', "'near.gbps'; did you mean 'near.gb_per_s'?"),
        (
            '{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": "1 GB"}}',
            "near.gb_per_s: should be a valid number",
        ),
        ('{"gpus_per_node": 0, "near": {"latency_us": 1, "gb_per_s": 1}}', "gpus_per_node: should be greater than 0"),
        ('{"gpus_per_node": 1, "near": {"latency_us": 1, "gb_per_s": 1}}', "file: a machine of one GPU has no link"),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 0}}', "near.gb_per_s: should be greater than 0"),
        (
            '{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1}, "fra": {}}',
            "unknown key 'fra'; did you mean 'far'?",
        ),
        # These would make a sum take no finite time.
        ('{"gpus_per_node": 4, "near": {"latency_us": 1, "gb_per_s": 1e-320}}', "near.gb_per_s: should be greater"),
        ('{"gpus_per_node": 4, "near": {"latency_us": 1e308, "gb_per_s": 1}}', "near.latency_us: should be less"),
    ],
)
def test_a_damaged_machine_file_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"machine\.json") as caught:
        read_machine(path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_machine_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.json: no such file"):
        read_machine(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_machine(tmp_path)


def test_a_machine_file_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"gpus_per_node": 8, "near": {"latency_us": 80, "gb_per_s": 360}}))
    machine = read_machine(path)
    assert machine.near.line.seconds(360e6) == pytest.approx(80e-6 + 1e-3) and machine.far is None
    former = {
        "hidden_cost": 0.3,
        "copy_tb_per_s": 4.26,
        "codec": 0.54,
        "peak_tflops": 312,
        "fixed_us": {},
        "direct": {},
    }
    path.write_text(json.dumps({"gpus_per_node": 8, "near": {"latency_us": 80, "gb_per_s": 360}, **former}))
    assert read_machine(path) == machine, "what earlier files have beside is not read"
