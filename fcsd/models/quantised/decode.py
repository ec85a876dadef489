"""Makes the plain tensors of a quantised checkpoint while a model is loaded, one at a time.

transformers takes a tensor of a file by ``tensor[...]`` when it is that tensor's turn. So a tensor that decodes itself
then needs nothing else of transformers, and experts are joined and renamed as those of a checkpoint in bf16 are.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import BadInputError
from ...terminal import bounded
from .layouts import BESIDE, LAYOUTS, Scheme, suffixes
from .method import Method
from .values import dequantise, faulty


class Weight(NamedTuple):
    """A quantised weight: its name, its scheme, and the names of its tensors by their suffixes."""

    name: str
    scheme: Scheme
    tensors: dict[str, str]


class Decoded:
    """A tensor in place of a file's, which is decoded when it is asked for as a whole or in part."""

    def __init__(self, weight: Weight, files: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._decode = partial(_decoded, weight, files, dtype)

    def __getitem__(self, part: Any) -> Tensor:
        return self._decode()[part]


def _decoded(weight: Weight, files: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    try:
        return dequantise(weight.scheme, {suffix: files[name][...] for suffix, name in weight.tensors.items()}, dtype)
    except (ValueError, RuntimeError) as error:
        raise BadInputError(f"{bounded(weight.name, 200)}: {error}") from error


def quantised_weights(method: Method, held: Mapping[str, Any]) -> list[Weight]:
    """The weights that the files hold quantised, by what their tensors are called.

    Args:
        held: names of all tensors of the files.

    Raises:
        BadInputError: see :meth:`Method.scheme_of`.
    """
    keys = dict.fromkeys((LAYOUTS[one.layout].key, LAYOUTS[one.layout].stem) for one in method.schemes)
    named = {name.removesuffix(key) + stem for key, stem in keys for name in held if name.endswith(_dotted(key))}
    found = []
    for name in sorted(named):
        if (scheme := method.scheme_of(name, held)) is None:
            continue
        start = name.removesuffix(LAYOUTS[scheme.layout].stem)
        found.append(Weight(name, scheme, {one: start + one for one in suffixes([scheme]) if start + one in held}))
    return found


def _dotted(key: str) -> str:
    return key if key.startswith("_") else f".{key}"


def plain_tensors(files: Mapping[str, Any], method: Method, dtype: torch.dtype) -> dict[str, Any]:
    """The tensors of a checkpoint as one that is not quantised has them.

    Args:
        files: name -> a tensor, or anything that gives it by ``[...]``, as a slice of a safetensors file does.
        dtype: of the decoded ones; the others are as they are.

    Returns:
        Name -> tensor, or what gives it by ``[...]``.

    Raises:
        BadInputError: a scale, an order of columns or a zero point cannot be right, or the files and the method do not
            belong together. The message names the tensor.
    """
    weights = quantised_weights(method, files)
    if not weights:
        raise BadInputError(f"no tensor is quantised as the config says: {method}")
    taken = {name for weight in weights for name in weight.tensors.values()}
    plain = {name: tensor for name, tensor in files.items() if name not in taken and not re.search(BESIDE, name)}
    for weight in weights:
        for suffix, name in weight.tensors.items():
            if is_small(suffix):
                checked_tensor(weight, suffix, files[name][...], None)
        plain[weight.name] = Decoded(weight, files, dtype)
    return plain


def is_small(suffix: str) -> bool:
    """Whether the tensor holds something else than codes, and its values can be checked."""
    return suffix not in ("weight", "weight_packed", "qweight", "_blocks")


def checked_tensor(weight: Weight, suffix: str, tensor: Tensor, shape: tuple[int, ...] | None) -> None:
    """Checks the values of a tensor of a quantised weight; see :func:`fcsd.models.quantised.values.faulty`.

    Args:
        shape: of the weight; None if it is not known.

    Raises:
        BadInputError: the message names the tensor.
    """
    if problem := faulty(weight.scheme, suffix, tensor, shape):
        name = bounded(weight.tensors[suffix], 200)
        raise BadInputError(f"{name} {problem}", "Download the model again, or quantise it again.")
