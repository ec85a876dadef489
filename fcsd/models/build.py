"""Makes and registers the classes of converted models, rewires models in place, and loads checkpoints strictly."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from ..errors import BadInputError, ConfigError
from ..extras import require_extra
from ..foreign_errors import reason_of
from ..load_options import default_dtype
from .arch import Arch
from .archs import ARCHS
from .config_keys import ADAPTER, BOTH, DIVIDE, PREFIX, REFUSAL, UNTIE, WEIGHTS_FILE, expert_count
from .export_template import render
from .fused import fuse_parts
from .products import unknown_type
from .quantised.decode import plain_tensors
from .quantised.layouts import Scheme
from .quantised.method import Method, method_of, without_quantisation
from .wiring import WiredModel, plan_layers, wire_layers
from .wiring_block import DESYNC, Wiring

# With these settings a model returns the logits, and what the next step needs, in an object with names.
LOGITS_ALONE = {
    "output_router_logits": False,
    "output_hidden_states": False,
    "output_attentions": False,
    "return_dict": True,
}
Asked = list[tuple[str, str, Any]]  # key of a part of a config, one of LOGITS_ALONE, and its value there


def arch_of(config: PretrainedConfig) -> Arch:
    """The row of ``ARCHS`` for the config of an original or converted model.

    Raises:
        BadInputError: no row has this ``model_type``, or the row is not proven with the type of the language model; or
            the model was trained with a wiring that AMD's code has and transformers' has not.
    """
    model_type = config.model_type.removeprefix(PREFIX)
    if getattr(config, "farskip", False):
        hint = "`fcsd convert MODEL OUT` writes a copy of Instella-MoE with its wiring, which every command takes."
        raise BadInputError("the model was trained with AMD's farskip keys, which transformers does not read", hint)
    if model_type not in ARCHS:
        raise unknown_type(model_type, getattr(config, "architectures", None))
    arch = ARCHS[model_type]
    if reason := arch.unsupported(config.get_text_config().model_type):
        raise BadInputError(reason)
    return arch.around(config.get_text_config().model_type)


def require_working(arch: Arch) -> None:
    """Refuse a type that the installed transformers cannot compute.

    Raises:
        BadInputError: its own model of the type is known to end in an error.
    """
    if version("transformers") == arch.fails_in:
        text = f"transformers {arch.fails_in} cannot compute a {arch.model_type}: its own model ends in an error"
        raise BadInputError(text, f"Install another version: pip install 'transformers>=5.17,<6,!={arch.fails_in}'")


def decoder_of(model: PreTrainedModel) -> Any:
    """The module with the embedding, the decoder layers and the final norm, of a model of any supported class."""
    paths = {name: path for name, path in arch_of(model.config).classes.values()}
    return model.get_submodule(paths[type(model).__name__.removeprefix("Fcsd")])


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model of any supported class: without a head, with a head, or multimodal."""
    return decoder_of(model).layers


def wire(model: PreTrainedModel, wiring: Wiring) -> PreTrainedModel:
    """Rewire a model in place. A former wiring is undone first; ``unwired()`` restores transformers' own graph.

    No weight changes, and inputs and outputs keep their shapes: token ids ``[batch, seq]`` give logits
    ``[batch, seq, vocab]``. The config does not change either, so ``save_pretrained`` cannot record the new wiring and
    raises ConfigError; ``convert_checkpoint`` records it.

    Returns:
        ``model`` itself.

    Raises:
        BadInputError: the architecture is not supported.
        ConfigError: the wiring does not fit the model.
    """
    arch = arch_of(model.config)
    require_desync(model.config, wiring)
    check_injected(model.config, wiring)
    layers: Any = decoder_layers(model)
    try:
        wire_layers(layers, wiring, arch.blocks)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    fuse_parts(model, arch, False)
    for layer in layers:
        if "_hf_hook" in vars(layer):  # accelerate's hook calls the forward that it found
            layer._old_forward = MethodType(type(layer).forward, layer)
    recorded = wiring_of(model.config)
    if wiring == recorded or not (wiring.layers or recorded.layers):
        vars(model).pop("save_pretrained", None)
    else:
        vars(model)["save_pretrained"] = _refuse_to_save
    return model


