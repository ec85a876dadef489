"""The state of one rank that a checkpoint stores, and how a run takes it up again.

Every tensor is stored once. The weights are in ``model/``, of which each rank writes a part. The moments of the
optimizer are in ``optimizer/rank-R.pt``, together with the fp32 weights from which bf16 weights are rounded. If the
model is trained in fp32, these are the weights in ``model/`` and are not stored again. With ZeRO each rank has its own
partition of the optimizer's state, of which other ranks make theirs (``resharded``). Without ZeRO, all groups of ranks
that hold a model together have equal states, and the first group writes them.
"""

import base64
import json
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fcsd.disk import read_input, write_json
from fcsd.distill.optim.adamw_one_process import OneProcessAdamW
from fcsd.distill.optim.host_copies import HostCopies, size_of
from fcsd.distill.run.resharded import resharded
from fcsd.distill.train_engine import Trained, TrainEngine
from fcsd.errors import CheckpointError, DiskError
from fcsd.foreign_errors import reason_of
from fcsd.launch.world import World
from fcsd.parallel.tensor.layer import ranks_of
from fcsd.parallel.tensor.tp_plan import TensorGroup
from fcsd.parallel.weights.saving import OwnPart, own_part
from fcsd.parallel.weights.trained import trained_part

OPTIMIZER = "optimizer"
# What DeepSpeed raises at a state of other content. Subclasses are about devices, memory and other ranks.
_OF_OTHER_CONTENT = (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
_RESUME_EARLIER = "Resume from an earlier checkpoint (--resume PATH), or start anew in another output_dir."
_OF_BLOCKS = ("absmax", "qmap")  # the scales of 8-bit moments, and what their numbers stand for
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")  # of DeepSpeed's engine


@dataclass(frozen=True)
class Snapshot:
    """What a rank writes into a checkpoint.

    Attributes:
        part: this rank's part of the model.
        optimizer: the state of DeepSpeed's optimizer on this rank; None if another rank writes an equal state.
        states: DeepSpeed's counters and the states of the random generators, as values that JSON can express.
    """

    part: OwnPart
    optimizer: Any
    states: dict[str, Any]


def take(trained: Trained, world: World) -> Snapshot:
    """The state of this rank. Its tensors are those of the run, not copies."""
    engine, part = trained.engine, _part(trained)
    states = {"engine": {name: getattr(engine, name) for name in _COUNTERS}, "random": random_state()}
    writes = engine.zero_optimization() or world.rank < part.group_size
    return Snapshot(part, _optimizer_state(engine) if writes else None, states)


def copied(snapshot: Snapshot, copies: HostCopies) -> Snapshot:
    """The snapshot with copies of its tensors in host memory. It stays as it is while the run goes on."""
    copies.restart()
    tensors = [(name, copies.copy(value), row) for name, value, row in snapshot.part.tensors()]
    optimizer = _mapped(snapshot.optimizer, copies.copy)
    copies.wait()
    return replace(snapshot, part=replace(snapshot.part, tensors=lambda: iter(tensors)), optimizer=optimizer)


def host_bytes(snapshot: Snapshot) -> int:
    """The bytes of host memory that ``copied`` needs."""
    sizes = [size_of(value) for _, value, _ in snapshot.part.tensors()]
    _mapped(snapshot.optimizer, lambda tensor: sizes.append(size_of(tensor)))
    return sum(sizes)


def write_states(snapshot: Snapshot, directory: Path, rank: int) -> None:
    """Writes everything but the model into the directory of a checkpoint, which has a folder ``optimizer``.

    Raises:
        DiskError: the optimizer's state cannot be written.
    """
    write_json(_states_file(directory, rank), snapshot.states)
    if snapshot.optimizer is None:
        return
    path = _optimizer_file(directory, rank)
    try:
        torch.save(snapshot.optimizer, path)
    except Exception as error:
        # torch's file writer does not say why it could not write
        if "iostream" in f"{error}{error.__context__}" or "unexpected pos" in str(error):
            hint = "Free some space, or choose another output_dir."
            raise DiskError(f"{path} cannot be written, probably because the disk is full", hint) from error
        raise


def restore(checkpoint: Path, world: World, trained: Trained, shares: int) -> None:
    """Loads the state of this rank from a verified checkpoint, which any number of ranks may have saved.

    The engine's model has the weights of ``model/`` already.

    Args:
        shares: the number of ranks that divided the rows of the saved run.

    Raises:
        CheckpointError: the optimizer's file asks for a class that DeepSpeed's files do not need, or it or the file of
            the rank's state is damaged or holds something else.
    """
    engine, ranks = trained.engine, ranks_of(trained.model) or TensorGroup(None, 1, 0)
    found = len(list(checkpoint.glob("rank-*.json")))
    then = found // shares  # the tensor-parallel degree of the saved run
    same = (found, then) == (world.size, ranks.degree)
    states = _states_file(checkpoint, world.rank if same else world.rank // ranks.degree % shares * then)
    try:
        saved = json.loads(read_input(states))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{states}: cannot be read: {reason_of(error)}") from error
    zero = engine.zero_optimization()
    if same or not (zero or isinstance(engine.optimizer, OneProcessAdamW)):
        rank = world.rank if zero else world.rank % _part(trained).group_size
        state = _read_optimizer(_optimizer_file(checkpoint, rank))
    else:
        files = [_optimizer_file(checkpoint, rank) for rank in range(found)]
        with _naming(checkpoint):
            state = resharded(trained, files, then, world, ranks, _read_optimizer)
    if zero:
        # DeepSpeed expects the states of all ranks, but reads only that of this rank.
        _load_optimizer(engine, [state] * world.size, checkpoint, load_from_fp32_weights=engine.bfloat16_enabled())
    else:
        _load_optimizer(engine, state, checkpoint)
    try:
        for name in _COUNTERS:
            setattr(engine, name, saved["engine"][name])
        set_random_state(saved["random"])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{states}: does not hold the state of a rank: {reason_of(error)}") from error


def _part(trained: Trained) -> OwnPart:
    """This rank's part of the model, or of what trains if the model's own weights are frozen."""
    return own_part(trained.model) if trained.parts is None else trained_part(trained.parts)


def _load_optimizer(engine: Any, state: Any, checkpoint: Path, **how: Any) -> None:
    """Loads what ``_read_optimizer`` read."""
    with _naming(checkpoint):
        own = _optimizer_state(engine)
        for each in state if isinstance(state, list) else [state]:
            _require_shapes(own, each)
        engine.optimizer.load_state_dict(state, **how)
        base = getattr(engine.optimizer, "optimizer", engine.optimizer)  # that which ZeRO gives its partitions to
        for parameter, kept in base.state.items():  # the moments, which DeepSpeed takes over as they are
            moments = {n: t for n, t in kept.items() if _has_places(t) and not n.startswith(_OF_BLOCKS)}
            _require_shapes(dict.fromkeys(moments, parameter), moments)


@contextmanager
def _naming(checkpoint: Path) -> Iterator[None]:
    """A block whose errors about the optimizer's state name it. Errors of devices and of other ranks pass."""
    try:
        yield
    except Exception as error:
        if type(error) not in _OF_OTHER_CONTENT:
            raise
        what = f"{checkpoint / OPTIMIZER}: does not hold the state of this optimizer: {reason_of(error)}"
        raise CheckpointError(what, _RESUME_EARLIER) from error


def _has_places(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _require_shapes(own: Any, saved: Any) -> None:
    """Refuses tensors of other shapes than the optimizer has, because copying would repeat the values of small ones.

    Raises:
        ValueError: a tensor has another shape.
    """
    if isinstance(own, Tensor) and isinstance(saved, Tensor) and own.shape != saved.shape:
        raise ValueError(f"a tensor of shape {list(saved.shape)}, not {list(own.shape)}")
    if isinstance(own, dict) and isinstance(saved, dict):
        for key in own.keys() & saved.keys():
            _require_shapes(own[key], saved[key])
    elif isinstance(own, list | tuple) and isinstance(saved, list | tuple):
        for one, other in zip(own, saved, strict=False):
            _require_shapes(one, other)


def _read_optimizer(path: Path) -> Any:
    """The state in an optimizer's file, which is a pickle. It may name tensors and three classes of DeepSpeed only.

    The hashes in the manifest do not protect against somebody who writes the manifest anew.
    """
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds objects that no optimizer of fcsd saves; none was loaded",
            "Do not use this checkpoint: somebody changed it, or another version of DeepSpeed wrote it.",
        ) from error
    except Exception as error:  # that of an empty or cut file has many types
        if isinstance(error, (FileNotFoundError, PermissionError, torch.OutOfMemoryError)):
            raise
        raise CheckpointError(f"{path}: cannot be read: {reason_of(error)}", _RESUME_EARLIER) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: holds no state of an optimizer", _RESUME_EARLIER)
    return state


def _optimizer_state(engine: TrainEngine) -> dict[str, Any]:
    from deepspeed.checkpoint.constants import SINGLE_PARTITION_OF_FP32_GROUPS

    state = engine.optimizer.state_dict()
    if engine.zero_optimization() and not engine.bfloat16_enabled():
        del state[SINGLE_PARTITION_OF_FP32_GROUPS]  # equal to the weights, see ``restore``
    return state


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which each tensor is replaced by a value of ``function``."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return type(value)((key, _mapped(each, function)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, function) for each in value)
    return value


def _states_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.json"


def _optimizer_file(directory: Path, rank: int) -> Path:
    return directory / OPTIMIZER / f"rank-{rank}.pt"


def random_state() -> dict[str, Any]:
    """The states of all global random generators of this process, as values that JSON can express."""
    version, words, position = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": [version, list(words), position],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _state_text(torch.get_rng_state()),
        "cuda": None if cuda is None else _state_text(cuda),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Restores the states that ``random_state`` returned."""
    version, words, position = state["python"]
    random.setstate((version, tuple(words), position))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_state_tensor(state["torch"]))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(_state_tensor(state["cuda"]))


def _state_text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _state_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
