"""The table of supported architectures: one row of data for each ``model_type``.

A family is named here and nowhere else in fcsd. Everything that differs between families is a field of its row, which
``arch.py`` defines.
docs/adding_an_architecture.md works through an easy row and a hard one.
"""

from collections.abc import Mapping
from typing import Any

from .arch import Arch, VllmNames
from .wiring_block import Blocks


def _row(model_type: str, stem: str, *, vllm: Mapping[str, Any] | None = None, **fields: Any) -> Arch:
    """A row, whose defaults are those of a family like llama.

    Args:
        stem: what the names of transformers' classes start with; that of the causal LM leaves a ``Text`` out.
        vllm: the fields of ``VllmNames`` that differ from transformers' own names.
        fields: the fields of ``Arch`` that differ from the defaults.
    """
    causal = f"{stem.removesuffix('Text')}ForCausalLM"
    classes = {"AutoModel": (f"{stem}Model", ""), "AutoModelForCausalLM": (causal, "model")}
    fields = {"config": f"{stem}Config", "classes": classes, "blocks": Blocks(), **fields}
    decoder = fields["classes"]["AutoModelForCausalLM"][1] if "text_config" not in fields else "language_model.model"
    same = "mlp", "shared", "shared_beside", "linear", "attn_norms", "mlp_norms", "beside", "router", "inputs", "scale"
    names: dict[str, Any] = {"decoder": decoder, **{name: getattr(fields["blocks"], name) for name in same}}
    return Arch(model_type, vllm=VllmNames(**names | dict(vllm or {})), **fields)


def _multimodal(model_type: str, stem: str, **fields: Any) -> Arch:
    """The row of a multimodal type. One class serves text and images, so that no tensor is lost for text alone."""
    whole = (f"{stem}ForConditionalGeneration", "model.language_model")
    classes = {"AutoModel": (f"{stem}Model", "language_model"), "AutoModelForCausalLM": whole}
    classes["AutoModelForImageTextToText"] = whole
    return _row(model_type, stem, classes=classes, text_config="text_config", **fields)


_NO_CLASS = "vLLM has no class of its own for this type"
_SPARSE = "vLLM's sparse attention runs on GPUs alone, where fcsd's plugin was not tried with it"

_CONVOLVED = "its short convolutions keep a state for each channel, which fcsd does not shard"
_STATES = "mamba keeps a state for each channel, which fcsd does not shard"
_RECURRENT = "linear attention keeps a state for each head, which fcsd does not shard"
_ON_GPUS = "vLLM's linear attention for it has kernels for GPUs alone, where fcsd's plugin was not tried with it"
_NO_SCAN = "vLLM's build for CPUs lacks the kernel of its states, and no GPU has run fcsd's plugin with it"

# vLLM's layers add their outputs to the stream themselves, some multiply them first, and some read no such fields.
_PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
_ADDS = {"whole": True, "assumes": _PLAIN}
_MULTIPLIED = {"whole": True, "multiplier": "residual_multiplier"}
_UNEVEN = "its layers differ in heads, and some read the keys and values of others"
_BESIDE = "experts beside an MLP read the stream through another norm than their router, which AutoEP's cannot"

_SHARED_EXPERTS = Blocks(shared="shared_experts")

