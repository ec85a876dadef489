"""The names and the layout that the tensors of a model have in files, where they differ from those in its class.

transformers renames, joins and divides tensors while it loads files, and reverses this when it saves a model. Several
names in a file can load as one tensor, and the reversal gives only one of them, which need not be that of published
files: OLMo-Hybrid's two kinds of layers have norms of one name in transformers and of two names in files. Where a file
is known, its own names count. Everything that reads or writes weights asks this module for names.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def stored(model: "PreTrainedModel", tensors: Mapping[str, "Tensor"], held: Iterable[str] = ()) -> dict[str, "Tensor"]:
    """Tensors of a model under their names on disk, and in the layout that they have there.

    Args:
        model: any model of transformers; only its classes and its config are read.
        tensors: all tensors of the model or some, by their names in it. They may be on the meta device.
        held: the names in the files from which the model was or will be loaded; without them, the names are those
            that ``save_pretrained`` gives.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(tensors))
    own = names_like(model, found, held)
    return {own[name]: tensor for name, tensor in found.items()}


def names_like(model: "PreTrainedModel", names: Iterable[str], held: Iterable[str]) -> dict[str, str]:
    """For each name on disk, the name that files have for what is loaded as the same tensor.

    It is the name itself if the files have it, or if they have no other one.
    """
    names, held = list(names), set(held)
    if not held or held.issuperset(names):
        return {name: name for name in names}
    theirs = {loaded: name for name, loaded in _loaded(model, held).items()}
    return {
        name: name if name in held else theirs.get(loaded, name) for name, loaded in _loaded(model, names).items()
    }


def _loaded(model: "PreTrainedModel", names: Iterable[str]) -> dict[str, str]:
    """What transformers makes of names on disk, before it joins or divides tensors."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, dot_natural_key

    changes = [c for c in get_model_conversion_mapping(model, add_legacy=False) if isinstance(c, WeightRenaming)]
    found = {}
    for name in sorted(names, key=dot_natural_key):  # some changes depend on those before them
        loaded = name
        for change in changes:
            loaded, _ = change.rename_source_key(loaded)
        found[name] = loaded
    return found
