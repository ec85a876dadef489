"""Tiny random models: one config per architecture, four layers, about 0.3 M parameters."""

from copy import deepcopy
from importlib.metadata import version

import pytest
import torch
import transformers

from fcsd.models.archs import ARCHS
from fcsd.models.build import causal_lm_class

VOCAB = 256

_SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MOE = dict(moe_intermediate_size=32, num_experts_per_tok=2)
_MOE_8 = dict(_MOE, num_experts=8)
_ROUTED_8 = dict(_MOE, n_routed_experts=8, n_shared_experts=1)
_NARROW_8 = dict(intermediate_size=32, num_experts_per_tok=2, num_local_experts=8)
_ONE_DENSE = dict(mlp_layer_types=["dense", "sparse", "sparse", "sparse"])
_LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_CONV = ["conv", "full_attention", "conv", "conv"]
_FULL_FIRST = ["full_attention", "sliding_attention"] * 2
_SLIDING_FIRST = ["sliding_attention", "full_attention"] * 2
_MLA_DENSE = dict(num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
_MLA = dict(_MLA_DENSE, **_MOE, n_routed_experts=8, first_k_dense_replace=1)
_GROUPED = dict(_MLA, n_shared_experts=1, q_lora_rank=32, n_group=2, topk_group=1)
# Fewer heads would often give two keys the same score, of which shapes decide which one is read.
_INDEXER = dict(index_n_heads=16, index_head_dim=16, index_topk=16)
_LLAMA4 = dict(
    intermediate_size=32,
    intermediate_size_mlp=128,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=1,
    attention_chunk_size=64,
    no_rope_layer_interval=4,
)
# 56x56 pixels are four image tokens (id 250). No layer's output gets image features unless a test says so.
_QWEN_VISION = dict(
    depth=2,
    hidden_size=32,
    num_heads=2,
    intermediate_size=48,
    patch_size=14,
    spatial_merge_size=2,
    temporal_patch_size=1,
    out_hidden_size=64,
    num_position_embeddings=16,
)
_DEEPSTACK = dict(_QWEN_VISION, deepstack_visual_indexes=[])
_QWEN_IMAGES = dict(image_token_id=250, video_token_id=251, vision_start_token_id=252, vision_end_token_id=253)
_GLM_VISION = dict(
    depth=2, hidden_size=32, num_heads=2, image_size=56, intermediate_size=48, out_hidden_size=64, temporal_patch_size=1
)
_GLM_IMAGES = dict(
    image_token_id=250,
    video_token_id=251,
    image_start_token_id=252,
    image_end_token_id=253,
    video_start_token_id=254,
    video_end_token_id=255,
)
# An image of 14x28 pixels is seen whole, then as two tiles and the end of their row: four tokens.
_TOWER = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, patch_size=14)
_GLM_MROPE = dict(
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    }
)
_MROPE = dict(
    rope_parameters={
        "rope_type": "default",
        "rope_theta": 1000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
)
_QWEN2_MROPE = dict(rope_parameters={"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [4, 2, 2]})
_GEMMA = dict(head_dim=16, sliding_window=16, tie_word_embeddings=False)
# Experts beside the MLP, features of each token, and layers that read the keys and values of the layers before.
_GEMMA4 = dict(
    _GEMMA,
    moe_intermediate_size=32,
    enable_moe_block=True,
    num_experts=8,
    top_k_experts=2,
    global_head_dim=32,
    num_global_key_value_heads=1,
    attention_k_eq_v=True,
    hidden_size_per_layer_input=16,
    vocab_size_per_layer_input=VOCAB,
    layer_types=_SLIDING_FIRST,
    num_kv_shared_layers=2,
)

# Queries are scaled by their position from the eighth token on.
_YARN = dict(
    rope_type="yarn",
    rope_theta=1e4,
    factor=4.0,
    original_max_position_embeddings=8,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.1,
)

# Attention that chooses two blocks of four keys.

_GATED_DELTA = dict(
    head_dim=16,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    layer_types=_LINEAR,
)
_GATED_DELTA_MOE = dict(_MOE_8, **_GATED_DELTA, shared_expert_intermediate_size=32)

# architecture -> (config class, the fields that differ from _SHARED; of multimodal types, its whole content)
CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "seed_oss": ("SeedOssConfig", dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0)),
    "arcee": ("ArceeConfig", {}),
    "cwm": ("CwmConfig", dict(head_dim=16, sliding_window=16)),
    "ministral3": ("Ministral3Config", dict(head_dim=16, rope_parameters=_YARN)),
    "mistral": ("MistralConfig", dict(head_dim=16, sliding_window=None)),
    "ernie4_5": ("Ernie4_5Config", dict(head_dim=16, tie_word_embeddings=False)),
    "nemotron": ("NemotronConfig", dict(head_dim=16)),
    "gemma": ("GemmaConfig", dict(head_dim=16, tie_word_embeddings=False)),
    "glm": ("GlmConfig", dict(head_dim=16)),
    "phi3": ("Phi3Config", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "qwen3_moe": ("Qwen3MoeConfig", dict(_MOE_8, head_dim=16, norm_topk_prob=True, mlp_only_layers=[2])),
    "qwen2_moe": ("Qwen2MoeConfig", dict(_MOE_8, shared_expert_intermediate_size=64)),
    "mixtral": ("MixtralConfig", dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)),
    "olmoe": ("OlmoeConfig", dict(intermediate_size=32, num_experts=8, num_experts_per_tok=2)),
    "glm4_moe": (
        "Glm4MoeConfig",
        dict(_ROUTED_8, head_dim=16, first_k_dense_replace=1, n_group=1, topk_group=1, norm_topk_prob=True),
    ),
    "minimax_m2": ("MiniMaxM2Config", dict(_NARROW_8, head_dim=16)),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        dict(
            _MOE,
            n_routed_experts=8,
            head_dim=16,
            v_head_dim=8,
            sliding_window=16,
            layer_types=_FULL_FIRST,
            **_ONE_DENSE,
        ),
    ),
    "mellum": (
        "MellumConfig",
        dict(_MOE, num_local_experts=8, head_dim=16, layer_types=["full_attention"] * 4, **_ONE_DENSE),
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        dict(_MLA, n_shared_experts=1, q_lora_rank=32, n_group=1, topk_group=1, **_ONE_DENSE),
    ),
    "dots1": ("Dots1Config", dict(_ROUTED_8, first_k_dense_replace=1, head_dim=16)),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        dict(
            moe_intermediate_size=32,
            moe_num_experts=8,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_layer_start_index=1,
            moe_layer_end_index=3,
            tie_word_embeddings=False,
        ),
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        dict(_MOE_8, num_shared_experts=1, head_dim=16, sliding_window=16, layer_types=_SLIDING_FIRST, **_ONE_DENSE),
    ),
    "solar_open": ("SolarOpenConfig", dict(_ROUTED_8, head_dim=16)),
    "deepseek_v32": ("DeepseekV32Config", dict(_GROUPED, **_INDEXER, **_ONE_DENSE)),
    "gpt_oss": ("GptOssConfig", dict(_NARROW_8, head_dim=16, sliding_window=16)),
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(_MLA, n_shared_experts=2, q_lora_rank=None, head_dim=8, topk_method="greedy", n_group=1, topk_group=1),
    ),
    "deepseek_v3": ("DeepseekV3Config", _GROUPED),
    "llama4_text": ("Llama4TextConfig", dict(_LLAMA4, interleave_moe_layer_step=2)),
    "qwen2_vl": (
        "Qwen2VLConfig",
        dict(
            text_config=_QWEN2_MROPE,
            vision_config=dict(
                depth=2, embed_dim=32, hidden_size=64, num_heads=2, mlp_ratio=2, patch_size=14, temporal_patch_size=1
            ),
            **_QWEN_IMAGES,
        ),
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        dict(
            text_config=_QWEN2_MROPE,
            vision_config=dict(
                depth=2,
                hidden_size=32,
                intermediate_size=48,
                num_heads=2,
                out_hidden_size=64,
                patch_size=14,
                temporal_patch_size=1,
                window_size=28,
                fullatt_block_indexes=[1],
            ),
            **_QWEN_IMAGES,
        ),
    ),
    "internvl": (
        "InternVLConfig",
        dict(
            text_config=dict(model_type="qwen3", head_dim=16),
            vision_config=dict(_TOWER, image_size=56),
            image_seq_length=4,
            image_token_id=250,
        ),
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        dict(text_config=dict(_MROPE, head_dim=16), vision_config=_DEEPSTACK, **_QWEN_IMAGES),
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        dict(
            text_config=dict(
                _MROPE,
                moe_intermediate_size=48,  # published files have the experts transposed, which shapes tell
                head_dim=16,
                num_experts=8,
                num_experts_per_tok=2,
                mlp_only_layers=[2],
            ),
            vision_config=_DEEPSTACK,
            **_QWEN_IMAGES,
        ),
    ),
    "mistral3": (
        "Mistral3Config",
        dict(
            text_config=dict(model_type="ministral3", head_dim=16, rope_parameters=_YARN),
            vision_config=dict(_TOWER, model_type="pixtral", head_dim=16, image_size=56),
            image_token_index=250,
        ),
    ),
    "qwen3_next": ("Qwen3NextConfig", dict(_GATED_DELTA_MOE, mlp_only_layers=[2])),
    "qwen3_5_text": ("Qwen3_5TextConfig", dict(_GATED_DELTA, **_MROPE)),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", dict(_GATED_DELTA_MOE, **_MROPE)),
    "qwen3_5": (
        "Qwen3_5Config",
        dict(text_config=dict(_GATED_DELTA, **_MROPE), vision_config=_QWEN_VISION, **_QWEN_IMAGES),
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        dict(text_config=dict(_GATED_DELTA_MOE, **_MROPE), vision_config=_QWEN_VISION, **_QWEN_IMAGES),
    ),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", dict(sliding_window=16)),
    "flex_olmo": ("FlexOlmoConfig", dict(intermediate_size=32, num_experts=8, num_experts_per_tok=2)),
    "exaone4": ("Exaone4Config", dict(sliding_window=16)),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA),
    "gemma3": (
        "Gemma3Config",
        dict(
            text_config=_GEMMA,
            vision_config=dict(_TOWER, model_type="siglip_vision_model", image_size=56),
            mm_tokens_per_image=4,
            image_token_index=250,
        ),
    ),
    "gemma4_text": ("Gemma4TextConfig", _GEMMA4),
    "gemma4": (
        "Gemma4Config",
        dict(
            text_config=dict(_GEMMA4, use_bidirectional_attention="vision"),
            vision_config=dict(
                _TOWER, num_key_value_heads=2, head_dim=16, pooling_kernel_size=2, position_embedding_size=16
            ),
            audio_config=None,
            image_token_id=250,
            video_token_id=251,
            boi_token_id=252,
            eoi_token_id=253,
            audio_token_id=254,
        ),
    ),
    "glm4": ("Glm4Config", dict(head_dim=16)),
    "granite": ("GraniteConfig", dict(residual_multiplier=0.5, logits_scaling=2.0)),
    "granitemoe": ("GraniteMoeConfig", dict(_NARROW_8, residual_multiplier=0.5, logits_scaling=2.0)),
    "hyperclovax": ("HyperCLOVAXConfig", dict(head_dim=16, use_post_norm=True)),
    "minicpm3": (
        "MiniCPM3Config",
        dict(_MLA_DENSE, q_lora_rank=32, scale_emb=2, dim_model_base=32, tie_word_embeddings=False),
    ),
    "afmoe": (
        "AfmoeConfig",
        dict(
            _MOE_8, head_dim=16, num_shared_experts=1, num_dense_layers=1, sliding_window=16, layer_types=_SLIDING_FIRST
        ),
    ),
    "hy_v3": ("HYV3Config", dict(_MOE_8, head_dim=16, num_shared_experts=1, router_scaling_factor=1.5, **_ONE_DENSE)),
    "laguna": (
        "LagunaConfig",
        dict(
            _MOE_8,
            shared_expert_intermediate_size=32,
            head_dim=16,
            sliding_window=16,
            layer_types=_FULL_FIRST,
            moe_routed_scaling_factor=1.5,
        ),
    ),
    "lfm2": ("Lfm2Config", dict(tie_word_embeddings=False, layer_types=_CONV)),
    "lfm2_moe": ("Lfm2MoeConfig", dict(_MOE_8, num_dense_layers=1, tie_word_embeddings=False, layer_types=_CONV)),
    "kimi_linear": (
        "KimiLinearConfig",
        dict(
            {name: value for name, value in _MLA.items() if name != "n_routed_experts"},
            num_local_experts=8,
            q_lora_rank=None,
            linear_head_dim=16,
            linear_num_heads=4,
            layer_types=_LINEAR,
        ),
    ),
    "phimoe": ("PhimoeConfig", _NARROW_8),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        dict(
            _NARROW_8,
            shared_intermediate_size=32,
            residual_multiplier=0.5,
            logits_scaling=2.0,
            layer_types=_LINEAR,
            mamba_n_heads=4,
            mamba_d_state=8,
            mamba_chunk_size=8,
        ),
    ),
    "jamba": (
        "JambaConfig",
        dict(
            intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_offset=0,
            mamba_d_state=8,
        ),
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        dict(_GROUPED, **_INDEXER, indexer_types=["full", "shared", "full", "shared"], **_ONE_DENSE),
    ),
    "mistral4": ("Mistral4Config", _GROUPED),
    "glm4v": ("Glm4vConfig", dict(text_config=_GLM_MROPE, vision_config=_GLM_VISION, **_GLM_IMAGES)),
    "glm4v_moe": (
        "Glm4vMoeConfig",
        dict(
            text_config=dict(_MOE, **_GLM_MROPE, n_routed_experts=8, first_k_dense_replace=1),
            vision_config=_GLM_VISION,
            **_GLM_IMAGES,
        ),
    ),
    "kimi_k25": (
        "Kimi_K25Config",
        dict(
            text_config=dict(_GROUPED, model_type="deepseek_v3"),
            vision_config=dict(_TOWER, pos_emb_height=4, pos_emb_width=4),
            projection_hidden_size=32,
            **_QWEN_IMAGES,
        ),
    ),
}
CONFIGS = {arch: config for arch, config in CONFIGS.items() if ARCHS[arch].unsupported() is None}
DENSE = tuple(arch for arch in CONFIGS if ARCHS[arch].dense)
DESYNC = tuple(arch for arch in CONFIGS if ARCHS[arch].no_desync is None)
# One family for each way in which layers are built, dense and with experts: for what depends on nothing else.
# `tests/models/test_guard.py` proves for all families that they compute the table.
BUILDS = tuple({(ARCHS[arch].blocks, ARCHS[arch].dense): arch for arch in reversed(CONFIGS)}.values())