def require_desync(config: PretrainedConfig, wiring: Wiring) -> None:
    """Refuse a Desync wiring that a model of this config cannot have.

    A rank must own whole key-value heads, as in the code of the Ladder authors, which has the same limit. Only new
    conversions are checked, so a directory that was converted before can still be loaded.

    Raises:
        ConfigError: the architecture has experts or norms outputs on arrival, or the degree does not divide its
            key-value heads.
    """
    if wiring.name not in DESYNC:
        return
    arch = arch_of(config)
    if not arch.dense:
        raise ConfigError(f"{wiring.name} needs a dense architecture; {arch.model_type} has experts")
    if arch.no_desync is not None:
        raise ConfigError(f"{arch.model_type} cannot have the wiring {wiring.name}: {arch.no_desync}")
    heads = config.get_text_config().num_key_value_heads
    if heads % wiring.tp_degree:
        raise ConfigError(
            f"tp_degree {wiring.tp_degree} does not divide the {heads} key-value heads of the model",
            hint="Choose a tensor-parallel degree that divides them.",
        )


def injected_layers(config: PretrainedConfig) -> int:
    """To how many of the first layers' outputs the model's own loop adds the features of images."""
    arch = arch_of(config)
    found: Any = config
    for name in arch.injected.split(".") if arch.injected else ():
        found = getattr(found, name)
    return 0 if arch.injected is None else len(found)


def check_injected(config: PretrainedConfig, wiring: Wiring) -> None:
    """Refuse a wiring under which a layer passes on several streams where image features are added to one.

    Raises:
        ConfigError: the message names the layers and the reason.
    """
    count = injected_layers(config)
    if wiring.name in DESYNC:
        stuck = [i for i in wiring.layers if i < count]
    else:
        plans = plan_layers(wiring, config.get_text_config().num_hidden_layers, arch_of(config).blocks)
        stuck = [i for i, plan in plans.items() if i < count and plan.hands_on > 1]
    if stuck:
        raise ConfigError(
            f"{wiring.name}: layer {stuck[-1]} would pass on a partial stream, and the model adds image features to "
            f"the outputs of layers 0-{count - 1}",
            hint="Use layers: all, which leaves these layers as they are, or choose later layers.",
        )


def without_injected(config: PretrainedConfig, wiring: Wiring) -> Wiring:
    """The wiring of the most layers that still lets the model add image features to the outputs of its first layers."""
    for start in range(injected_layers(config) + 2):
        found = replace(wiring, layers=wiring.layers[start:])
        try:
            check_injected(config, found)
        except ConfigError:
            continue
        return found
    return wiring


def unwired() -> Wiring:
    """The wiring that leaves every layer as transformers built it, as a teacher needs it."""
    return Wiring("standard", ())


def wiring_of(config: PretrainedConfig) -> Wiring:
    """The wiring that a model of this config was built with."""
    block = config.to_dict().get("fcsd")
    return unwired() if block is None else Wiring.from_block(block)


def experts_of(config: PretrainedConfig) -> int:
    """The number of routed experts of a MoE layer; 0 for a dense architecture."""
    return expert_count(config.get_text_config().to_dict())


def key_value_heads(config: PretrainedConfig) -> list[tuple[int, int]]:
    """For each decoder layer, how many key-value heads it has and their width; in Gemma 4 layers differ in both.

    They are those of plain attention. A transformers that has no config for each layer says of all what holds for most.
    """
    text = config.get_text_config()
    layers = getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers
    return [
        (
            getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads,
            getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads,
        )
        for layer in layers
    ]


def logits_factor(config: PretrainedConfig) -> float:
    """The number by which a model multiplies the product of its final hidden states and its output head."""
    row = arch_of(config).logits_factor
    return 1.0 if row is None else getattr(config.get_text_config(), row[0]) ** row[1]


def logits_cap(config: PretrainedConfig) -> float | None:
    """The number ``c`` of a model whose logits are ``c * tanh(logits / c)``; None if it has none."""
    name = arch_of(config).logits_cap
    return None if name is None else getattr(config.get_text_config(), name)


@cache
def config_class(model_type: str) -> type[PretrainedConfig]:
    """The config class of a rewired architecture, for example ``FcsdQwen3MoeConfig``.

    It derives from the base config class, and adds a ``model_type`` of its own and an ``fcsd`` block.
    """
    base = getattr(transformers, ARCHS[model_type].config)
    namespace = {
        "__module__": __name__,
        "__doc__": f"{base.__name__} of a rewired model.",
        "__annotations__": {"fcsd": dict | None},
        "model_type": PREFIX + model_type,
        "fcsd": None,
        WEIGHTS_FILE: property(lambda self: None, lambda self, value: None),  # see REFUSAL
        "to_dict": lambda self: {
            **base.to_dict(self),
            WEIGHTS_FILE: REFUSAL,
        },  # every tool that saves it keeps the guard
    }
    return type(f"Fcsd{base.__name__}", (base,), namespace)


