"""Tiny random models: one config per architecture, four layers, about 0.3 M parameters."""

import torch
import transformers

from fcsd.models.archs import ARCHS

VOCAB = 256

_SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_MLA = dict(
    num_key_value_heads=4,
    intermediate_size=128,
    moe_intermediate_size=32,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
)
_LLAMA4 = dict(
    intermediate_size=32,
    intermediate_size_mlp=128,
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=1,
    attention_chunk_size=64,
    no_rope_layer_interval=4,
)
_GEMMA = dict(intermediate_size=128, head_dim=16, sliding_window=16, tie_word_embeddings=False)

# architecture -> (config class, the fields that differ from _SHARED)
CONFIGS: dict[str, tuple[str, dict]] = {
    "llama": ("LlamaConfig", dict(intermediate_size=128)),
    "qwen2": ("Qwen2Config", dict(intermediate_size=128)),
    "seed_oss": (
        "SeedOssConfig",
        dict(intermediate_size=128, head_dim=16, attention_dropout=0.0, residual_dropout=0.0),
    ),
    "arcee": ("ArceeConfig", dict(intermediate_size=128)),
    "cwm": ("CwmConfig", dict(intermediate_size=128, head_dim=16, sliding_window=16)),
    "smollm3": ("SmolLM3Config", dict(intermediate_size=128, tie_word_embeddings=False)),
    "ministral": ("MinistralConfig", dict(intermediate_size=128, head_dim=16, sliding_window=16)),
    "qwen3": ("Qwen3Config", dict(intermediate_size=128, head_dim=16)),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        dict(
            intermediate_size=128,
            moe_intermediate_size=32,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[2],
        ),
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        dict(
            intermediate_size=128,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "mixtral": ("MixtralConfig", dict(intermediate_size=64, num_local_experts=8, num_experts_per_tok=2)),
    "olmoe": ("OlmoeConfig", dict(intermediate_size=32, num_experts=8, num_experts_per_tok=2)),
    "glm4_moe": (
        "Glm4MoeConfig",
        dict(
            intermediate_size=128,
            moe_intermediate_size=32,
            head_dim=16,
            n_routed_experts=8,
            n_shared_experts=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
        ),
    ),
    "gpt_oss": (
        "GptOssConfig",
        dict(intermediate_size=32, head_dim=16, num_local_experts=8, num_experts_per_tok=2, sliding_window=16),
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        dict(
            _MLA,
            n_shared_experts=2,
            q_lora_rank=None,
            head_dim=8,
            topk_method="greedy",
            n_group=1,
            topk_group=1,
        ),
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        dict(_MLA, n_shared_experts=1, q_lora_rank=32, n_group=2, topk_group=1),
    ),
    "llama4_text": ("Llama4TextConfig", dict(_LLAMA4, interleave_moe_layer_step=2)),
    "olmo2": ("Olmo2Config", dict(intermediate_size=128)),
    "olmo3": ("Olmo3Config", dict(intermediate_size=128, sliding_window=16)),
    "flex_olmo": ("FlexOlmoConfig", dict(intermediate_size=32, num_experts=8, num_experts_per_tok=2)),
    "exaone4": ("Exaone4Config", dict(intermediate_size=128, sliding_window=16)),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3_text": ("Gemma3TextConfig", _GEMMA),
    "glm4": ("Glm4Config", dict(intermediate_size=128, head_dim=16)),
    "granite": ("GraniteConfig", dict(intermediate_size=128, residual_multiplier=0.5, logits_scaling=2.0)),
    "granitemoe": (
        "GraniteMoeConfig",
        dict(
            intermediate_size=32,
            num_local_experts=8,
            num_experts_per_tok=2,
            residual_multiplier=0.5,
            logits_scaling=2.0,
        ),
    ),
    "hyperclovax": ("HyperCLOVAXConfig", dict(intermediate_size=128, head_dim=16, use_post_norm=True)),
    "minicpm3": (
        "MiniCPM3Config",
        dict(
            intermediate_size=128,
            num_key_value_heads=4,
            kv_lora_rank=16,
            q_lora_rank=32,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
            scale_emb=2,
            dim_model_base=32,
            tie_word_embeddings=False,
        ),
    ),
    "apertus": ("ApertusConfig", dict(intermediate_size=128)),
}
DENSE = tuple(arch for arch in CONFIGS if ARCHS[arch].dense)


def config(arch: str, **changes):
    """The tiny transformers config of an architecture; ``changes`` override single fields."""
    cls, own = CONFIGS[arch]
    return getattr(transformers, cls)(**{**_SHARED, **own, **changes})


def model(arch: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes):
    """A randomly initialised causal LM in eval mode, the same for the same seed."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config(arch, **changes), dtype=dtype).eval()


def tokens(batch: int = 2, length: int = 24, seed: int = 1) -> torch.Tensor:
    """Random token ids ``[batch, length]`` that avoid the special ids."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


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
