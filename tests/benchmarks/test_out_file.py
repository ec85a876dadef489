"""A benchmark that cannot write its figures says so before it measures."""

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.lab

PROGRAMS = [
    "benchmarks.comm.all_reduce",
    "benchmarks.comm.transports",
    "benchmarks.kernels.decode",
    "benchmarks.kernels.formats",
    "benchmarks.kernels.kl",
]


@pytest.mark.parametrize("module", PROGRAMS)
def test_a_file_that_cannot_be_written_is_refused_at_once(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = importlib.import_module(module).main
    for path, message in (
        (tmp_path / "missing" / "out.json", "does not exist; create it first"),
        (tmp_path, "is a directory; name a file in it"),
    ):
        monkeypatch.setattr(sys, "argv", [module, "--out", str(path)])
        with pytest.raises(SystemExit) as refused:
            main()
        said = capsys.readouterr().err
        assert refused.value.code == 2 and message in said and str(path) in said
    assert not any(tmp_path.iterdir())
