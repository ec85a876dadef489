"""What a row of the table of architectures says: how one family of transformers is built, taken apart and served.

The rows are in ``archs.py``. docs/adding_an_architecture.md explains every field.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any, Literal

from .wiring_block import DESYNC, READS, Blocks

# The modules in the directory of a converted model that hold its classes; ``export_template.py`` writes them.
CONFIGURATION, MODELING = "configuration_fcsd", "modeling_fcsd"


@dataclass(frozen=True)
class VllmNames:
    """What vLLM's own class of an architecture calls the parts of its decoder layers.

    Every decoder layer of the table follows one of two conventions in vLLM 0.24 to 0.33. By the first it gets
    ``(hidden, residual)``, whose sum is the full stream, and returns its MLP's output unadded beside the residual. By
    the second it gets and returns the full stream.

    Attributes:
        causal_lm: the class of the causal LM, where its name differs from transformers'.
        decoder: the path, inside the model, of the module that holds ``layers``.
        attn: the attention of a layer.
        linear: the linear attention of a layer that has it instead. A loop over layers of which some have it names what
            it gives them. None if no layer has it.
        outs: the output projections of the attention and of the linear attention.
        mlp: the MLP of a layer; a mixture of experts has ``experts``.
        moe: the names of the mixture of experts in the versions of vLLM, if it is not the MLP.
        down: the output projection of a dense MLP, and of shared experts beside the MLP.
        shared: the shared experts inside the MLP; None if there are none.
        shared_beside: whether the shared experts are beside the MLP instead. They are the MLP of a layer that has none.
        attn_norms: the norm of what the attention reads, and the norm of its output on arrival, or None.
        mlp_norms: the same for the MLP.
        beside: as in ``Blocks``, like the next three: the norms around experts beside the MLP, which are ``moe``.
        router: the router of such experts.
        inputs: what adds features of each token.
        scale: what multiplies the stream that a layer passes on.
        hidden_first: whether layer and attention take ``(hidden, positions)`` instead of ``(positions, hidden)``.
        unscaled: whether the layer gives its attention one more argument than vLLM's loop gives the layer: no scale of
            the queries.
        whole: whether the layer follows the second convention. Its norms take one tensor.
        multiplier: the field of the config by which the layer multiplies every output before it is added to the stream;
            None if there is none.
        multiplier_by_depth: whether that field is divided by the root of the number of layers first.
        assumes: the fields of the config that vLLM's class does not read, and the values with which it computes.
        rescales_float16: whether vLLM's layer divides the stream by a constant in float16, which the plugin does not.
    """

    causal_lm: str | None = None
    decoder: str = "model"
    attn: str = "self_attn"
    linear: str | None = None
    outs: tuple[str, str] = ("o_proj", "out_proj")
    mlp: str = "mlp"
    moe: tuple[str, ...] = ()
    down: str = "down_proj"
    shared: str | None = None
    shared_beside: bool = False
    attn_norms: tuple[str | None, str | None] = Blocks.attn_norms
    mlp_norms: tuple[str | None, str | None] = Blocks.mlp_norms
    beside: tuple[str, str, str] | None = None
    router: str = Blocks.router
    inputs: tuple[str, str, str] | None = None
    scale: str | None = None
    hidden_first: bool = False
    unscaled: bool = False
    whole: bool = False
    multiplier: str | None = None
    multiplier_by_depth: bool = False
    assumes: Mapping[str, Any] = field(default_factory=dict)
    rescales_float16: bool = False


# What the types share for which AutoEP has no preset: experts whose gate and up are one tensor.
_EXPERTS = {
    "expert_pattern": "experts",
    "expert_w1": "gate_up_proj",
    "expert_w2": "down_proj",
    "expert_w3": None,
    "num_experts_attr": "num_local_experts",
    "top_k_attr": "num_experts_per_tok",
    "score_func": "softmax",
    "score_apply": "post",
    "route_norm": True,
}


@dataclass(frozen=True)
class Arch:
    """How one ``model_type`` of transformers is built, taken apart, sharded and served.

    Args:
        model_type: the type as ``config.json`` names it.
        config: the name of the transformers config class.
        classes: Auto class -> (transformers model class, path inside it of the module that holds ``layers``).
        vllm: the names that vLLM's class of the same name uses.
        blocks: the names of a decoder layer's children.
        text_config: for multimodal types, the name of the sub-config that describes the language model.
        texts: for multimodal types that take any language model: the types of those that are proven, each with the
            fields of the row that differ with this one inside.
        autoep: for types with experts, how DeepSpeed AutoEP, which would look for the ``model_type``, finds them: the
            name of one of its presets, or those of its keys that ``autoep_keys`` does not derive. None for types that
            cannot be expert-parallel.
        no_ep: why the type cannot be expert-parallel although it has experts.
        ep_scale: the field of the config by which the router scales its weights, if AutoEP does not look for it.
        packs: whether transformers' code keeps attention inside documents where position ids restart.
        keeps_documents: whether transformers' layers hand on to linear attention what its loop over layers passes them.
        norm_epsilon: the name of the attribute of its RMSNorms that holds epsilon; None if its norms compute something
            else, or have no weight, so that no kernel may stand for them.
        norm_offset: what its RMSNorms add to their weight: 0 if they multiply by ``weight``, 1 if by ``1 + weight``.
        rotates_halves: whether rotary embeddings rotate the first half of a head's dimensions against the second, by
            angles that are given twice. Others rotate pairs of neighbours, or give every angle once.
        tp_plan: how tensor-parallel ranks shard what neither the ``base_model_tp_plan`` of the config class nor its
            usual name says: name or pattern of a module or tensor inside a decoder layer -> one of transformers'
            styles. ``fcsd.parallel.tensor.tp_plan`` explains the styles, and has those of usual names.
        norms_over_heads: the paths inside a layer of norms that normalise over all heads at once, so that
            tensor-parallel ranks must sum their means.
        no_tp: why tensor-parallel ranks cannot share the type; None if they can.
        no_vllm: why the plugin cannot serve the type; None if it can.
        final_norm: the norm of the decoder after its last layer.
        injected: for types whose vision tower adds features to the outputs of the first decoder layers: the path, in
            the config, of a list with an entry for each of these layers. They can pass on the full stream alone.
        logits_factor: the field of the config that scales the logits, and 1 or -1 for what they are multiplied by: the
            field, or its inverse. None if they are the product of the final hidden states and the output head.
        logits_cap: the field of the config that caps the logits; None if the type has none.
        spanning: the names, inside the decoder, of tensors beside its layers, its embedding and its final norm. They
            hold a part for each layer, so no model of fewer layers can have them.
        stored: the name of the decoder in files, if it differs from that of the causal LM.
        since: the oldest version of transformers whose code for the type computes what fcsd takes apart.
        fails_in: the version of transformers whose own model of the type ends in an error; None if none does.
        draws: whether its router draws experts at random in training.
    """

    model_type: str
    config: str
    classes: Mapping[str, tuple[str, str]]
    vllm: VllmNames
    blocks: Blocks = field(default_factory=Blocks)
    text_config: str | None = None
    texts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    autoep: str | Mapping[str, Any] | None = None
    no_ep: str | None = None
    ep_scale: str | None = None
    packs: bool = True
    keeps_documents: bool = True
    norm_epsilon: str | None = "variance_epsilon"
    norm_offset: int = 0
    rotates_halves: bool = True
    tp_plan: Mapping[str, str] = field(default_factory=dict)
    norms_over_heads: tuple[str, ...] = ()
    no_tp: str | None = None
    no_vllm: str | None = None
    final_norm: str = "norm"
    injected: str | None = None
    logits_factor: tuple[str, Literal[1, -1]] | None = None
    logits_cap: str | None = None
    spanning: tuple[str, ...] = ()
    stored: str | None = None
    since: tuple[int, int] = (5, 17)
    fails_in: str | None = None
    draws: bool = False

    def around(self, text: str | None) -> "Arch":
        """The row with a language model of this type inside; the row itself for a type that takes only one."""
        return replace(self, **self.texts.get(text or "", {}))

    def unsupported(self, text: str | None = None) -> str | None:
        """Why the type is not supported by this transformers, or around a language model; None if it is.

        Args:
            text: the type of the language model inside of a type that takes any; None is the default of transformers.
        """
        if transformers_version() < self.since:
            return f"{self.model_type} needs transformers {self.since[0]}.{self.since[1]} or later"
        if not self.texts or text in (None, *self.texts):
            return None
        known = " or ".join(self.texts)
        return f"{self.model_type} with text layers of {text} is not supported, only with those of {known}"

    @property
    def dense(self) -> bool:
        """Whether no layer has experts."""
        return self.autoep is None and self.no_ep is None

    @property
    def autoep_keys(self) -> dict[str, Any]:
        """The keys by which AutoEP finds the experts: those of the row, and what follows from ``blocks``.

        A preset looks for them in a type for text alone.
        """
        _, decoder = self.classes["AutoModelForCausalLM"]
        given = {"preset_model": self.autoep} if isinstance(self.autoep, str) else dict(self.autoep or {})
        where = {"moe_layer_pattern": rf"{re.escape(decoder)}\.layers\.\d+\.{self.blocks.mlp}"}
        if "preset_model" in given:
            return given if decoder == "model" else where | given
        shared = {
            "has_shared_experts": self.blocks.shared is not None,
            "shared_experts_pattern": self.blocks.shared,
            "shared_experts_gate_pattern": self.blocks.shared_gate,
        }
        return {**_EXPERTS, **where, "router_pattern": self.blocks.router, **shared, **given}

    @property
    def no_desync(self) -> str | None:
        """Why the architecture cannot have a Desync wiring, whose ranks share every layer; None if it can."""
        if self.blocks.normed:
            return "it norms whole outputs before it adds them, and Desync has no whole outputs"
        return self.no_tp if self.dense else "it has experts"

    @property
    def wirings(self) -> tuple[str, ...]:
        """The names of the wirings that this architecture can have."""
        return (*READS, *DESYNC) if self.no_desync is None else tuple(READS)

    @property
    def causal_lm(self) -> str:
        """The name of the class of its causal LM in transformers, for example ``LlamaForCausalLM``."""
        return self.classes["AutoModelForCausalLM"][0]

    @property
    def vllm_causal_lm(self) -> str:
        """The name of the class of its causal LM in vLLM."""
        return self.vllm.causal_lm or self.causal_lm

    @property
    def wired_causal_lm(self) -> str:
        """The name of the class of a converted causal LM, for example ``FcsdLlamaForCausalLM``."""
        return f"Fcsd{self.causal_lm}"

    @property
    def auto_map(self) -> dict[str, str]:
        """What a converted config.json names by ``auto_map``: for each Auto class, the module and class of its code."""
        models = {auto: f"{MODELING}.Fcsd{name}" for auto, (name, _) in self.classes.items()}
        return {"AutoConfig": f"{CONFIGURATION}.Fcsd{self.config}", **models}


@cache
def transformers_version() -> tuple[int, int]:
    """The first two numbers of the installed version."""
    major, minor = version("transformers").split(".")[:2]
    return int(major), int(minor)