@cache
def model_classes(model_type: str) -> Mapping[str, type[PreTrainedModel]]:
    """Maps the name of each Auto class to the wired model class of an architecture."""
    arch = ARCHS[model_type]
    classes = {}
    for auto, (base_name, decoder) in arch.classes.items():
        base = getattr(transformers, base_name)
        namespace = {
            "__module__": __name__,
            "__doc__": f"{base_name}, wired as its config's ``fcsd`` block says.",
            "config_class": config_class(model_type),
            "fcsd_decoder": decoder,
            "fcsd_blocks": arch.blocks,
            "save_pretrained": _saving_with_code(getattr(transformers, base_name), arch),
        }
        classes[auto] = type(f"Fcsd{base_name}", (WiredModel, base), namespace)
    return classes


def _saving_with_code(base: type[PreTrainedModel], arch: Arch) -> Callable[..., Any]:
    """``save_pretrained`` of a rewired class, as TRL and PEFT call it: the directory loads where fcsd is not installed.

    transformers copies only code that came with a directory, and fcsd's classes did not.
    """

    def save_pretrained(self: Any, save_directory: str | Path, is_main_process: bool = True, **kwargs: Any) -> None:
        if is_main_process and hasattr(self.config, "fcsd"):
            self.config.auto_map = arch.auto_map
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            for name, text in render(arch).items():
                (Path(save_directory) / name).write_text(text, "utf-8")
        base.save_pretrained(self, save_directory, is_main_process=is_main_process, **kwargs)

    return save_pretrained


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ConfigError(
        "the model was rewired in memory, which its config does not say: loaded again, it would compute something else",
        "Convert its directory (fcsd convert), and load and train that: it is saved with its wiring, and `fcsd export` "
        "takes it.",
    )


def causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class of the causal LM of an original or converted config.

    Raises:
        BadInputError: the architecture is not supported.
    """
    arch = arch_of(config)
    gated = arch.blocks.gated is not None and getattr(config, arch.blocks.gated, False)
    if config.model_type.startswith(PREFIX) or gated:
        return model_classes(arch.model_type)["AutoModelForCausalLM"]
    return getattr(transformers, arch.causal_lm)


def register(*model_types: str) -> None:
    """Register the ``fcsd_*`` types of some architectures, or of all: classes, tokenizer, on-disk layout of experts.

    Every type takes the import of its modeling file in transformers.
    """
    register_configs(*model_types)
    for model_type in _usable(model_types):
        own = {model_type: PREFIX + model_type}
        for auto, cls in model_classes(model_type).items():
            getattr(transformers, auto).register(config_class(model_type), cls, exist_ok=True)
            own[cls.__name__.removeprefix("Fcsd")] = cls.__name__
        for theirs, name in own.items():
            mapping = get_checkpoint_conversion_mapping(theirs)
            if mapping is not None:  # without it transformers would initialise the experts at random and only warn
                register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def register_configs(*model_types: str) -> None:
    """Register ``fcsd_*`` types with AutoConfig and AutoTokenizer as ``register`` does; it imports no modeling file."""
    for model_type in _usable(model_types):
        # AutoTokenizer uses the model type if it does not trust tokenizer_config.json (mixtral, glm4_moe).
        TOKENIZER_MAPPING_NAMES[PREFIX + model_type] = TOKENIZER_MAPPING_NAMES.get(model_type)
        AutoConfig.register(PREFIX + model_type, config_class(model_type), exist_ok=True)


def _usable(model_types: Sequence[str]) -> list[str]:
    return [model_type for model_type in model_types or ARCHS if ARCHS[model_type].unsupported() is None]


def converted_config(config: PretrainedConfig, block: dict[str, Any]) -> PretrainedConfig:
    """The config of a rewired model: the fields of ``config``, with the converted type and ``block`` as ``fcsd``.

    Args:
        block: the ``fcsd`` block, from ``Wiring.to_block``.
    """
    fields = config.to_dict()
    fields.pop("model_type")
    return config_class(arch_of(config).model_type)(**{**fields, "fcsd": block})


def without_further_outputs(config: PretrainedConfig) -> tuple[PretrainedConfig, Asked]:
    """A copy of a config whose models return the logits alone, by name, and the settings in which ``config`` differs.

    transformers computes a loss from router logits, which it cannot do in the steps of a generation: they have fewer
    router logits than the attention mask has tokens. It computes attention more slowly if it has to return it, and
    fcsd's engine has no outputs of single layers. A call of the model can still ask for them. A model that is built
    from the copy has the second result as ``fcsd_asked``, so that :func:`stored_config` can give the config to save.
    """
    quiet = deepcopy(config)
    asked = [
        (key, name, getattr(part, name))
        for key, part in _parts(config).items()
        for name, plain in LOGITS_ALONE.items()
        if getattr(part, name, plain) != plain
    ]
    for key, name, _ in asked:
        setattr(_parts(quiet)[key], name, LOGITS_ALONE[name])
    return quiet, asked


def stored_config(model: PreTrainedModel) -> PretrainedConfig:
    """A copy of a loaded model's config, as the user's directory has it; see :func:`without_further_outputs`."""
    config = deepcopy(model.config)
    asked: Asked = vars(model).get("fcsd_asked", [])
    if asked:
        config._attn_implementation = None  # most refuse to return attentions; it is not written to config.json
    for key, name, value in asked:
        setattr(_parts(config)[key], name, value)
    return config


def _parts(config: PretrainedConfig) -> dict[str, PretrainedConfig]:
    """A config and those inside of it, of text and of images, by key; the config itself has the key ``""``."""
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": config, **{name: part for name, part in inner.items() if isinstance(part, PretrainedConfig)}}


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    device_map: str | dict[str, Any] | None = None,
    config: PretrainedConfig | None = None,
    auto: str = "AutoModelForCausalLM",
    decode: bool | None = None,
    **kwargs: Any,
) -> PreTrainedModel:
    """Load an original or converted checkpoint directory, in eval mode.

    A tensor that is missing, left over or of the wrong shape is an error. So is an output head that differs from the
    embedding although the config ties them: other programs would tie them, and compute another function. The model
    returns more than logits only if a call asks for it, whatever the config says.

    Args:
        path: the directory. A converted model has the wiring that it was converted to.
        dtype: the dtype of the weights in memory; ``auto`` is that of the checkpoint.
        device: the device for a model that fits on one device.
        device_map: accelerate's placement for a model that does not fit on one device.
        config: used in place of the directory's config.
        auto: the transformers Auto class to load through.
        decode: whether quantised weights become plain ones, one tensor at a time. False leaves them to transformers and
            the library of their method; None does so on a GPU where :func:`kept_quantised` says that it can.
        kwargs: further arguments of ``from_pretrained``.

    Returns:
        A transformers model: token ids ``[batch, seq]`` give logits ``[batch, seq, vocab]``.

    Raises:
        BadInputError: the architecture is not supported, a file is missing, tensors and config do not match, an adapter
            lies beside the weights, or the installed transformers cannot compute the type.
    """
    if (Path(path) / ADAPTER).is_file():
        raise BadInputError(f"{path}: {BOTH}", DIVIDE)
    try:
        config = config or AutoConfig.from_pretrained(path, trust_remote_code=False)
        require_working(arch_of(config))
        register(arch_of(config).model_type)
        config, asked = without_further_outputs(config)
        # transformers' own table has no causal LM, or one without the images, for some multimodal types
        cls = causal_lm_class(config) if auto == "AutoModelForCausalLM" else getattr(transformers, auto)
        how: dict[str, Any] = {
            **{"dtype": dtype, "device_map": device_map, "trust_remote_code": False, "output_loading_info": True},
            "ignore_mismatched_sizes": True,  # so that they are reported below, by name
        }
        method = method_of(config, path)
        on_gpu = torch.cuda.is_available() and (device_map is not None or str(device).startswith("cuda"))
        if method is not None and (not (on_gpu and kept_quantised(method, config)) if decode is None else decode):
            loaded: Any = _decoded(cls, Path(path), config, method, how | kwargs)
        else:
            loaded = cls.from_pretrained(path, config=config, **how, **kwargs)
        model, report = loaded
    except BadInputError:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
        FileNotFoundError,
    ) as error:
        hint = f"`fcsd inspect {path}` says what is wrong."
        raise BadInputError(f"{path}: {reason_of(error)}", hint) from error
    problems = [
        f"{kind.removesuffix('_keys')} {keys}" for kind in report if (keys := sorted(map(str, report[kind]))[:5])
    ]
    if problems:
        raise BadInputError(f"{path}: tensors do not match the config: {'; '.join(problems)}")
    if untied := sorted(model.get_expanded_tied_weights_keys(all_submodels=True).keys() - model.all_tied_weights_keys):
        # transformers has found other values than in the tensor to which the config ties them, and kept both
        raise BadInputError(f"{path}: config.json ties {untied} to a tensor that has other values", UNTIE)
    vars(model)["fcsd_asked"] = asked
    if asked and model.can_generate() and not (Path(path) / "generation_config.json").is_file():
        # transformers has taken them for settings of generation, with which ``generate`` returns no tensor
        model.generation_config.update(output_hidden_states=None, output_attentions=None, return_dict_in_generate=None)
    return model if device is None else model.to(device)


def _weights_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [path / "model.safetensors"]
    return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


# What transformers 5.23 needs to compute with the weights of a method as they are stored, on a GPU.
_LIBRARIES = {
    "compressed-tensors": ("compressed_tensors",),
    "awq": ("gptqmodel",),
    "gptq": ("gptqmodel", "optimum"),
    "fp8": ("kernels",),
    "fbgemm_fp8": ("fbgemm_gpu",),
    "mxfp4": ("kernels",),
}


def kept_quantised(method: Method, config: PretrainedConfig) -> bool:
    """Whether transformers can compute with weights as they are stored, on the first GPU and with what is installed."""
    if method.name not in _LIBRARIES or not all(map(find_spec, _LIBRARIES[method.name])):
        return False
    if not all(_read_by_transformers(scheme, experts_of(config) > 0) for scheme in method.schemes):
        return False
    return "fp8" not in method.name or torch.cuda.get_device_capability() >= (8, 9)


def _read_by_transformers(scheme: Scheme, experts: bool) -> bool:
    """Whether transformers 5.23 reads a scheme rightly, with experts too, which it joins; docs/quantised_models.md."""
    if scheme.layout == "packed":  # it expects zero points that are not packed, and leaves the order of columns out
        return scheme.symmetric and not scheme.ordered
    return not experts or scheme.layout in ("inverse", "mxfp4") or (scheme.floats and scheme.block in ((0, 0), (1, 0)))


def _decoded(cls: Any, path: Path, config: PretrainedConfig, method: Method, how: dict[str, Any]) -> tuple[Any, Any]:
    """A model with plain weights from quantised files, and transformers' report; ``how`` is for ``from_pretrained``."""
    config = without_quantisation(config)
    if how["dtype"] == "auto":
        how["dtype"] = config.dtype or torch.bfloat16
    kind = getattr(torch, how["dtype"]) if isinstance(how["dtype"], str) else how["dtype"]
    with ExitStack() as files:
        opened = [files.enter_context(safe_open(file, framework="pt")) for file in _weights_files(path)]
        tensors = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118 (no mapping)
        state = plain_tensors(tensors, method, kind)
        model, report = cls.from_pretrained(None, config=config, state_dict=state, **how)
    model.name_or_path = model.config.name_or_path = str(path)
    if model.can_generate() and (given := read_generation_config(path)) is not None:
        model.generation_config = given
    return model, report


def read_generation_config(path: Path) -> GenerationConfig | None:
    """The generation settings in a model directory; None if it has none.

    Raises:
        BadInputError: the file is damaged.
    """
    if not (path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(path)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise BadInputError(f"{path / 'generation_config.json'}: cannot be used: {reason_of(error)}") from error


def load_on_device(path: str | Path, *, device: str | None, dtype: str | None) -> PreTrainedModel:
    """Load a checkpoint directory as the options ``--device`` and ``--dtype`` say; see ``load_model``.

    Args:
        device: ``cpu``, or ``cuda`` to let accelerate spread the model over GPUs and memory; None for ``cuda`` if there
            is a GPU.
        dtype: one of ``load_options.DTYPES``; None for ``load_options.default_dtype``.

    Raises:
        BadInputError: see ``load_model``.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = getattr(torch, dtype or default_dtype(device == "cpu"))
    if device == "cpu":
        return load_model(path, dtype=kind, device=device)
    require_extra("eval", "a model that is spread over GPUs", "accelerate")
    return load_model(path, dtype=kind, device_map="auto")
