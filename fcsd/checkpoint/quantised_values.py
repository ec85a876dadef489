"""Reads the small tensors of quantised weights, and refuses values that no quantiser writes."""

from collections.abc import Mapping

from fcsd.checkpoint.layout import Layout
from fcsd.checkpoint.weights import Reader
from fcsd.models.quantised.decode import checked_tensor, is_small, quantised_weights
from fcsd.models.quantised.method import Method
from fcsd.models.quantised.values import DTYPES


def check_values(layout: Layout, method: Method, parameters: Mapping[str, tuple[int, ...]]) -> None:
    """Check scales, zero points and orders of columns, one tensor at a time. Codes are not read.

    Args:
        layout: the checkpoint. A tensor whose file is not on this machine is not checked.
        parameters: the tensors of the model without quantisation: name -> shape.

    Raises:
        BadInputError: a value cannot be right; the message names the tensor.
    """
    tensors = layout.tensors
    here = {name for shard in layout.files for name in layout.shards.get(shard, {}) if layout.files[shard].exists()}
    with Reader(layout) as reader:
        for weight in quantised_weights(method, tensors):
            for suffix, name in weight.tensors.items():
                if name in here and weight.name in parameters and is_small(suffix):
                    values = reader.raw(name).view(DTYPES[tensors[name].dtype]).view(tensors[name].shape)
                    checked_tensor(weight, suffix, values, parameters[weight.name])