# Outputs are normed on arrival. The stream is read as it is by the first kind, through norms by the second.
_OLMO_NORMS: Mapping[str, Any] = {
    "attn_norms": (None, "post_attention_layernorm"),
    "mlp_norms": (None, "post_feedforward_layernorm"),
}
_GEMMA_NORMS: Mapping[str, Any] = {
    "attn_norms": ("input_layernorm", "post_attention_layernorm"),
    "mlp_norms": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
_GLM_NORMS: Mapping[str, Any] = {
    "attn_norms": ("input_layernorm", "post_self_attn_layernorm"),
    "mlp_norms": ("post_attention_layernorm", "post_mlp_layernorm"),
}

# The experts stand beside the MLP of a layer, or there are none. Features of each token are added behind the MLP.
_GEMMA4: Mapping[str, Any] = {
    "blocks": Blocks(
        router="router",
        beside=("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
        inputs=("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"),
        scale="layer_scalar",
        cuts=True,
        **_GEMMA_NORMS,
    ),
    "no_ep": _BESIDE,
    "norm_epsilon": "eps",
    "rotates_halves": False,  # its function rotates queries and keys one by one
    "logits_cap": "final_logit_softcapping",
    "spanning": (
        "embed_tokens_per_layer.weight",
        "per_layer_model_projection.weight",
        "per_layer_projection_norm.weight",
    ),
    "no_tp": _UNEVEN,
}
_GEMMA4_VLLM: Mapping[str, Any] = {"whole": True, "moe": ("moe", "experts")}

_MISTRAL4_AUTOEP = {"preset_model": "deepseek_v3", "score_func": "softmax"}

# Qwen3-Next and its successors: linear attention in most layers, and norms that multiply by ``1 + weight``.
_GATED_DELTA: Mapping[str, Any] = {"norm_epsilon": "eps", "norm_offset": 1, "no_tp": _RECURRENT}
_GATED_DELTA_MOE: Mapping[str, Any] = {
    **_GATED_DELTA,
    "blocks": Blocks(shared="shared_expert", shared_gate="shared_expert_gate", flattens=True, linear="linear_attn"),
}

_NORMS_OVER_HEADS = ("self_attn.q_norm", "self_attn.k_norm")

# Llama-4's router multiplies the experts' inputs, and its experts are stored [experts, in, out].
_LLAMA4_VISION = ("Llama4ForConditionalGeneration", "language_model.model")
_LLAMA4: Mapping[str, Any] = {
    "blocks": Blocks(mlp="feed_forward", router="router", shared="shared_expert", flattens=True, prescaled=True),
    "autoep": {"score_func": "sigmoid", "score_apply": "pre", "route_norm": False},
    "norm_epsilon": "eps",
    "rotates_halves": False,
}

# The layers of LFM2 begin with a short convolution or with attention, and have names of their own.
_LFM2_NAMES: Mapping[str, Any] = {
    "mlp": "feed_forward",
    "linear": "conv",
    "attn_norms": ("operator_norm", None),
    "mlp_norms": ("ffn_norm", None),
}
_LFM2, _LFM2_MOE = Blocks(**_LFM2_NAMES), Blocks(router_bias="expert_bias", **_LFM2_NAMES)
_LFM2_VLLM = {
    "linear": "short_conv",
    "outs": ("out_proj", "out_proj"),
    "down": "w2",
    "assumes": {"tie_word_embeddings": True},
}

_ROWS = (
    _row("llama", "Llama"),
    _row("qwen2", "Qwen2"),
    _row("seed_oss", "SeedOss"),
    _row("arcee", "Arcee"),
    _row("cwm", "Cwm"),
    _row("mistral", "Mistral"),
    _row("ministral3", "Ministral3", no_vllm="vLLM reads the scales of its positions in another format alone"),
    _row("ernie4_5", "Ernie4_5", rotates_halves=False),
    _row("nemotron", "Nemotron", norm_epsilon=None),
    _row("gemma", "Gemma", norm_epsilon="eps", norm_offset=1),
    _row("glm", "Glm", rotates_halves=False),
    _row(
        "phi3",
        "Phi3",
        blocks=Blocks(dropouts=("resid_attn_dropout", "resid_mlp_dropout")),
        tp_plan={"self_attn.qkv_proj": "heads_colwise"},
    ),
    _row("qwen3", "Qwen3"),
    _row("qwen3_moe", "Qwen3Moe", autoep="qwen3_moe"),
    _row(
        "qwen2_moe",
        "Qwen2Moe",
        blocks=Blocks(shared="shared_expert", shared_gate="shared_expert_gate", flattens=True),
        autoep="qwen3_moe",
        # transformers 5.17 leaves them out.
        tp_plan={"mlp.experts.gate_up_proj": "packed_colwise", "mlp.experts.down_proj": "rowwise"},
        vllm={"assumes": {"qkv_bias": True}},
    ),
    _row("mixtral", "Mixtral", autoep="mixtral", vllm={"mlp": "block_sparse_moe"}),
    _row("olmoe", "Olmoe", autoep="qwen3_moe", norms_over_heads=_NORMS_OVER_HEADS),
    _row("glm4_moe", "Glm4Moe", blocks=_SHARED_EXPERTS, autoep="deepseek_v3"),
    _row(
        "minimax_m2",
        "MiniMaxM2",
        blocks=Blocks(router_bias="e_score_correction_bias"),
        autoep={"score_func": "sigmoid"},
        norms_over_heads=_NORMS_OVER_HEADS,
        vllm={"mlp": "block_sparse_moe"},
        no_vllm="fcsd's plugin was right with it on one rank, and vLLM's build for CPUs failed with it on two",
    ),
    _row(
        "mimo_v2_flash",
        "MiMoV2Flash",
        autoep="deepseek_v3",
        no_vllm="its windows are one token shorter in vLLM than in transformers",
    ),
    _row("mellum", "Mellum", autoep="qwen3_moe"),
    _row(
        "glm4_moe_lite",
        "Glm4MoeLite",
        blocks=_SHARED_EXPERTS,
        autoep="deepseek_v3",
        rotates_halves=False,
        vllm={"unscaled": True},
    ),
    _row("dots1", "Dots1", blocks=_SHARED_EXPERTS, autoep="deepseek_v3", no_vllm=_NO_CLASS),
    _row(
        "ernie4_5_moe",
        "Ernie4_5_Moe",
        blocks=Blocks(shared="shared_experts", flattens=True, shared_first=True),
        no_ep="DeepSpeed AutoEP cannot read the router's bias, which ernie4_5_moe stores in a module of its own",
        rotates_halves=False,
    ),
    _row("exaone_moe", "ExaoneMoe", blocks=_SHARED_EXPERTS, autoep="deepseek_v3"),
    _row("solar_open", "SolarOpen", blocks=_SHARED_EXPERTS, autoep="deepseek_v3", no_vllm=_NO_CLASS),
    _row(
        "deepseek_v32",
        "DeepseekV32",
        blocks=_SHARED_EXPERTS,
        autoep="deepseek_v3",
        rotates_halves=False,
        no_vllm=_SPARSE,
    ),
    _row(
        "deepseek_v2",
        "DeepseekV2",
        blocks=_SHARED_EXPERTS,
        autoep="deepseek_v2",
        rotates_halves=False,
        vllm={"rescales_float16": True},
    ),
    _row(
        "deepseek_v3",
        "DeepseekV3",
        blocks=Blocks(shared="shared_experts", gated="gated_attention"),
        autoep="deepseek_v3",
        rotates_halves=False,
        vllm={"rescales_float16": True},
    ),
    _row(
        "gpt_oss",
        "GptOss",
        blocks=Blocks(router="router"),
        no_ep="DeepSpeed AutoEP has no expert biases, which gpt_oss needs",
        packs=False,
        rotates_halves=False,
        tp_plan={
            "self_attn.sinks": "colwise",
            # The experts are stored [experts, in, out]. Columns of gate and up alternate, so that a range of columns
            # holds whole pairs.
            "mlp.experts.gate_up_proj": "rowwise",
            "mlp.experts.gate_up_proj_bias": "colwise",
            "mlp.experts.down_proj": "colwise",
            "mlp.experts.down_proj_bias": "rowwise",
        },
        vllm={"attn": "attn", "hidden_first": True},
    ),
    _row("llama4_text", "Llama4Text", **_LLAMA4),
    _row(
        "llama4",
        "Llama4",
        # One class serves text and images, so that no tensor is lost when the model is used for text only.
        classes={auto: _LLAMA4_VISION for auto in ("AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")},
        text_config="text_config",
        fails_in="5.24.0",  # which reads image_outputs of an object that has none
        **_LLAMA4,
    ),
    _multimodal("qwen2_vl", "Qwen2VL", packs=False, stored="model"),
    _multimodal("qwen2_5_vl", "Qwen2_5_VL", packs=False, stored="model"),
    _multimodal("internvl", "InternVL", texts={"qwen2": {}, "qwen3": {}, "qwen3_moe": {"autoep": "qwen3_moe"}}),
    _multimodal("qwen3_vl", "Qwen3VL", injected="vision_config.deepstack_visual_indexes"),
    _multimodal(
        "qwen3_vl_moe",
        "Qwen3VLMoe",
        injected="vision_config.deepstack_visual_indexes",
        no_ep="its experts are stored transposed, by a rule that reads shapes which AutoEP's experts do not have",
    ),
    _multimodal(
        "mistral3",
        "Mistral3",
        blocks=_SHARED_EXPERTS,
        texts={"mistral": {}, "ministral3": {}, "mistral4": {"autoep": _MISTRAL4_AUTOEP, "rotates_halves": False}},
    ),
    _row("qwen3_next", "Qwen3Next", autoep="qwen3_5_moe", **_GATED_DELTA_MOE),
    _row("qwen3_5_text", "Qwen3_5Text", blocks=Blocks(linear="linear_attn"), **_GATED_DELTA),
    _row("qwen3_5_moe_text", "Qwen3_5MoeText", autoep="qwen3_5_moe", **_GATED_DELTA_MOE),
    _multimodal("qwen3_5", "Qwen3_5", blocks=Blocks(linear="linear_attn"), **_GATED_DELTA),
    _multimodal("qwen3_5_moe", "Qwen3_5Moe", autoep={"num_experts_attr": "num_experts"}, **_GATED_DELTA_MOE),
    _row("olmo2", "Olmo2", blocks=Blocks(**_OLMO_NORMS), vllm=_ADDS, norms_over_heads=_NORMS_OVER_HEADS),
    _row("olmo3", "Olmo3", blocks=Blocks(**_OLMO_NORMS), vllm=_ADDS, norms_over_heads=_NORMS_OVER_HEADS),
    _row(
        "flex_olmo",
        "FlexOlmo",
        blocks=Blocks(**_OLMO_NORMS),
        autoep="qwen3_moe",
        vllm={"whole": True, "assumes": {**_PLAIN, "norm_topk_prob": False}},
        norms_over_heads=_NORMS_OVER_HEADS,
    ),
    _row("exaone4", "Exaone4", blocks=Blocks(**_OLMO_NORMS), vllm={"whole": True}),
    _row(
        "gemma2",
        "Gemma2",
        blocks=Blocks(**_GEMMA_NORMS),
        norm_epsilon="eps",
        norm_offset=1,
        logits_cap="final_logit_softcapping",
    ),
    _row(
        "gemma3_text",
        "Gemma3Text",
        blocks=Blocks(**_GEMMA_NORMS),
        norm_epsilon="eps",
        norm_offset=1,
        logits_cap="final_logit_softcapping",
    ),
    _multimodal(
        "gemma3",
        "Gemma3",  # which caps no logits, unlike the class for text alone
        blocks=Blocks(**_GEMMA_NORMS),
        norm_epsilon="eps",
        norm_offset=1,
    ),
    _row("gemma4_text", "Gemma4Text", vllm=_GEMMA4_VLLM, **_GEMMA4),
    _multimodal("gemma4", "Gemma4", vllm=_GEMMA4_VLLM, **_GEMMA4),
    _row("glm4", "Glm4", blocks=Blocks(**_GLM_NORMS), rotates_halves=False),
    _row(
        "granite",
        "Granite",
        blocks=Blocks(multiplier="residual_multiplier"),
        logits_factor=("logits_scaling", -1),
        vllm=_MULTIPLIED,
    ),
    _row(
        "granitemoe",
        "GraniteMoe",
        blocks=Blocks(mlp="block_sparse_moe", router="router", multiplier="residual_multiplier"),
        # Its router takes the softmax of the chosen experts alone, which is that of all experts, normalised again.
        autoep={},
        logits_factor=("logits_scaling", -1),
        vllm={**_MULTIPLIED, "assumes": _PLAIN},
    ),
    _row(
        "hyperclovax",
        "HyperCLOVAX",
        blocks=Blocks(
            attn_norms=("input_layernorm", "post_norm1"),
            mlp_norms=("post_attention_layernorm", "post_norm2"),
            multiplier="residual_multiplier",
        ),
        logits_factor=("logits_scaling", 1),
        vllm=_MULTIPLIED,
    ),
    _row(
        "minicpm3",
        "MiniCPM3",
        blocks=Blocks(multiplier="residual_scale"),
        rotates_halves=False,  # the kernel of latent attention rotates
        logits_factor=("logits_scaling", -1),
        vllm={**_ADDS, "multiplier": "scale_depth", "multiplier_by_depth": True},
    ),
    _row(
        "afmoe",
        "Afmoe",
        packs=False,
        blocks=Blocks(
            router="router",
            shared="shared_experts",
            flattens=True,
            router_unflattened=True,
            shared_first=True,
            router_bias="expert_bias",
            attn_norms=("input_layernorm", "post_attention_layernorm"),
            mlp_norms=("pre_mlp_layernorm", "post_mlp_layernorm"),
        ),
        no_ep="DeepSpeed AutoEP cannot read the router's bias, which afmoe stores under a name of its own",
    ),
    _row(
        "hy_v3",
        "HYV3",
        blocks=Blocks(shared="shared_experts", flattens=True, router_bias="e_score_correction_bias"),
        autoep={"score_func": "sigmoid"},
        ep_scale="router_scaling_factor",
        vllm={"shared": "shared_mlp"},
    ),
    _row(
        "laguna",
        "Laguna",
        blocks=Blocks(shared="shared_experts", flattens=True, shared_first=True, routed_scale="routed_scaling_factor"),
        no_ep="DeepSpeed AutoEP does not cap the scores of a router, as laguna can",
        vllm={"shared": "shared_expert"},
    ),
    _row("lfm2", "Lfm2", blocks=_LFM2, final_norm="embedding_norm", no_tp=_CONVOLVED, since=(5, 23), vllm=_LFM2_VLLM),
    _row(
        "lfm2_moe",
        "Lfm2Moe",
        blocks=_LFM2_MOE,
        no_ep="DeepSpeed AutoEP cannot read the router's bias, which lfm2_moe stores under a name of its own",
        final_norm="embedding_norm",
        no_tp=_CONVOLVED,
        since=(5, 23),
        vllm=_LFM2_VLLM,
    ),
    _row(
        "kimi_linear",
        "KimiLinear",
        blocks=Blocks(shared="shared_experts", linear="self_attn"),
        autoep={"preset_model": "deepseek_v3", "num_experts_attr": "num_local_experts"},
        rotates_halves=False,
        no_tp=_RECURRENT,
        no_vllm=_ON_GPUS,
    ),
    _row(
        "phimoe",
        "Phimoe",
        blocks=Blocks(router="router"),
        no_ep="its router draws experts in training, as no router of DeepSpeed AutoEP does",
        draws=True,
        norm_epsilon=None,
        vllm={
            "causal_lm": "PhiMoEForCausalLM",
            "mlp": "block_sparse_moe",
            "whole": True,
            "assumes": {
                "attention_bias": True,
                "lm_head_bias": True,
                "hidden_act": "silu",
                "router_jitter_noise": 0.01,
            },
        },
    ),
    _row(
        "granitemoehybrid",
        "GraniteMoeHybrid",
        blocks=Blocks(
            mlp="block_sparse_moe",
            router="router",
            shared="shared_mlp",
            shared_beside=True,
            flattens=True,
            linear="mamba",
            multiplier="residual_multiplier",
        ),
        no_ep="its shared experts are beside its MoE block, where DeepSpeed AutoEP does not look for them",
        packs=False,
        logits_factor=("logits_scaling", -1),
        no_tp=_STATES,
        since=(5, 23),
        vllm={**_MULTIPLIED, "down": "output_linear", "assumes": {"hidden_act": "silu"}},
    ),
    _row(
        "jamba",
        "Jamba",
        blocks=Blocks(mlp="feed_forward", router="router", linear="mamba", mlp_norms=("pre_ff_layernorm", None)),
        autoep={"num_experts_attr": "num_experts", "route_norm": False},
        keeps_documents=False,
        rotates_halves=False,  # its attention has no positions
        no_tp=_STATES,
        final_norm="final_layernorm",
        since=(5, 23),
        no_vllm=_NO_SCAN,
    ),
    _row(
        "glm_moe_dsa",
        "GlmMoeDsa",
        blocks=Blocks(shared="shared_experts", passes="prev_topk_indices"),
        autoep="deepseek_v3",
        rotates_halves=False,
        no_vllm=_SPARSE,
    ),
    _row(
        "mistral4", "Mistral4", blocks=_SHARED_EXPERTS, autoep=_MISTRAL4_AUTOEP, rotates_halves=False, no_vllm=_NO_CLASS
    ),
    _multimodal("glm4v", "Glm4v", packs=False, blocks=Blocks(**_GLM_NORMS), rotates_halves=False),
    _multimodal("glm4v_moe", "Glm4vMoe", packs=False, blocks=_SHARED_EXPERTS, autoep="deepseek_v3"),
    _multimodal(
        "kimi_k25",
        "Kimi_K25",
        texts={"deepseek_v3": {}, "kimi_k2": {}},  # transformers takes the second for the first
        blocks=_SHARED_EXPERTS,
        autoep="deepseek_v3",
        rotates_halves=False,
        vllm={"causal_lm": "KimiK25ForConditionalGeneration", "rescales_float16": True},
    ),
)

ARCHS: Mapping[str, Arch] = {row.model_type: row for row in _ROWS}
