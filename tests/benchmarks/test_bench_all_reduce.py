"""What the benchmark of all-reduces refuses before the ranks meet."""

import pytest
from benchmarks.comm import all_reduce


def test_more_blocks_than_the_memory_has_places_for_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["all_reduce", "--blocks", "32", "128"])
    with pytest.raises(SystemExit) as error:
        all_reduce.main()
    assert error.value.code == 2 and "a kernel has 1 to 64 blocks, not 128" in capsys.readouterr().err
