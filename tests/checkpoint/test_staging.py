"""OUT is looked at again at the rename: what appeared there while a command ran is neither replaced nor deleted."""

import errno
import json
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from files import snapshot

from fcsd.checkpoint.staging import check_out, staged
from fcsd.disk import require_folder
from fcsd.distill.run.run_dir import claim
from fcsd.errors import ConfigError, DiskError
from fcsd.foreign_errors import translate


def fcsd_directory(path: Path, content: str) -> Path:
    """A directory that ``--force`` may replace."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"fcsd": {}, "content": content}))
    return path


def changed() -> Any:
    """The block must end in the error that says that OUT is not what it was."""
    return pytest.raises(ConfigError, match="changed while this command ran")


def test_a_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("irreplaceable")
    for out in ("file/out", "file/deeper/out"):
        with pytest.raises(ConfigError, match=f"{out}: .*/file is a file, not a directory"):
            check_out(tmp_path / out, [], force=True)


@pytest.mark.parametrize("write", [lambda out: staged(out).__enter__(), lambda out: claim(out).__enter__()])
def test_a_directory_that_the_system_refuses_is_named(
    write: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(PermissionError) as caught:
        write(tmp_path / "out")
    found = translate(caught.value)
    assert isinstance(found, DiskError) and str(found) == f"the system does not permit it: {tmp_path / 'out'}"


def test_a_directory_without_permission_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DiskError, match="/proc is not writable"):  # although root has the permission
        check_out(Path("/proc/out"), [], force=False)

    def refuse(*, dir: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(dir))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    for check in (
        lambda: check_out(tmp_path / "missing" / "out", [], force=False),
        lambda: check_out(tmp_path / "empty", [], force=False),
        lambda: require_folder(tmp_path / "run", "output_dir"),
    ):
        with pytest.raises(DiskError, match=f": {tmp_path} is not writable"):
            check()


def test_a_file_that_appears_in_out_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with changed(), staged(out, check_out(out, [], force=True)):
        out.mkdir()
        (out / "thesis.txt").write_text("irreplaceable")
    assert snapshot(tmp_path).keys() == {"out/thesis.txt"}


def test_a_file_that_appears_at_out_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with changed(), staged(out, check_out(out, [], force=False)):
        out.write_text("irreplaceable")
    assert out.read_text() == "irreplaceable" and list(tmp_path.iterdir()) == [out]


def test_of_two_commands_with_one_out_the_first_to_end_wins(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with changed(), staged(out, check_out(out, [], force=False)) as first:
        (first / "a").write_text("first")
        with staged(out, check_out(out, [], force=False)) as second:
            (second / "a").write_text("second")
        assert first.exists()  # the second one does not take it for a left-over
    assert (out / "a").read_text() == "second" and list(tmp_path.iterdir()) == [out]


def test_force_replaces_what_was_there_and_nothing_later(tmp_path: Path) -> None:
    out = fcsd_directory(tmp_path / "out", "former")
    with staged(out, check_out(out, [], force=True)) as stage:
        (stage / "config.json").write_text("new")
    assert (out / "config.json").read_text() == "new" and list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("change", ["added", "edited", "replaced"])
def test_force_keeps_what_changed_meanwhile(tmp_path: Path, change: str) -> None:
    out = fcsd_directory(tmp_path / "out", "former")
    expected = {}
    with changed(), staged(out, check_out(out, [], force=True)):
        if change == "added":
            (out / "notes.txt").write_text("irreplaceable")
        elif change == "edited":
            (out / "config.json").write_text(json.dumps({"fcsd": {}, "content": "edited by hand"}))
        else:
            with staged(out, check_out(out, [], force=True)) as other:
                (other / "config.json").write_text("of another command")
        expected = snapshot(out)
    assert snapshot(out) == expected and list(tmp_path.iterdir()) == [out]


def test_an_out_that_was_removed_meanwhile_is_written(tmp_path: Path) -> None:
    out = fcsd_directory(tmp_path / "out", "former")
    with staged(out, check_out(out, [], force=True)) as stage:
        (stage / "config.json").write_text("new")
        (out / "config.json").unlink()
        out.rmdir()
    assert (out / "config.json").read_text() == "new"


def test_what_only_looks_like_a_left_over_stays(tmp_path: Path) -> None:
    for name in (".out.tmp-mine", ".out.tmp-0123abcd", ".outer.tmp-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("irreplaceable")
    os.mkfifo(tmp_path / ".out.tmp-89abcdef")  # to open it would block
    (tmp_path / ".out.tmp-01234567").symlink_to(tmp_path / ".out.tmp-mine")
    before = {path.name for path in tmp_path.iterdir()}
    for name in ("out", "*"):
        with staged(tmp_path / name) as stage:
            (stage / "a").touch()
        assert os.listdir(tmp_path / name) == ["a"]
    assert {path.name for path in tmp_path.iterdir()} == {*before, "out", "*"}


def test_what_a_killed_command_left_goes_whatever_out_is_called(tmp_path: Path) -> None:
    killed = tmp_path / ".[x].tmp-0123abcd"
    killed.mkdir()
    (killed / ".fcsd-unfinished").touch()
    with staged(tmp_path / "[x]"):
        pass
    assert os.listdir(tmp_path) == ["[x]"]


def test_a_directory_that_holds_its_source_or_is_inside_of_it_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "above" / "source"
    source.mkdir(parents=True)
    for out in (source, source / "out", source.parent):
        with pytest.raises(ConfigError, match="overlaps with its source"):
            check_out(out, [source], force=True)


def replaced_until(out: Path, moment: str, count: int) -> None:
    """Replaces ``out``, and is killed after the ``count``-th call of a method of ``Path``."""
    calls, real = [], getattr(Path, moment)

    def then_killed(path: Path, *arguments: Any, **options: Any) -> Any:
        result = real(path, *arguments, **options)
        if ".out.old-" in f"{path} {arguments}" or (moment == "rename" and calls):
            calls.append(path)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
        return result

    with staged(out, check_out(out, [], force=True)) as stage:
        (stage / "config.json").write_text(json.dumps({"fcsd": {}, "content": "new"}))
        setattr(Path, moment, then_killed)


@pytest.mark.parametrize(("moment", "count"), [("rename", 1), ("touch", 1), ("rename", 2)])
def test_what_a_killed_force_moved_out_of_the_way_comes_back_or_goes(tmp_path: Path, moment: str, count: int) -> None:
    out = fcsd_directory(tmp_path / "out", "former")
    (tmp_path / ".out.old-0123abcd").mkdir()  # not ours, whatever its name
    assert ranks.exit_code(replaced_until, out, moment, count) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".out.old-*"))) == 2
    with pytest.raises(ConfigError, match="is not empty"):  # what the killed command began is undone, or ended
        check_out(out, [], force=False)
    expected = "new" if (moment, count) == ("rename", 2) else "former"
    assert json.loads((out / "config.json").read_text())["content"] == expected
    with staged(out, check_out(out, [], force=True)) as stage:
        (stage / "a").touch()
    assert sorted(os.listdir(tmp_path)) == [".out.old-0123abcd", "out"] and os.listdir(out) == ["a"]