# The language models, inside types that take several, that the tiny configs above do not have.
OTHER_TEXTS = [
    (arch, text)
    for arch, (_, own) in CONFIGS.items()
    for text in ARCHS[arch].texts
    if text in CONFIGS and text != own["text_config"]["model_type"]
]
# Those whose layers differ from the others', as names that ``config``, ``model`` and ``image`` take.
INSIDE = tuple(f"{arch}+{text}" for arch, text in OTHER_TEXTS if ARCHS[arch].texts[text])


def with_inside(name: str) -> tuple[str, dict]:
    """The entry of ``CONFIGS`` of an architecture, or of a type with another language model inside, ``TYPE+TEXT``."""
    arch, _, text = name.partition("+")
    cls, own = CONFIGS[arch]
    return (cls, {**own, "text_config": dict(model_type=text, **CONFIGS[text][1])}) if text else (cls, own)


def config(arch: str, **changes):
    """The tiny transformers config of an architecture; ``changes`` override single fields."""
    cls, own = with_inside(arch)
    if "text_config" not in own:
        return getattr(transformers, cls)(**deepcopy({**_SHARED, **own, **changes}))
    text = {"tie_word_embeddings": False, **_SHARED, **own["text_config"], **changes}
    outer = {name: text[name] for name in ("tie_word_embeddings", "initializer_range") if name in text}
    return getattr(transformers, cls)(**deepcopy({**own, "text_config": text, **outer}))


