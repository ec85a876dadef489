"""``benchmarks/programs.py``: programs of a folder are listed and started, and each of the lab's says what it takes."""

from pathlib import Path

import pytest
from benchmarks.programs import start

pytestmark = pytest.mark.lab


@pytest.mark.parametrize(("package", "least"), [("benchmarks.vllm", 10), ("studies.real", 14)])
def test_every_program_is_listed_and_has_help_on_a_machine_without_vllm(
    package: str, least: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="NAME") as listed:
        start(package)
    names = [line.split()[0] for line in str(listed.value).splitlines()[1:]]
    assert len(names) >= least
    for name in names:
        if name != "load":  # whose words are those of `fcsd bench serve`
            with pytest.raises(SystemExit) as ended:
                start(package, name, "--help")
            assert ended.value.code == 0 and f"python -m {package} {name}" in capsys.readouterr().out


def test_bad_words_end_in_a_line_that_names_the_fix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"unknown wiring 'lader'. Did you mean 'ladder'"):
        start("studies.real", "cells", "lader")
    with pytest.raises(SystemExit):
        start("studies.real", "heal", "teacher", str(tmp_path), "--cases", "none", "--text", "own")
    assert "own is not NAME=DIR" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="real NAME"):
        start("studies.real", "none")
