"""``python -m benchmarks.infer``: what is refused, and the table of its rows."""

import pytest
from benchmarks.infer import workload as timing
from benchmarks.infer.__main__ import app
from benchmarks.infer.table import table
from benchmarks.infer.workload import Workload
from typer.testing import CliRunner

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--reduce", "vllm"], "unknown all-reduce backend 'vllm'"),
        (["--wirings", "standard,sideways"], "unknown wiring 'sideways'"),
        (["--bounds", "parallel"], "unknown wiring for a bound 'parallel'"),
        (["--tp", "one"], "not a list of numbers"),
    ],
)
def test_what_does_not_apply_is_refused_in_one_line(options, said):
    found = CliRunner().invoke(app, ["tiny", *options])
    assert found.exit_code == 2
    assert said in found.stderr.splitlines()[0] and found.stderr.startswith("error: ")


def test_the_table_names_the_bits_of_quantised_kinds() -> None:
    load = Workload("tiny-dense", reduce=("nccl", "quantised:int2:sr"))
    times = {"prefill": [2.0], "decode": [1.0]}
    rows = [timing.row(load, 2, 1, "standard", kind, times) for kind in load.reduce]
    for one in rows:
        timing.compare(one, rows)
    assert table(rows).splitlines()[-1] == "on the wire: int2:sr 4 bits per value"
    assert "on the wire" not in table(rows[:1])


def test_a_model_that_does_not_exist_is_refused():
    found = CliRunner().invoke(app, ["nothing"])
    assert found.exit_code == 2 and "neither a shape nor a checkpoint" in found.stderr
