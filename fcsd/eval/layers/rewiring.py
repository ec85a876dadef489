"""Holds an original model in memory and rewires it in place repeatedly, for a sweep and a search over layers."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.disk import file_sha256
from fcsd.errors import BadInputError, ConfigError
from fcsd.models.build import arch_of, decoder_layers, load_on_device, unwired, wire
from fcsd.models.load_options import check_device, check_dtype
from fcsd.models.wiring import Blocks, Wiring, plan_layers
from fcsd.version import __version__

# Indices of decoder layers, ascending.
Layers = tuple[int, ...]


@dataclass(frozen=True)
class Subject:
    """An original model, and the wiring whose layers are varied.

    Attributes:
        sha256: the hash of the model's configuration and weights.
        wiring: the wiring, with an empty set of layers.
    """

    name: str
    sha256: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    wiring: Wiring

    @property
    def depth(self) -> int:
        """The number of decoder layers."""
        return len(decoder_layers(self.model))

    @property
    def halves(self) -> list[tuple[bool, bool]]:
        """For each decoder layer, see ``Blocks.halves``."""
        return [arch_of(self.model.config).blocks.halves(layer) for layer in decoder_layers(self.model)]

    def wired(self, layers: Layers) -> Wiring:
        """The wiring that converts exactly these layers."""
        return replace(self.wiring, layers=layers)

    @contextmanager
    def converted(self, layers: Layers) -> Iterator[PreTrainedModel]:
        """The model with exactly these layers converted; afterwards no layer is.

        Raises:
            ConfigError: the wiring does not fit the model.
        """
        try:
            yield wire(self.model, self.wired(layers))
        finally:
            wire(self.model, unwired())

    def identity(self) -> dict[str, Any]:
        """All that a measurement depends on besides the layers and the data, as JSON-like data."""
        block = self.wiring.to_block()
        return {
            "model_sha256": self.sha256,
            **{key: block[key] for key in ("wiring", "variant", "border", "distance")},
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "versions": {"fcsd": __version__, **{name: version(name) for name in ("lm_eval", "transformers", "torch")}},
        }


def load_subject(
    model: str,
    *,
    wiring: str = "farskip",
    variant: str = "full",
    device: str | None = None,
    dtype: str | None = None,
) -> Subject:
    """Load an original model for rewiring.

    Args:
        model: directory or hub id.
        device: ``cpu``, or ``cuda`` to let accelerate spread the model over all GPUs; None for the GPUs if there are
            any.
        dtype: the data type of the weights; None for float32 on the CPU and bfloat16 on GPUs.

    Raises:
        ConfigError: the wiring, variant or dtype is unknown, or the wiring does not fit the model.
        BadInputError: the checkpoint cannot be used, or has been converted already.
    """
    from fcsd.checkpoint import read_config, resolve
    from fcsd.checkpoint.location import short_names
    from fcsd.checkpoint.tokenizer import load_tokenizer

    check_dtype(dtype)
    check_device(device)
    try:
        template = Wiring(wiring, (), variant=variant)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    path = resolve(model).path
    if read_config(path).rewired is not None:
        raise BadInputError(f"{path}: is converted already", "Name the original that it was converted from.")
    network = load_on_device(path, device=device, dtype=dtype)
    return Subject(short_names([model])[0], model_sha256(path), network, load_tokenizer(path), template)


def model_sha256(path: Path) -> str:
    """One hash over the names and contents of a model directory's JSON and safetensors files."""
    digest = hashlib.sha256()
    for file in sorted([*path.glob("*.json"), *path.glob("*.safetensors")]):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return digest.hexdigest()


def first(n: int) -> Layers:
    """The first ``n`` layers."""
    return tuple(range(n))


def last(n: int, depth: int) -> Layers:
    """The last ``n`` of ``depth`` layers."""
    return tuple(range(depth - n, depth))


def reads_in_flight(wiring: Wiring, halves: Sequence[tuple[bool, bool]]) -> int:
    """How many of a model's reads, one for each sub-block, do not wait for the sub-block just before them.

    This number measures how much a conversion gains. A layer that is converted alone adds one such read, because its
    MLP does not wait for its attention. Its attention does not wait either if the layer before passes on a partial
    stream. A dense layer's MLP is counted as if it were a MoE.
    """
    plans, found = plan_layers(wiring, len(halves), Blocks(), halves=halves), 0
    for i, plan in plans.items():
        attends, has_mlp = halves[i]
        found += attends and has_mlp and plan.mlp > 0
        found += (plan.attn if attends else plan.mlp) > 0 and i - 1 in plans and plans[i - 1].hands_on > 1
    return found
