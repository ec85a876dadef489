"""Quantises a converted model by llm-compressor: ``fcsd export --quantise``.

llm-compressor traces the model between its decoder layers, so that all streams travel from layer to layer, and the text
that calibrates it passes through the model's own wiring.

AWQ and SmoothQuant multiply what one module returns by a factor for each channel, and divide the weights of those that
read it. llm-compressor finds such pairs by the name of the model's class. Here they are found in a pass of the model,
and a pair is used if the logits stay the same when its tensors are scaled so.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fcsd.checkpoint import INDEX, read_object
from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.disk import scratch
from fcsd.distill.layer_costs import calibration_rows
from fcsd.errors import BadInputError, ConfigError, FcsdError
from fcsd.models.build import arch_of, decoder_layers, load_model
from fcsd.models.wiring import mixer, mlp_of
from fcsd.parity import logits, token_ids

log = logging.getLogger(__name__)

ROWS, TOKENS = 128, 512  # of the text that calibrates
GROUPS = (128, 64, 32, 16)  # inputs of a weight that share a scale, the first that divides all
_SMOOTHING = 0.8  # SmoothQuant's share of the activations' range that moves into the weights
_NEAR = 0.02  # the same for files that were read again: a layer may round in another order than its simulation
_SAME = 1e-3  # how far logits may move, as a share of their norm, if nothing but the order of factors changes


@dataclass(frozen=True)
class Method:
    """What ``--quantise`` does.

    Attributes:
        scheme: compressed-tensors' name of what is stored.
        calibrates: whether a text is never, possibly or always read.
    """

    scheme: str
    calibrates: str


METHODS = {
    "W4A16": Method("W4A16", "possibly"),
    "AWQ": Method("W4A16", "always"),
    "W8A8": Method("W8A8", "possibly"),
    "FP8_DYNAMIC": Method("FP8_DYNAMIC", "never"),
    "FP8_BLOCK": Method("FP8_BLOCK", "never"),
    "NVFP4A16": Method("NVFP4A16", "never"),
}


def check_method(name: str | None, calibration: Path | None) -> None:
    """Refuse what cannot be done, before anything is read.

    Raises:
        ConfigError: the method is unknown, needs a text and has none, or has one and needs none.
    """
    if name is None:
        if calibration is not None:
            raise ConfigError("--calibration is the text for --quantise, which is not given")
        return
    if name not in METHODS:
        raise ConfigError(f"--quantise {name}: there is no such method", f"Choose one of {', '.join(METHODS)}.")
    reads = METHODS[name].calibrates
    if reads == "never" and calibration is not None:
        raise ConfigError(f"--quantise {name} reads no text", "Leave out --calibration.")
    if reads == "always" and calibration is None:
        raise ConfigError(f"--quantise {name} needs a text", "Give one by --calibration FILE.")


def quantise_directory(
    source: Path, out: Path, name: str, calibration: Path | None
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """Quantise the converted model in ``source``, and write its shards and their index to ``out``.

    Args:
        calibration: a text file (``.jsonl`` or ``.parquet``); None for rounding to nearest without a text.

    Returns:
        The ``quantization_config`` of ``config.json``, token ids ``[1, seq]`` and what the files compute from them.

    Raises:
        BadInputError: the text cannot be read, or no group of inputs divides the layers.
        FcsdError: the files do not load to what was computed in memory.
    """
    model = load_model(source)
    texts = [] if calibration is None else calibration_rows(model, source, calibration, ROWS, TOKENS)
    quantise_model(model, source, name, [row[0] for row in texts])
    expected = _of_weights(model)
    with scratch(out, "saved-") as saved:
        model.save_pretrained(saved, save_compressed=True)
        stored = read_object(saved / "config.json")["quantization_config"]
        again = load_model(saved, decode=False)  # as transformers and compressed-tensors compute it
        for tensor in (*again.parameters(), *again.buffers()):  # a sum's order depends on where in memory weights lie
            tensor.data = tensor.data.clone()
        found = logits(again)
        del again
        of_weights = _of_weights(load_model(saved, decode=True))
        if not torch.isfinite(found).all() or (of_weights - expected).norm() > _NEAR * expected.norm():
            raise FcsdError(f"{source}: quantised by {name}, its files do not load to what was computed in memory")
        for file in (*saved.glob("*.safetensors"), *saved.glob(INDEX)):
            file.rename(out / file.name)
    return stored, token_ids(model), found


def _of_weights(model: PreTrainedModel) -> Tensor:
    """A quantised model's logits in fp32 without the rounding of activations.

    llm-compressor rounds those of routed experts, and transformers, which computes them as one module, does not.
    """
    found = [getattr(module, "quantization_scheme", None) for module in model.modules()]
    rounded = [(scheme, scheme.input_activations) for scheme in found if scheme is not None]
    try:
        for scheme, _ in rounded:
            scheme.input_activations = None
        with torch.no_grad():
            return model(input_ids=token_ids(model).to(model.device), use_cache=False).logits.float().cpu()
    finally:
        for scheme, activations in reversed(rounded):  # layers may share a scheme, whose first value is its own
            scheme.input_activations = activations


def card_section(name: str, calibrated: bool) -> str:
    """What the card says of the weights."""
    how = "calibrated on a text, in the wiring of this model" if calibrated else "rounded to nearest, without a text"
    return (
        f"\n## Quantised\n\nThe linear layers inside of decoder layers are stored as {METHODS[name].scheme} "
        f"(compressed-tensors), {how}, by llm-compressor {version('llmcompressor')}.\n"
    )


def quantise_model(model: PreTrainedModel, source: Path, name: str, rows: Sequence[Tensor], at_once: int = 1) -> None:
    """Quantise the linear layers of a model's decoder layers, in place; routers, embeddings and heads stay.

    Args:
        model: loaded from ``source``, with its own wiring.
        source: a directory with the model's config and tokenizer.
        name: one of ``METHODS``.
        rows: the token ids ``[tokens]`` that calibrate; empty for rounding to nearest.
        at_once: how many rows pass a layer together, which then must have one length.

    Raises:
        BadInputError: no group of inputs divides the layers.
    """
    from datasets import Dataset
    from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
    from llmcompressor.logger import LoggerConfig, configure_logger  # pyright: ignore[reportMissingImports]
    from llmcompressor.modeling.moe.linearize import linearize_moe  # pyright: ignore[reportMissingImports]

    configure_logger(LoggerConfig(disabled=True))  # it would print hundreds of lines
    linearize_moe(model)  # routed experts become linear layers, one for each expert
    data: dict[str, Any] = {}
    if rows:
        columns = {"input_ids": [row.tolist() for row in rows], "attention_mask": [[1] * len(row) for row in rows]}
        longest = max(map(len, rows))
        data = {"dataset": Dataset.from_dict(columns), "num_calibration_samples": len(rows), "max_seq_length": longest}
        data |= {"shuffle_calibration_samples": False, "pipeline": "sequential", "batch_size": at_once}
    model.config._name_or_path = str(source)  # where llm-compressor looks for a config, although it has the model
    steps = _modifiers(model, name, bool(rows))
    # The model's code is fcsd's, but llm-compressor asks by the name of a directory whether remote code may run.
    with _nothing_pinned():
        oneshot(model=model, recipe=steps, processor=load_tokenizer(source), trust_remote_code_model=True, **data)


@contextmanager
def _nothing_pinned() -> Iterator[None]:
    """Let llm-compressor's AWQ pin no memory where there is no GPU to which it would be copied: it would fail."""
    from llmcompressor.pipelines.cache import IntermediatesCache  # pyright: ignore[reportMissingImports]

    pin = IntermediatesCache.pin_memory
    if not torch.accelerator.is_available():
        IntermediatesCache.pin_memory = lambda *_: None
    try:
        yield
    finally:
        IntermediatesCache.pin_memory = pin


