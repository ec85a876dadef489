"""Finds a model: in a directory, or in the hub cache at the commit that a hub id was resolved to.

What a directory holds is recognised by file names; if it is no checkpoint of transformers, the message says what it is.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from fcsd.checkpoint.checkpoint import Checkpoint
from fcsd.checkpoint.files import INDEX, SINGLE, Header, parse_header
from fcsd.errors import BadInputError, DiskError
from fcsd.foreign_errors import reason_of
from fcsd.models.config_keys import ADAPTER, BOTH, DIVIDE
from fcsd.models.products import product_hint

ASSETS = Path(__file__).parents[2] / "assets"  # only a clone of the repository has it; the wheel leaves it out
RUN_RECIPE = "config.resolved.yaml"  # the first file that a run writes, by which its directory is known
# The known kinds, in the order in which they are tried: globs over the top-level names -> the kind, and what to do.
_KINDS: list[tuple[tuple[str, ...], str, str]] = [
    (("model_index.json",), "a diffusers pipeline", "fcsd rewires language models only."),
    ((RUN_RECIPE,), "an fcsd run", "Export it first: fcsd export RUN OUT."),
    (("MANIFEST.json",), "a checkpoint of an fcsd run", "Export it first: fcsd export RUN OUT --checkpoint step-N."),
    (
        (ADAPTER, "adapter_model.*"),
        "a LoRA adapter",
        "Merge it into its base model (peft: merge_and_unload) and pass that.",
    ),
    (("*.gguf",), "a GGUF model", "Pass the file itself, and fcsd says how transformers writes it as a checkpoint."),
    (
        ("global_step*", "*mp_rank_*"),
        "a DeepSpeed checkpoint",
        "Convert it first: python -m deepspeed.utils.zero_to_fp32 DIR OUT.",
    ),
    (
        ("*.distcp", ".metadata"),
        "a distributed (DCP) checkpoint",
        "Save the model it holds with save_pretrained and pass that.",
    ),
    (
        ("pytorch_model*",),
        "a checkpoint of pickled weights (pytorch_model.bin)",
        "Load it with transformers' AutoModelForCausalLM, save it with save_pretrained, and copy its tokenizer there.",
    ),
    (("consolidated*",), "a checkpoint in its author's own format", "Pass the transformers version of it."),
    (("*.pth",), "a checkpoint of pickled weights (.pth)", "Pass the transformers version of it."),
    (("tf_model.h5",), "a TensorFlow checkpoint", "Convert it to safetensors first."),
    (("flax_model*",), "a Flax checkpoint", "Convert it to safetensors first."),
]
_EXPECTED = f"Expected a directory with config.json and {SINGLE} or {INDEX}."


def expect_checkpoint(names: Iterable[str], where: str | Path, *, weights: bool = True) -> None:
    """Check by file names alone that these files are a transformers checkpoint in safetensors.

    Args:
        names: paths in the directory or repository, relative to it.
        where: the directory or repository, for the message.
        weights: whether the checkpoint must have weights; if not, config.json is enough.

    Raises:
        BadInputError: the files are something else, or a checkpoint and an adapter; the message says what.
    """
    top = {name.split("/")[0] for name in names}
    found = SINGLE in top or INDEX in top
    if "config.json" in top and found and ADAPTER in top:
        raise BadInputError(f"{where}: {BOTH}", DIVIDE)
    if "config.json" in top and (found or not weights):
        return
    for patterns, kind, hint in _KINDS:
        if any(fnmatch(name, pattern) for name in top for pattern in patterns):
            raise BadInputError(f"{where}: is {kind}, not a transformers checkpoint in safetensors", hint)
    if not top:
        raise BadInputError(f"{where}: is empty", _EXPECTED)
    missing = "config.json" if found else f"{SINGLE} or {INDEX}" if "config.json" in top else "checkpoint"
    raise BadInputError(f"{where}: has no {missing}", _EXPECTED)


def expect_directory(path: Path, *, weights: bool = True) -> None:
    """Check that ``path`` is a directory that holds a transformers checkpoint; see :func:`expect_checkpoint`.

    Raises:
        BadInputError: the path is something else; the message says what.
    """
    if not os.path.isdir(path):
        if not os.path.exists(path):
            raise BadInputError(
                f"{path}: no such directory",
                f"{meant(str(path))}MODEL is a directory or a hub id: org/name[@revision].",
            )
        if path.suffix == ".gguf":
            hint = f"Write one with two lines of Python: {' and '.join(gguf_lines(path, 'OUT'))}; then pass OUT."
            raise BadInputError(f"{path}: is a GGUF model, not a checkpoint directory", hint)
        kind = "a single weights file" if path.suffix == ".safetensors" else "a file"
        raise BadInputError(f"{path}: is {kind}, not a checkpoint directory", _EXPECTED)
    try:
        names = os.listdir(path)
    except OSError as error:
        raise BadInputError(f"{path}: cannot be listed ({error.strerror})") from None
    try:
        expect_checkpoint(names, path, weights=weights)
    except BadInputError as error:
        inside = [folder for folder in _folders(path) if (folder / "config.json").is_file()]
        if "config.json" not in names and inside:
            error.hint = f"Did you mean {inside[0]}? {error.hint or ''}".strip()
        raise


def gguf_lines(file: Path, out: str) -> tuple[str, str]:
    """The lines of Python by which transformers writes the model and the tokenizer of a GGUF file to a directory.

    The first one gives up the quantisation, because transformers does not save a quantised model of this kind.
    """
    where = f"{str(file.parent)!r}, gguf_file={file.name!r}"
    load = f"from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; m = M.from_pretrained({where})"
    plain = "m.hf_quantizer = m.config.quantization_config = None"
    return (
        f"{load}; {plain}; m.bfloat16().save_pretrained({out!r})",
        f"T.from_pretrained({where}).save_pretrained({out!r})",
    )


def meant(name: str) -> str:
    """The start of a hint for a model that was not found: a similar directory, and the type behind its name."""
    path = Path(name)
    close = get_close_matches(path.name, [folder.name for folder in _folders(path.parent)], n=1)
    return (f"Did you mean {path.parent / close[0]}? " if close else "") + product_hint(name)


def _folders(path: Path) -> list[Path]:
    """The folders in ``path``, sorted; none if it cannot be listed."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []


