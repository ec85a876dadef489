"""Reads back what the hub has after an upload: no answer of the hub alone says that a model has arrived."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fcsd.checkpoint.files import shown
from fcsd.disk import file_sha256
from fcsd.errors import FcsdError

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class Sent(NamedTuple):
    """A file that was sent.

    Attributes:
        size: bytes.
        sha256: of its content, in hexadecimal, as the hub names it in LFS.
    """

    path: Path
    size: int
    sha256: str


def sent_files(directory: Path, left_out: Sequence[str]) -> dict[str, Sent]:
    """The files of a directory that are sent, by the names that they have on the hub.

    Args:
        left_out: the patterns of files that are not sent, as ``upload_folder`` of huggingface_hub reads them.
    """
    from huggingface_hub.utils import filter_repo_objects

    names = (path.relative_to(directory).as_posix() for path in sorted(directory.rglob("*")) if path.is_file())
    paths = {name: directory / name for name in filter_repo_objects(names, ignore_patterns=list(left_out))}
    return {name: Sent(path, path.stat().st_size, file_sha256(path)) for name, path in paths.items()}


def check_arrival(
    api: "HfApi", repo: str, revision: str, sent: Mapping[str, Sent], replaced: Sequence[str], hint: str
) -> None:
    """Compare the hub's list of a revision's files with what was sent: names, sizes and hashes.

    Args:
        replaced: patterns of the files of an earlier upload that must be gone.

    Raises:
        FcsdError: a file is missing or differs, or one of an earlier upload is still there.
    """
    from huggingface_hub.utils import filter_repo_objects

    listed = api.model_info(repo, revision=revision, files_metadata=True).siblings or []
    found = {entry.rfilename: entry for entry in listed}
    missing = sorted(sent.keys() - found.keys())
    other = [name for name in sorted(sent.keys() & found.keys()) if not _is(found[name], sent[name])]
    kept = sorted(set(filter_repo_objects(found, allow_patterns=list(replaced))) - sent.keys())
    for what, names in (("lacks", missing), ("differs in", other), ("still has the earlier", kept)):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise FcsdError(f"{repo}: after the upload, {revision} {what} {shown(names[0])}{more}", hint)


def _is(entry: object, sent: Sent) -> bool:
    """Whether an entry of the hub's list is the file that was sent."""
    lfs = getattr(entry, "lfs", None)
    if lfs is not None:
        return (lfs.size, lfs.sha256) == (sent.size, sent.sha256)
    if getattr(entry, "size", None) != sent.size:
        return False
    git = hashlib.sha1(f"blob {sent.size}\0".encode(), usedforsecurity=False)  # the name that git gives to a content
    with sent.path.open("rb") as file:
        while block := file.read(1 << 20):
            git.update(block)
    return getattr(entry, "blob_id", None) == git.hexdigest()
