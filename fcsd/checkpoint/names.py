"""The names and the layout that the tensors of a model have in files, where they differ from those in its class.

transformers renames, joins and divides tensors while it loads files, and reverses this when it saves a model. Several
names in a file can load as one tensor, and the reversal gives only one of them, which need not be that of published
files: the two kinds of layers of OLMo-Hybrid have norms of one name in transformers and of two names in files. Where a
file is known, its own names count. Everything that reads or writes weights asks this module.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from fcsd.checkpoint.layout import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Held = Mapping[str, TensorInfo]  # name in files -> what the header says
_CONVOLUTION = re.compile(r"(.+)\.[qkv]_conv1d\.weight")
# What stands before the number of a layer. transformers saves the layers of a decoder as blocks, if those of the image
# encoder beside it are called so in files.
LAYERS = r"(?:layers|(?<=language_model\.model\.)blocks)\."
_IN_LAYER = re.compile(rf"(?:^|\.){LAYERS}\d+\.")


def stored(model: "PreTrainedModel", tensors: Mapping[str, "Tensor"], held: Held | None = None) -> dict[str, "Tensor"]:
    """Tensors of a model under their names on disk, and in the layout that they have there.

    Args:
        model: any model of transformers; only its classes and its config are read.
        tensors: all tensors of the model or some, by their names in it. They may be on the meta device. Those that
            files hold in one tensor must be here together.
        held: the tensors in the files from which the model was or will be loaded; without them, names and layout are
            those of ``save_pretrained``.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(tensors))
    if held is None:
        return found
    own = names_like(model, found, held)
    return dict(cut_like(((own[name], tensor) for name, tensor in found.items()), held))


def cut_like(tensors: Iterable[tuple[str, "Tensor"]], held: Held) -> Iterator[tuple[str, "Tensor"]]:
    """The tensors of a model by their names on disk, in the layout in which files have them and transformers does not.

    transformers holds the convolutions of queries, keys and values of linear attention as one tensor, and cuts it into
    equal parts although values may have more channels. The parts follow one another. It loads experts whose last two
    dimensions are exchanged (Qwen3-VL), and does not exchange them again when it saves a model.
    """
    import torch

    parts: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if tensor.ndim == 3 and name in held and tensor.shape != tuple(held[name].shape) == tensor.mT.shape:
            tensor = tensor.mT.contiguous()
        block = _CONVOLUTION.fullmatch(name)
        if block is None or name not in held:
            yield name, tensor
            continue
        parts[name] = tensor
        if parts.keys() >= {f"{block[1]}.{one}_conv1d.weight" for one in "qkv"}:
            sizes = [held[part].shape[0] for part in parts]
            whole = torch.cat(list(parts.values()))
            yield from zip(parts, whole.split(sizes) if sum(sizes) == len(whole) else parts.values(), strict=True)
            parts.clear()
    yield from parts.items()


def loaded(model: "PreTrainedModel", tensors: Mapping[str, "Tensor"]) -> dict[str, "Tensor"]:
    """The reverse of ``stored``: tensors of files under the names, and in the layout, that they have in the model."""
    _, converters = _changes(model)
    found: dict[str, Any] = {}
    joined: dict[str, Any] = {}
    for on_disk, name in _renamed(model, tensors).items():
        for converter in converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                joined.setdefault(target, deepcopy(converter)).add_tensor(target, name, pattern, tensors[on_disk])
                break
        else:
            found[name] = tensors[on_disk]
    for target, converter in joined.items():
        found |= converter.convert(target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def rewritten(model: "PreTrainedModel", names: Iterable[str]) -> list[str]:
    """Those of the tensors, by their names in the model, that files hold in another layout."""
    _, converters = _changes(model)
    back = [converter.reverse_transform() for converter in converters]
    return [name for name in names if any(c.rename_source_key(name)[1] is not None for c in back)]


def names_like(model: "PreTrainedModel", names: Iterable[str], held: Held) -> dict[str, str]:
    """For each name on disk, the name that files have for what is loaded as the same tensor.

    It is the name itself if the files have it, or if they have no other one.
    """
    names = list(names)
    if not held or held.keys() >= set(names) or not _changes(model)[0]:
        return {name: name for name in names}
    theirs = _renamed(model, held)
    of = {inner: name for name, inner in theirs.items()}
    own = _renamed(model, names).items()
    return {name: name if theirs.get(name) == inner else of.get(inner, name) for name, inner in own}


def _renamed(model: "PreTrainedModel", names: Iterable[str]) -> dict[str, str]:
    """What transformers makes of names on disk, before it joins or divides tensors.

    It also adds the name of the inner model to a name that lacks it. A file whose layers lack it is not such a file.
    """
    from transformers.core_model_loading import dot_natural_key

    renamings, _ = _changes(model)
    prefix, own = f"{model.base_model_prefix}.", model.state_dict().keys()
    found = {}
    for name in sorted(names, key=dot_natural_key):  # some renamings depend on the names before
        inner = name
        for renaming in renamings:
            inner, _ = renaming.rename_source_key(inner)
        outside = inner not in own and not _IN_LAYER.search(inner)
        found[name] = prefix + inner if outside and prefix + inner in own else inner
    return found


def _changes(model: "PreTrainedModel") -> tuple[list[Any], list[Any]]:
    """What transformers applies to a model's files: renamings, and then for each name at most one converter."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found = get_model_conversion_mapping(model, add_legacy=False)
    return [c for c in found if isinstance(c, WeightRenaming)], [c for c in found if isinstance(c, WeightConverter)]