# Weights in other formats or in a subdirectory. They are the same model again, for another program.
OTHER_FORMATS = ["*/*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*"]
OTHER_FORMATS += ["*.distcp", "consolidated*"]
SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]  # all files but the weights: config, tokenizer, index
_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[^@\s]+))?")


def open_checkpoint(
    model: str | Path, *, weights: bool = True, headers: bool = False, trust_remote_code: bool = False
) -> Checkpoint:
    """Find a model and download the files that the hub cache lacks. An interrupted download resumes where it stopped.

    Args:
        model: a directory, which may begin with ``bundled:``, or ``org/name`` or ``org/name@revision`` on the hub. If
            both exist, the directory is taken.
        weights: whether the checkpoint must have weights; if not, only its small files are downloaded.
        headers: download small files only, and read the headers of the weights over the network.
        trust_remote_code: see ``Checkpoint``.

    Raises:
        BadInputError: the model does not exist, is not accessible, or is not a transformers checkpoint in safetensors.
    """
    here = directory_of(str(model), weights=weights)
    if here is not None:
        return Checkpoint(here, trust_remote_code=trust_remote_code)
    from huggingface_hub import snapshot_download

    match = _HUB_ID.fullmatch(str(model))
    assert match is not None
    repo, revision, whole = match["repo"], match["revision"], weights and not headers
    with _hub_errors(repo, revision):
        reachable, gated = _look_up(repo, revision)
        folder = snapshot_download(  # in snapshots/<commit>; the cache records the revision's commit for offline use
            repo,
            revision=revision,
            allow_patterns=None if whole else SMALL_FILES,
            ignore_patterns=OTHER_FORMATS,
            local_files_only=not reachable,
        )
    path = Path(folder)
    expect_directory(path, weights=whole)
    remote = partial(_remote_headers, repo, path.name) if headers else dict
    return Checkpoint(path, repo, path.name, gated, trust_remote_code, remote)


def located(path: str) -> str:
    """Write out a path that begins with ``bundled:``, which names what is bundled wherever fcsd is called."""
    name = path.removeprefix("bundled:")
    return path if name == path else str(ASSETS / name)


def directory_of(model: str, *, weights: bool = True) -> Path | None:
    """The directory that a model names, which looks like a checkpoint; None for a model of the hub.

    Args:
        model, weights: as in :func:`open_checkpoint`.

    Raises:
        BadInputError: there is no such directory, or it is not a transformers checkpoint in safetensors.
    """
    path = Path(os.path.expanduser(located(model)))
    if not os.path.exists(path) and _HUB_ID.fullmatch(model):
        return None
    expect_directory(path, weights=weights)
    return path


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


def _remote_headers(repo: str, revision: str) -> dict[str, Callable[[], Header]]:
    """Functions that read headers over the network by ranged requests, for every safetensors file of a repository.

    The result is empty when the hub cannot be reached.
    """
    from huggingface_hub import HfApi, is_offline_mode

    if is_offline_mode():
        return {}
    with _hub_errors(repo, revision):
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    sizes = {file.rfilename: file.size for file in info.siblings or []}
    return {
        name: partial(_remote_header, repo, revision, name, size)
        for name, size in sizes.items()
        if name.endswith(".safetensors") and size is not None
    }


def _remote_header(repo: str, revision: str, name: str, size: int) -> Header:
    from huggingface_hub import HfFileSystem

    with (
        _hub_errors(repo, revision),
        HfFileSystem().open(f"{repo}/{name}", "rb", revision=revision, block_size=1 << 18) as file,
    ):
        return parse_header(cast(BinaryIO, file), size, f"{repo}/{name}")


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
