"""Finds a model: in a directory, or in the hub cache at the commit that a hub id was resolved to."""

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from fcsd.bundled import located
from fcsd.checkpoint.files import contained, read_object
from fcsd.checkpoint.fingerprint import fingerprint
from fcsd.checkpoint.headers import TensorInfo, parse_header
from fcsd.checkpoint.kind import expect_checkpoint, expect_directory, meant
from fcsd.checkpoint.layout import Layout
from fcsd.errors import BadInputError, DiskError
from fcsd.foreign_errors import reason_of

# Weights in other formats or in a subdirectory. They are the same model again, for another program.
OTHER_FORMATS = ["*/*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*"]
OTHER_FORMATS += ["*.distcp", "consolidated*"]
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # all files but the weights: config, tokenizer, index
_BASE_PATH = ".fcsd.json"
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@\s]+))?")


@dataclass(frozen=True)
class Location:
    """A checkpoint on this machine. If it comes from the hub, its repository id and commit are recorded too."""

    path: Path
    repo_id: str | None = None
    revision: str | None = None
    gated: bool = False


def resolve(model: str, *, allow_patterns: list[str] | None = None, weights: bool = True) -> Location:
    """Find a model and download the files that the hub cache lacks. An interrupted download resumes where it stopped.

    Args:
        model: a directory, which may begin with ``bundled:``, or ``org/name`` or ``org/name@revision`` on the hub. If
            both exist, the directory is taken.
        allow_patterns: download only the files that match one of these globs.
        weights: whether the checkpoint must have weights; if not, only its small files are downloaded.

    Raises:
        BadInputError: the model does not exist, is not accessible, or is not a transformers checkpoint in safetensors.
    """
    model = located(model)
    path = Path(os.path.expanduser(model))
    match = _HUB_ID.fullmatch(model)
    if os.path.exists(path) or match is None:
        expect_directory(path, weights=weights)
        return Location(path)
    from huggingface_hub import snapshot_download

    repo, revision = match["repo"], match["revision"]
    if not weights:
        allow_patterns = SMALL_FILES
    with _hub_errors(repo, revision):
        reachable, gated = _look_up(repo, revision)
        folder = snapshot_download(  # in snapshots/<commit>; the cache records the revision's commit for offline use
            repo,
            revision=revision,
            allow_patterns=allow_patterns,
            ignore_patterns=OTHER_FORMATS,
            local_files_only=not reachable,
        )
    path = Path(folder)
    if allow_patterns is None:
        expect_directory(path)
    return Location(path, repo, path.name, gated)


def origin(source: Location, layout: Layout | None) -> dict[str, str | None]:
    """The fields of the ``fcsd`` block that describe the original. A directory is recorded by its name, not its path.

    Args:
        layout: the original's weights; with None the fingerprint is left out.
    """
    return {
        "base_model": source.repo_id or source.path.resolve().name,
        "base_revision": source.revision,
        "base_sha256": None if layout is None else fingerprint(layout),
    }


def short_names(models: Sequence[str], taken: Collection[str] = ()) -> list[str]:
    """A short name for each model, for tables and files: the last part of its path or hub id.

    A name that another model has too, or that is ``taken``, is preceded by as many folders as tell the models apart:
    ``a--final`` and ``b--final``. Only the same model twice has the same name twice.
    """
    paths = [os.path.abspath(model) if os.path.exists(model) else model for model in models]
    parts = [tuple(part for part in path.split("/") if part) for path in paths]

    def ends(of: tuple[str, ...], count: int) -> str:
        return "--".join(of[-count:])

    names = []
    for own in parts:
        others = [of for of in parts if of != own]
        counts = range(1, len(own) + 1)
        free = (n for n in counts if ends(own, n) not in taken and all(ends(of, n) != ends(own, n) for of in others))
        names.append(ends(own, next(free, len(own))))
    return names


def base_path_file(source: Location) -> dict[str, str]:
    """The file of a converted directory that records the original's path on this machine, as name -> text.

    The file is hidden, so neither ``fcsd export`` nor ``fcsd push`` copies it. For an original on the hub the result is
    empty.
    """
    if source.repo_id is not None:
        return {}
    return {_BASE_PATH: json.dumps({"base_path": str(source.path.resolve())}) + "\n"}


