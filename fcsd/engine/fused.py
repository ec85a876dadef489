"""Lets fewer kernels compute a model that serves, with the same results up to rounding."""

from transformers import PreTrainedModel

from fcsd.engine.merged import merge_projections
from fcsd.models.build import arch_of
from fcsd.models.fused.experts import fuse_experts
from fcsd.models.fused.mlps import fuse_mlps
from fcsd.models.fused.norms import fuse_norms
from fcsd.models.fused.rotary import fuse_rotary


def fuse(model: PreTrainedModel, kernels: bool) -> None:
    """Merge projections, and let one kernel each compute norms, rotations, and the products inside gated MLPs.

    Kernels also move the rows of routed experts, and compute those of few tokens. The names of the weights change, so
    the model cannot be saved afterwards.

    Args:
        model: a transformers model, changed in place.
        kernels: whether the model is on a GPU. If not, only projections are merged.
    """
    merge_projections(model)
    if kernels:
        arch = arch_of(model.config)
        fuse_norms(model, arch)
        fuse_rotary(model, arch)
        fuse_mlps(model)
        fuse_experts(model)
