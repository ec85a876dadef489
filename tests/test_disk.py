"""Files are replaced as a whole or stay as they were; sums are those of the standard tools."""

import errno
import os
import signal
import stat
from pathlib import Path

import pytest
import ranks
from matplotlib.figure import Figure

from fcsd import disk
from fcsd.distill.run.manifest import read_manifest
from fcsd.errors import ConfigError, FcsdError
from fcsd.eval.results import read_results
from fcsd.parallel.machine import read_machine
from fcsd.serve.chat import read_prompts


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    disk.write_text(path, "né\n")
    assert path.read_bytes() == b"n\xc3\xa9\n"
    disk.write_json(path, {"b": 1, "a": [2]})
    assert path.read_text() == '{\n "a": [\n  2\n ],\n "b": 1\n}'
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_full_disk_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        disk.write_text(tmp_path / "result.json", "text")
    assert caught.value.filename == str(tmp_path / "result.json") and not os.listdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: '/[^']*/missing/result.json'$"):
        disk.write_text(tmp_path / "missing" / "result.json", "text")


def test_a_linked_file_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    original, link = tmp_path / "original", tmp_path / "link"
    original.write_text("before")
    link.hardlink_to(original)
    disk.write_text(link, "after")
    assert (original.read_text(), link.read_text()) == ("before", "after")


def test_inputs_are_regular_files_of_bounded_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"1234")
    (tmp_path / "link").symlink_to("file")
    assert disk.read_input(tmp_path / "file", 4) == disk.read_input(tmp_path / "link") == b"1234"
    for path in (tmp_path / "fifo", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            disk.read_input(path)
    with pytest.raises(OSError, match="larger than"):
        disk.read_input(tmp_path / "file", 3)
    (tmp_path / "text").write_bytes(b"a\r\nb\rc\n")
    assert disk.read_input_text(tmp_path / "text") == (tmp_path / "text").read_text()
    with pytest.raises(FileNotFoundError):
        disk.read_input(tmp_path / "none")


READERS = {
    "machine.json": read_machine,
    "prompts.txt": read_prompts,
    "results.json": read_results,
    "MANIFEST.json": lambda path: read_manifest(path.parent),
}


@pytest.mark.parametrize("name", READERS)
def test_a_fifo_in_the_place_of_an_input_is_refused_at_once(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(FcsdError):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "directory"])
def test_only_regular_files_are_written(tmp_path: Path, kind: str) -> None:
    target, path = tmp_path / "target", tmp_path / "path"
    if kind == "link":
        target.write_text("before")
    {"fifo": os.mkfifo, "directory": os.mkdir}.get(kind, lambda path: path.symlink_to(target))(path)
    was = path.lstat()
    for write in (lambda: disk.write_text(path, "after"), lambda: disk.open_to_append(path)):
        with pytest.raises(ConfigError, match="not a regular file"):
            write()
    assert path.lstat() == was and (target.read_text() == "before" if kind == "link" else not target.exists())


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_text("before")
    path.chmod(0o640)
    disk.write_text(path, "after")
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("after", 0o640)


def test_a_full_disk_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        disk.write_text(path, "new")
    with pytest.raises(OSError, match="No space"):
        disk.write_picture(path, Figure())
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_every_directory_of_a_tree_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model" / "templates").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync", synced.append)
    disk.sync_directories(tmp_path)
    assert synced == [tmp_path, tmp_path / "model", tmp_path / "model" / "templates"]


def test_sums(tmp_path: Path) -> None:
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, example B.1
    (tmp_path / "abc").write_bytes(b"abc")
    assert disk.bytes_sha256(b"abc") == disk.file_sha256(tmp_path / "abc") == abc
    assert disk.json_sha256({"a": 1, "b": 2}) == disk.json_sha256({"b": 2, "a": 1}) != disk.json_sha256([1, 2])


def killed_within(place: Path) -> None:
    with disk.scratch(place, "work-") as folder:
        (folder / "model").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_scratch_directory_goes_with_its_block_or_when_the_next_one_begins(tmp_path: Path) -> None:
    (tmp_path / "work-0123abcd").mkdir()  # not ours, whatever its name
    assert ranks.exit_code(killed_within, tmp_path) == -signal.SIGKILL
    (killed,) = set(tmp_path.iterdir()) - {tmp_path / "work-0123abcd"}
    assert (killed / "model").read_text() == "half"
    with disk.scratch(tmp_path, "other-"):
        assert killed.is_dir()
    with disk.scratch(tmp_path, "work-") as first:
        assert first.is_dir() and not killed.exists()
        with disk.scratch(tmp_path, "work-") as second:
            assert first.is_dir() and second != first, "one in use stays"
    with pytest.raises(KeyError), disk.scratch(tmp_path, "work-"):
        raise KeyError
    assert os.listdir(tmp_path) == ["work-0123abcd"]