def read_base_path(directory: Path) -> str | None:
    """The path in the file of :func:`base_path_file`; None if there is no such file.

    Raises:
        BadInputError: the file does not hold a path.
    """
    if not (directory / _BASE_PATH).exists():
        return None
    path = read_object(contained(directory, _BASE_PATH)).get("base_path")
    if not isinstance(path, str):
        raise BadInputError(f"{directory / _BASE_PATH}: has no base_path", "Delete it, and set `teacher:` in recipes.")
    return path


def recorded_original(directory: Path, block: dict[str, Any]) -> str | None:
    """The original that a converted model records: its hub id with the commit, its path here, or only its name.

    Returns: None if the block names no original.

    Raises:
        BadInputError: see :func:`read_base_path`.
    """
    if block.get("base_model") and (revision := block.get("base_revision")):
        return f"{block['base_model']}@{revision}"
    return block.get("base_model") and (read_base_path(directory) or block["base_model"])


def remote_headers(source: Location) -> dict[str, Callable[[], dict[str, TensorInfo]]]:
    """Functions that read headers over the network by ranged requests, for every safetensors file of a hub repository.

    The result is empty for a directory, and when the hub cannot be reached.
    """
    if source.repo_id is None:
        return {}
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        return {}
    with _hub_errors(source.repo_id, source.revision):
        info = HfApi().model_info(source.repo_id, revision=source.revision, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    return {
        name: partial(_remote_header, source, name, size)
        for name, size in sizes.items()
        if name.endswith(".safetensors") and size is not None
    }


def _remote_header(source: Location, name: str, size: int) -> dict[str, TensorInfo]:
    from huggingface_hub import HfFileSystem

    assert source.repo_id is not None
    with (
        _hub_errors(source.repo_id, source.revision),
        HfFileSystem().open(f"{source.repo_id}/{name}", "rb", revision=source.revision, block_size=1 << 18) as file,
    ):
        return parse_header(cast(BinaryIO, file), size, f"{source.repo_id}/{name}")


def _look_up(repo: str, revision: str | None) -> tuple[bool, bool]:
    """Whether the hub can be reached, and whether the repository is gated.

    A repository that holds no checkpoint is refused.
    """
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # pyright: ignore[reportPrivateImportUsage]

    if is_offline_mode():
        return False, False
    try:
        info = HfApi().model_info(repo, revision=revision)
    except HTTPError as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        return False, False  # the hub is down; the cache may hold the files
    expect_checkpoint((file.rfilename for file in info.siblings or []), repo)
    return True, bool(info.gated)


@contextmanager
def _hub_errors(repo: str, revision: str | None) -> Iterator[None]:
    """Turn exceptions of huggingface_hub into one line and a hint, without URLs, because a URL may contain a token."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage]
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError:
        raise BadInputError(f"{repo}: is neither a directory here nor a hub id", "Check the spelling.") from None
    except GatedRepoError:  # a subclass of RepositoryNotFoundError
        raise BadInputError(
            f"{repo}: is gated and your account has no access",
            f"Accept its terms at {constants.ENDPOINT}/{repo}, then run: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise BadInputError(
            f"{repo}: is neither a directory here nor a repository you can see on {constants.ENDPOINT}",
            f"{meant(repo)}Check the spelling; for a private repository run: hf auth login",
        ) from None
    except RevisionNotFoundError:
        raise BadInputError(f"{repo}: has no revision {revision!r}", "Pass a branch, tag or commit of it.") from None
    except LocalEntryNotFoundError:
        raise BadInputError(
            f"{repo}: no such directory; the hub's model of this name is not (completely) in the cache, and "
            f"{constants.ENDPOINT} cannot be reached",
            f"{meant(repo)}Pass a directory, go online (HF_HUB_OFFLINE unset), or point HF_HOME at a "
            "cache that holds the model.",
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        raise BadInputError(f"{repo}: the hub answered {status}", "Try again; a download resumes.") from None
    except HTTPError as error:
        why = f"{type(error).__name__}: {reason_of(error)}"
        raise BadInputError(f"{repo}: the download broke off ({why})", "Run it again.") from None
    except OSError as error:  # caught last, because the hub's own errors are OSErrors too
        raise DiskError(
            f"{constants.HF_HUB_CACHE}: cannot be written ({error.strerror or error})",
            "Free some space there, or point HF_HOME at another disk.",
        ) from None
