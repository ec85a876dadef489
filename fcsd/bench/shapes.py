"""Transformers configs with the dimensions of the models that benchmarks use; the weights are random."""

from collections.abc import Callable

from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)


def deepseek_v2_lite(layers: int) -> PretrainedConfig:
    """DeepSeek-V2-Lite (27 layers), whose first layer is dense."""
    return DeepseekV2Config(
        vocab_size=102400,
        hidden_size=2048,
        intermediate_size=10944,
        moe_intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        head_dim=64,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        max_position_embeddings=163840,
    )


def deepseek_v2(layers: int) -> PretrainedConfig:
    """DeepSeek-V2 with 236 B parameters (60 layers), whose first layer is dense."""
    return DeepseekV2Config(
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        first_k_dense_replace=1,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        head_dim=64,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
        max_position_embeddings=163840,
    )


def deepseek_v3(layers: int) -> PretrainedConfig:
    """DeepSeek-V3 (61 layers) without its MTP layer; every layer is MoE, as in FarSkip Table 3."""
    return DeepseekV3Config(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_routed_experts=256,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=0,
        n_group=8,
        topk_group=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        max_position_embeddings=163840,
    )


def qwen3_30b_a3b(layers: int) -> PretrainedConfig:
    """Qwen3-30B-A3B (48 layers)."""
    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,  # pyright: ignore[reportCallIssue]
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    )


def llama4_scout(layers: int) -> PretrainedConfig:
    """The language model of Llama-4-Scout-17B-16E (48 layers)."""
    return Llama4TextConfig(
        vocab_size=202048,
        hidden_size=5120,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_hidden_layers=layers,
        num_attention_heads=40,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=16,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        use_qk_norm=True,
        attention_chunk_size=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        max_position_embeddings=40960,
    )


def _llama3(layers: int, hidden: int, intermediate: int, heads: int, vocabulary: int, tied: bool) -> PretrainedConfig:
    """A llama with 8 key-value heads of 128 or 64 dimensions, as all sizes of Llama 3 have them."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        tie_word_embeddings=tied,
        max_position_embeddings=8192,
    )


def llama3_1b(layers: int) -> PretrainedConfig:
    """Llama-3.2-1B (16 layers)."""
    return _llama3(layers, 2048, 8192, 32, 128256, tied=True)


def llama3_3b(layers: int) -> PretrainedConfig:
    """Llama-3.2-3B (28 layers)."""
    return _llama3(layers, 3072, 8192, 24, 128256, tied=True)


def llama_34b(layers: int) -> PretrainedConfig:
    """CodeLlama-34B (48 layers). Ladder-Residual Table 1 has a model of 34B whose dimensions it does not give."""
    return _llama3(layers, 8192, 22016, 64, 32000, tied=False)


def llama_176b(layers: int) -> PretrainedConfig:
    """A llama with BLOOM-176B's width, heads and depth (70 layers), and an MLP that makes it 176 B parameters.

    Ladder-Residual Table 1 has a model of 176B whose dimensions it does not give.
    """
    return _llama3(layers, 14336, 47104, 112, 128256, tied=False)


def llama3_8b(layers: int) -> PretrainedConfig:
    """Llama-3-8B (32 layers)."""
    return _llama3(layers, 4096, 14336, 32, 128256, tied=False)


def llama3_70b(layers: int) -> PretrainedConfig:
    """Llama-3-70B (80 layers), the model of Ladder-Residual Figure 2."""
    return _llama3(layers, 8192, 28672, 64, 128256, tied=False)


def dense_1_5b(layers: int) -> PretrainedConfig:
    """A llama with the dimensions of Qwen2.5-1.5B (28 layers), whose embeddings and output head are one weight."""
    return LlamaConfig(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=32768,
    )


def tiny_dense(layers: int) -> PretrainedConfig:
    """A very small llama, with which an inference benchmark can be tried on CPUs."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )


def tiny(layers: int) -> PretrainedConfig:
    """A very small qwen3_moe, with which a benchmark can be tried on CPUs."""
    return Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # pyright: ignore[reportCallIssue]
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
    )


SHAPES: dict[str, Callable[[int], PretrainedConfig]] = {
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v2": deepseek_v2,
    "deepseek-v3": deepseek_v3,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "llama4-scout": llama4_scout,
    "llama3-1b": llama3_1b,
    "llama3-3b": llama3_3b,
    "llama3-8b": llama3_8b,
    "llama-34b": llama_34b,
    "llama3-70b": llama3_70b,
    "llama-176b": llama_176b,
    "dense-1.5b": dense_1_5b,
    "tiny": tiny,
    "tiny-dense": tiny_dense,
}

# Decoder layers of the models whose dimensions the shapes have.
DEPTHS: dict[str, int] = {
    "deepseek-v2-lite": 27,
    "deepseek-v2": 60,
    "deepseek-v3": 61,
    "qwen3-30b-a3b": 48,
    "llama4-scout": 48,
    "llama3-1b": 16,
    "llama3-3b": 28,
    "llama3-8b": 32,
    "llama-34b": 48,
    "llama3-70b": 80,
    "llama-176b": 70,
    "dense-1.5b": 28,
    "tiny": 4,
    "tiny-dense": 4,
}