def model(arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A randomly initialised causal LM in eval mode, the same for the same seed."""
    torch.manual_seed(seed)
    found = config(arch, **changes)
    made = causal_lm_class(found)._from_config(found, dtype=dtype).eval()
    if "vision_config" in with_inside(arch)[1] and made.device.type != "meta":
        with torch.no_grad():  # Gemma 3's projector of images is zero at the start
            for tensor in made.parameters():
                if tensor.ndim == 2 and not tensor.any():
                    tensor.normal_(std=0.2)
    return made


def aligned(model):
    """The model with copied weights: mapped from a file they lie anywhere, on which last bits of products depend."""
    for tensor in model.parameters():
        tensor.data = tensor.data.clone()
    return model


def tokens(batch: int = 2, length: int = 24, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, length]`` that avoid the special ids."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


# The type is not tested where the installed transformers cannot compute it.
LLAMA4 = () if version("transformers") == ARCHS["llama4"].fails_in else ("llama4",)
with_llama4 = pytest.mark.skipif(not LLAMA4, reason="this transformers cannot compute llama4")


def llama4_vision(seed: int = 0):
    """A tiny ``Llama4ForConditionalGeneration``: 28x28 pixels become four image tokens (id 250)."""
    text = config("llama4_text")
    vision = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
        vision_output_dim=32,
        image_size=28,
        patch_size=7,
        projector_input_dim=32,
        projector_output_dim=32,
        pixel_shuffle_ratio=0.5,
    )
    whole = transformers.Llama4Config(
        text_config=text.to_dict(),
        vision_config=vision,
        image_token_index=250,
        boi_token_index=251,
        eoi_token_index=252,
    )
    torch.manual_seed(seed)
    return transformers.Llama4ForConditionalGeneration(whole).eval()


_PATCHES = (16, 3 * 14 * 14)
# The shape of an image's pixels, for the types that do not take the patches as rows.
_PIXELS = {
    "llama4": (1, 3, 28, 28),
    **dict.fromkeys(("mistral3", "gemma3", "internvl"), (1, 3, 56, 56)),
    **dict.fromkeys((), (1, 3, 3, 14, 14)),
    **dict.fromkeys((), (1, 1, 3, 56, 56)),
    **dict.fromkeys(("gemma4",), (1, *_PATCHES)),
    "kimi_k25": (16, 3, 14, 14),
}


def image(arch: str) -> dict[str, torch.Tensor]:
    """Inputs of a tiny multimodal model: token ids ``[1, 15]``, of which four are an image's, and its pixels."""
    arch = arch.partition("+")[0]
    ids = torch.cat([tokens(1, 5).clamp(max=249), torch.full((1, 4), 250), tokens(1, 6, seed=2).clamp(max=249)], dim=1)
    shape, kinds = _PIXELS.get(arch, _PATCHES), (ids == 250).int()
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    beside: dict[str, dict[str, torch.Tensor]] = {
        "mistral3": {"image_sizes": torch.tensor([[56, 56]])},
        "gemma3": {"token_type_ids": kinds},  # the tokens of an image see each other
        "gemma4": {
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4))[None],
            "mm_token_type_ids": kinds,
        },
        "kimi_k25": grid,
    }
    others = {} if arch in _PIXELS else {**grid, "mm_token_type_ids": kinds}
    pixels = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "pixel_values": pixels, **beside.get(arch, others)}
