"""Lets fewer kernels compute a model that serves, with the same results up to rounding."""

from transformers import PreTrainedModel

from fcsd.engine.merged import merge_projections
from fcsd.models.build import arch_of
from fcsd.models.fused.model import fuse_parts


def fuse(model: PreTrainedModel, kernels: bool) -> None:
    """Merge projections, and let kernels compute the parts of ``fuse_parts``.

    The names of the weights change, so the model cannot be saved afterwards.

    Args:
        kernels: whether the model is on a GPU. If not, only projections are merged.
    """
    merge_projections(model)
    fuse_parts(model, arch_of(model.config), kernels)
