"""Opens a model in fcsd's own inference engine: divided by tensor parallelism, with its reductions in flight.

The engine is transformers' model with narrower weights (``engine/weights.py``), whose layers start and await
reductions as the wiring allows (``engine/layer.py``). It is called as every other causal LM, and
``decode.py``, ``generate.py`` and ``logprobs.py`` run it. All ranks must make the same calls with the same inputs;
each of them gets the whole logits.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.engine.fused import fuse
from fcsd.engine.layer import wire_tensor_parallel
from fcsd.engine.weights import load_tensor_parallel
from fcsd.parallel import process_settings
from fcsd.parallel.all_reduce.backends import require_right
from fcsd.parallel.all_reduce.reduce import Reduction
from fcsd.parallel.tensor.tp_plan import TensorGroup

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from fcsd.launch.world import World


def open_engine(path: Path, world: "World", *, dtype: "torch.dtype", reduce: str = "nccl") -> "PreTrainedModel":
    """Load an original or converted checkpoint over all ranks of the default process group.

    Args:
        path: the checkpoint directory. A converted model has the wiring that it was converted to.
        world: this process, from ``join_world``.
        reduce: how the ranks reduce: one of the backends that give right results.

    Returns:
        A causal LM in eval mode: token ids ``[batch, seq]``, equal on all ranks, give logits ``[batch, seq, vocab]``.

    Raises:
        BadInputError: the checkpoint cannot be loaded by tensor parallelism.
        ConfigError: the number of ranks or the all-reduce backend does not fit.
    """
    import torch.distributed as dist

    from fcsd.models.build import wiring_of

    ranks = TensorGroup(dist.group.WORLD, world.size, world.rank)
    require_right(reduce)
    Reduction(ranks.group, reduce, 0)  # what these ranks cannot have is refused before the weights are read
    if world.device.type == "cuda" and world.size > 1:
        process_settings.warn(os.environ)
    model = load_tensor_parallel(path, dtype=dtype, device=world.device, ranks=ranks)
    fuse(model, world.device.type == "cuda")
    wire_tensor_parallel(model, wiring_of(model.config), ranks, reduce)
    return model
