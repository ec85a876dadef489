"""Proves that a conversion changed nothing but the wiring.

With the wiring off, the first layers of the converted directory must reproduce the original's logits bit for bit. With
the wiring on, exactly the chosen layers must be rewired, and the logits must be finite. If a model is larger than
memory, only as many of its first layers are built as fit, and only the tensors of these layers are read.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.checkpoint import CheckpointConfig, Layout
from fcsd.checkpoint.files import LAYERS
from fcsd.errors import BadInputError, FcsdError
from fcsd.foreign_errors import reason_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from fcsd.models.arch import Arch

_TOKENS = 24
_BUG = "This is a bug in fcsd. Please report it with the model's name."
_SHARE = 0.7  # share of the free memory that weights may take; a forward pass of _TOKENS tokens needs little more
_CODES = ("U8", "I8", "I32", "F8_E4M3")  # dtypes of quantised weights, which are decoded to bf16
# config lists with one entry a layer
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers", "swiglu_limits")
_LAYER_LISTS = ("mlp_only_layers", "moe_layers")  # config lists of layer indices


@dataclass(frozen=True)
class Proof:
    """How many layers are compared, and the disk reads and memory that this needs.

    Attributes:
        layers: how many of the first layers are compared; 0 if not one fits in memory.
        of: the number of layers of the model.
        read_bytes: bytes read from disk, once from each directory.
        memory_bytes: the largest number of bytes in memory at a time.
        free_bytes: the free memory in bytes.
    """

    layers: int
    of: int
    read_bytes: int
    memory_bytes: int
    free_bytes: int

    def to_text(self) -> str:
        """One line, to be logged before the proof runs."""
        from rich.filesize import decimal

        return (
            f"parity: first {self.layers} of {self.of} layers, reads {decimal(self.read_bytes)} twice, "
            f"needs {decimal(self.memory_bytes)} of {decimal(self.free_bytes)} free memory"
        )


def plan_proof(layout: Layout, config: CheckpointConfig, arch: "Arch", free_bytes: int | None = None) -> Proof:
    """Find how many layers fit in memory, from headers alone.

    Args:
        free_bytes: the free memory; measured by default.
    """
    free = free_memory() if free_bytes is None else free_bytes
    of = config.text["num_hidden_layers"]
    growth = 1.0 if config.method is None else 16 / min(scheme.bits for scheme in config.method.schemes)
    held, in_memory = [0] * (of + 1), [0.0] * (of + 1)  # by layer; the last is for what lies outside
    for name, tensor in layout.tensors.items():
        index, size = layer_index(arch, name), tensor.end - tensor.start
        if index is None or index < of:
            held[of if index is None else index] += size
            in_memory[of if index is None else index] += size * (growth if tensor.dtype in _CODES else 1)
    layers, read, memory = 0, 0, 0
    # A tensor with a part for each layer fits a model of all layers alone.
    spans = any(name.endswith(arch.spanning) for name in layout.tensors)
    for count in (of,) if spans else range(1, of + 1):
        # While transformers fuses the experts of a layer, the layer is in memory twice.
        need = int(in_memory[of] + sum(in_memory[:count]) + max(in_memory[:count]))
        if need > free * _SHARE:
            break
        layers, read, memory = count, held[of] + sum(held[:count]), need
    return Proof(layers, of, read, memory, free)


def prove_parity(original: Layout, converted: Path, config: CheckpointConfig, arch: "Arch", layers: int) -> None:
    """Build the first ``layers`` layers from both directories and compare their logits.

    Args:
        converted: the converted directory, with the same shards under the same names.
        layers: how many of the first layers are compared, see ``plan_proof``.

    Raises:
        FcsdError: the logits differ, the wiring is not on, or it gives non-finite logits.
        BadInputError: the original does not load or run, or its own logits are not finite.
    """
    import torch

    from fcsd.models.build import decoder_layers
    from fcsd.models.desync import DesyncLayer
    from fcsd.models.wiring import WiredLayer, unwire_layers

    shards = [name for name, header in original.shards.items() if _wanted(header, arch, layers)]
    expected = _original_logits(original, shards, config, arch, layers)
    if not torch.isfinite(expected).all():
        raise BadInputError(
            f"{original.path}: the logits of the original itself are not finite",
            "Its weights are probably damaged: download them again.",
        )

    model = first_layers(converted, [converted / name for name in shards], config, arch, layers)
    on = {i for i, layer in enumerate(decoder_layers(model)) if isinstance(layer, WiredLayer | DesyncLayer)}
    if missing := sorted(set(model.config.fcsd["layers"]) - on):
        raise FcsdError(f"{converted}: layers {missing} are not rewired", _BUG)
    if not torch.isfinite(logits(model)).all():
        raise FcsdError(f"{converted}: the rewired model's logits are not finite", _BUG)
    unwire_layers(decoder_layers(model))
    if not torch.equal(logits(model), expected):
        raise FcsdError(f"{converted}: with the wiring off, logits differ from {original.path}'s", _BUG)


def _original_logits(
    original: Layout, shards: list[str], config: CheckpointConfig, arch: "Arch", layers: int
) -> "Tensor":
    try:
        return logits(first_layers(original.path, [original.files[name] for name in shards], config, arch, layers))
    except (FcsdError, OSError, MemoryError):
        raise
    except Exception as error:  # a config.json value that no check covers can fail anywhere in transformers
        raise BadInputError(f"{original.path}: transformers cannot run this model ({reason_of(error)})") from error


def free_memory() -> int:
    """The bytes of memory that this process may still use, on this machine and in its control group (a container's)."""
    meminfo = Path("/proc/meminfo").read_text()
    free = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return max(free, 0)


def layer_index(arch: "Arch", name: str) -> int | None:
    """The decoder layer that a tensor on disk belongs to; None for a tensor outside of the layers."""
    _, decoder = arch.classes["AutoModelForCausalLM"]
    older = ".".join(reversed(decoder.split(".")))  # files may say language_model.model for model.language_model
    names = "|".join(map(re.escape, (decoder, older, arch.stored or decoder)))
    match = re.match(rf"(?:{names})\.{LAYERS}(\d+)\.", name)
    return int(match[1]) if match else None


def shortened(config: Any, layers: int) -> Any:
    """The config, changed in place, of a model that has only the first ``layers`` layers."""
    text = config.get_text_config()
    text.num_hidden_layers = layers
    vars(config).pop("farskip", None)  # of a model that AMD trained: its wiring is off where the other's is
    if text.is_heterogeneous:
        own = text.to_dict()["per_layer_config"]
        text.per_layer_config = {layer: fields for layer, fields in own.items() if int(layer) < layers}
    for key, value in list(vars(text).items()):
        if key in _PER_LAYER and value is not None:
            setattr(text, key, value[:layers])
        elif key in _LAYER_LISTS and value is not None:
            setattr(text, key, [i for i in value if i < layers])
    if config.model_type.startswith("fcsd_"):
        config.fcsd = {**config.fcsd, "layers": [i for i in config.fcsd["layers"] if i < layers]}
    return config


def _wanted(names: Iterable[str], arch: "Arch", layers: int) -> list[str]:
    """The tensors that a model of the first ``layers`` layers has; tensors outside of the layers are among them."""
    return [name for name in names if (index := layer_index(arch, name)) is None or index < layers]


def first_layers(
    directory: Path, shards: list[Path], base: CheckpointConfig, arch: "Arch", layers: int
) -> "PreTrainedModel":
    """A model of the first ``layers`` layers, on the CPU, in eval mode.

    Args:
        shards: the files that hold the tensors of these layers.
        layers: the number of layers. Only the tensors that they need are read.

    Raises:
        BadInputError: the tensors do not match those of the model, or the installed transformers cannot compute it.
    """
    import torch
    import transformers
    from safetensors import safe_open

    from fcsd.models.build import causal_lm_class, register, require_working, without_further_outputs
    from fcsd.models.quantised.decode import plain_tensors
    from fcsd.models.quantised.method import without_quantisation

    require_working(arch)
    register(arch.model_type)
    config = shortened(transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False), layers)
    config, _ = without_further_outputs(config)
    tensors: dict[str, Any] = {}
    for shard in shards:
        with safe_open(shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in _wanted(file.keys(), arch, layers)}
    if base.method is not None:
        config = without_quantisation(config)
        tensors = plain_tensors(tensors, base.method, config.dtype or torch.bfloat16)
    loaded: Any = causal_lm_class(config).from_pretrained(
        None, config=config, state_dict=tensors, output_loading_info=True, experts_implementation="eager"
    )
    model, report = loaded
    if problems := {kind: sorted(map(str, keys))[:5] for kind, keys in report.items() if keys}:
        raise BadInputError(f"{directory}: the first {layers} layers do not load: {problems}")
    # Mapped from a file, weights lie at any address, and the last bit of a product depends on it.
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model.eval()


def token_ids(model: "PreTrainedModel") -> "Tensor":
    """Token ids ``[1, _TOKENS]``, the same for every model with the same size of vocabulary."""
    import torch

    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))


def logits(model: "PreTrainedModel") -> "Tensor":
    """The model's logits ``[1, _TOKENS, vocab]`` on ``token_ids``."""
    import torch

    with torch.no_grad():
        return model(input_ids=token_ids(model), use_cache=False).logits
