"""Recognises, by file names, what a directory holds that is not a Hugging Face checkpoint, for the error message."""

import os
from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from fcsd.checkpoint.layout import INDEX, SINGLE
from fcsd.errors import BadInputError

RUN_RECIPE = "config.resolved.yaml"  # the first file that a run writes, by which its directory is known
# The known kinds, in the order in which they are tried: globs over the top-level names -> the kind, and what to do.
_KINDS: list[tuple[tuple[str, ...], str, str]] = [
    (("model_index.json",), "a diffusers pipeline", "fcsd rewires language models only."),
    ((RUN_RECIPE,), "an fcsd run", "Export it first: fcsd export RUN OUT."),
    (("MANIFEST.json",), "a checkpoint of an fcsd run", "Export it first: fcsd export RUN OUT --checkpoint step-N."),
    (
        ("adapter_config.json", "adapter_model.*"),
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
        BadInputError: the files are something else; the message says what.
    """
    top = {name.split("/")[0] for name in names}
    found = SINGLE in top or INDEX in top
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
    from fcsd.models.products import product_hint

    path = Path(name)
    close = get_close_matches(path.name, [folder.name for folder in _folders(path.parent)], n=1)
    return (f"Did you mean {path.parent / close[0]}? " if close else "") + product_hint(name)


def _folders(path: Path) -> list[Path]:
    """The folders in ``path``, sorted; none if it cannot be listed."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