def _modifiers(model: PreTrainedModel, name: str, calibrated: bool) -> list[Any]:
    from llmcompressor.modifiers.gptq import GPTQModifier  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # pyright: ignore[reportMissingImports]

    ignore = ignored(model)
    given: dict[str, Any] = {"ignore": ignore}
    if METHODS[name].scheme == "W4A16":
        weights = {"num_bits": 4, "strategy": "group", "group_size": group_size(model, ignore)}
        given["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    else:
        _require_fit(model, ignore, name)
        given |= {"targets": "Linear", "scheme": METHODS[name].scheme}
    if not calibrated:
        return [QuantizationModifier(**given)]
    if name == "AWQ":
        from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier  # pyright: ignore[reportMissingImports]

        pairs = [AWQMapping(read, readers) for read, readers in smoothed(model).items()]
        return [AWQModifier(mappings=pairs), QuantizationModifier(**given)]
    if name == "W8A8":
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier  # pyright: ignore[reportMissingImports]

        norms: Any = [
            (readers, read)
            for read, readers in smoothed(model).items()
            if not isinstance(model.get_submodule(read), nn.Linear)
        ]
        return [SmoothQuantModifier(smoothing_strength=_SMOOTHING, mappings=norms), GPTQModifier(**given)]
    return [GPTQModifier(**given)]


def ignored(model: PreTrainedModel) -> list[str]:
    """The linear layers that stay as they are: those outside of decoder layers, routers and gates of experts."""
    blocks = arch_of(model.config).blocks
    layers: Any = decoder_layers(model)
    inside = {module for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}
    for layer in layers:
        for gate in (blocks.router, blocks.shared_gate):
            owner: Any = blocks.sparse(layer)
            if gate is not None and (found := getattr(owner, gate, None)) is not None:
                inside -= set(found.modules())
    return [path for path, module in model.named_modules() if isinstance(module, nn.Linear) and module not in inside]


def group_size(model: PreTrainedModel, ignore: Sequence[str]) -> int:
    """How many inputs of a weight share a scale: 128, or less where 128 does not divide the inputs of every layer.

    Raises:
        BadInputError: not even the smallest group does.
    """
    widths = {
        module.in_features
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and path not in ignore
    }
    for size in GROUPS:
        if all(width % size == 0 for width in widths):
            return size
    raise BadInputError(
        f"no group of {GROUPS[-1]} inputs or more divides the layers' widths {sorted(widths)}",
        "Quantise to W8A8 or FP8_DYNAMIC, which have no groups.",
    )


def _require_fit(model: PreTrainedModel, ignore: Sequence[str], name: str) -> None:
    """Refuse a model that llm-compressor or transformers would fail on in the middle.

    Raises:
        BadInputError: blocks or groups do not divide a layer, or its dtype is not one that the format is read in.
    """
    if name == "NVFP4A16" and model.dtype != torch.bfloat16:
        raise BadInputError(f"NVFP4A16 is read in bf16, and the weights are in {model.dtype}", "Convert a bf16 model.")
    rows, columns = {"FP8_BLOCK": (128, 128), "NVFP4A16": (1, 16)}.get(name, (1, 1))
    for path, module in model.named_modules():
        if not isinstance(module, nn.Linear) or path in ignore:
            continue
        if module.out_features % rows or module.in_features % columns:
            raise BadInputError(
                f"{path}: blocks of [{rows}, {columns}] do not divide its weight "
                f"[{module.out_features}, {module.in_features}], as {name} needs",
                "Quantise to W8A8 or FP8_DYNAMIC, which have no blocks.",
            )


def smoothed(model: PreTrainedModel) -> dict[str, list[str]]:
    """The module before each place where channels can be scaled, and the linear layers that read what it returns.

    These are norms before attentions and MLPs, and ``up_proj`` before ``down_proj``. A norm that something else reads
    as well, such as a router or routed experts, is left out: with its output scaled the logits would be others.
    """
    candidates = _candidates(model)
    expected = logits(model)
    groups: dict[tuple[str, ...], list[str]] = defaultdict(
        list
    )  # places that are alike in all layers are tried at once
    for read, readers in candidates.items():
        groups[tuple(re.sub(r"\d+", "", path) for path in (read, *readers))].append(read)
    found: dict[str, list[str]] = {}
    for alike in groups.values():
        tried = {read: candidates[read] for read in alike}
        if (_scaled(model, tried) - expected).norm() <= _SAME * expected.norm():
            found |= tried
    return found


def _candidates(model: PreTrainedModel) -> dict[str, list[str]]:
    """Norms and the linear layers of the same decoder layer that are called with their very output; up and down."""
    blocks = arch_of(model.config).blocks
    paths = {module: path for path, module in model.named_modules()}
    layers: Any = decoder_layers(model)
    outputs: dict[int, nn.Module] = {}
    kept: list[Tensor] = []  # so that no tensor gets the place in memory of another
    found: dict[str, list[str]] = defaultdict(list)
    hooks = []

    def returned(module: nn.Module, _: Any, out: Tensor) -> None:
        outputs[out.data_ptr()] = module
        kept.append(out)

    def called(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        source = outputs.get(given[0].data_ptr())
        if source is not None and given[0].shape[-1] == kept[0].shape[-1]:
            found[paths[source]].append(paths[module])

    for layer in layers:
        for name in (blocks.attn_norms[0], blocks.mlp_norms[0]):
            if name is not None and "." not in name:
                hooks.append(getattr(layer, name).register_forward_hook(returned))
        for part in (mixer(blocks, layer), mlp_of(blocks, layer)):
            hooks += [m.register_forward_pre_hook(called) for m in part.modules() if isinstance(m, nn.Linear)]
            for module in part.modules():
                up, down = getattr(module, "up_proj", None), getattr(module, "down_proj", None)
                if isinstance(up, nn.Linear) and isinstance(down, nn.Linear):
                    found[paths[up]].append(paths[down])
    logits(model)
    for hook in hooks:
        hook.remove()
    return {read: sorted(readers, key=list(paths.values()).index) for read, readers in found.items()}


def _scaled(model: PreTrainedModel, pairs: dict[str, list[str]]) -> Tensor:
    """The model's logits with each channel of some outputs scaled, and scaled back before the layers that read it."""
    hooks: list[Any] = []
    for number, (read, readers) in enumerate(pairs.items()):
        generator = torch.Generator().manual_seed(number)
        width = cast(nn.Linear, model.get_submodule(readers[0])).in_features
        powers = torch.randint(-2, 3, (width,), generator=generator)  # powers of two change no bit of a product
        factor = torch.exp2(powers.float()).to(model.device, model.dtype)
        hooks.append(model.get_submodule(read).register_forward_hook(lambda _, __, out, factor=factor: out * factor))
        for path in readers:
            hook = model.get_submodule(path).register_forward_pre_hook
            hooks.append(hook(lambda _, given, factor=factor: (given[0] / factor, *given[1:])))
    try:
        return logits(model)
    finally:
        for hook in hooks:
            hook.remove()
