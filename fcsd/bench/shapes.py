"""Transformers configs with the dimensions of the models that benchmarks use; the weights are random."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Shape(NamedTuple):
    """The dimensions of a model. ``shape(layers)`` is a config with so many decoder layers.

    Attributes:
        kind: the name of the config's class in transformers.
        depth: the decoder layers that the model has.
        fields: the other fields of the config.
    """

    kind: str
    depth: int
    fields: dict[str, Any]

    def __call__(self, layers: int) -> "PretrainedConfig":
        import transformers

        return getattr(transformers, self.kind)(num_hidden_layers=layers, **self.fields)


def _sizes(vocabulary: int, hidden: int, intermediate: int, heads: int, kv_heads: int) -> dict[str, Any]:
    names = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    return dict(zip(names, (vocabulary, hidden, intermediate, heads, kv_heads), strict=True))


def _rotated(theta: float, positions: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}, "max_position_embeddings": positions}


def _experts(name: str, number: int, chosen: int) -> dict[str, Any]:
    return {name: number, "num_experts_per_tok": chosen}


def _gpt_oss(experts: int) -> dict[str, Any]:
    """gpt-oss has transformers' own positions and windows in both sizes."""
    return _sizes(201088, 2880, 2880, 64, 8) | _experts("num_local_experts", experts, 4) | {"head_dim": 64}


def _llama_3(
    hidden: int, intermediate: int, heads: int, vocabulary: int = 128256, tied: bool = False
) -> dict[str, Any]:
    """A llama with 8 key-value heads of 128 or 64 dimensions, as all sizes of Llama 3 have them."""
    return _sizes(vocabulary, hidden, intermediate, heads, 8) | _rotated(5e5, 8192) | {"tie_word_embeddings": tied}


_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}
# The first layer of DeepSeek-V2 and V2-Lite is dense.
_DEEPSEEK_2 = _LATENT | {"n_shared_experts": 2, "first_k_dense_replace": 1, "head_dim": 64}

SHAPES: dict[str, Shape] = {
    "deepseek-v2-lite": Shape(
        "DeepseekV2Config",
        27,
        _DEEPSEEK_2
        | _sizes(102400, 2048, 10944, 16, 16)
        | _experts("n_routed_experts", 64, 6)
        | {"moe_intermediate_size": 1408, "q_lora_rank": None}
        | {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek-v2": Shape(  # 236 B parameters
        "DeepseekV2Config",
        60,
        _DEEPSEEK_2
        | _sizes(102400, 5120, 12288, 128, 128)
        | _experts("n_routed_experts", 160, 6)
        | {"moe_intermediate_size": 1536, "q_lora_rank": 1536}
        | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0},
    ),
    "deepseek-v3": Shape(  # without its MTP layer; every layer is MoE, as in FarSkip Table 3
        "DeepseekV3Config",
        61,
        _LATENT
        | _sizes(129280, 7168, 18432, 128, 128)
        | _experts("n_routed_experts", 256, 8)
        | {"moe_intermediate_size": 2048, "q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 0}
        | {"n_group": 8, "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "qwen3-30b-a3b": Shape(
        "Qwen3MoeConfig",
        48,
        _sizes(151936, 2048, 6144, 32, 4)
        | _rotated(1e6, 40960)
        | _experts("num_experts", 128, 8)
        | {"moe_intermediate_size": 768, "head_dim": 128, "norm_topk_prob": True, "decoder_sparse_step": 1}
        | {"rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    ),
    "llama4-scout": Shape(  # the language model of Llama-4-Scout-17B-16E
        "Llama4TextConfig",
        48,
        _sizes(202048, 5120, 8192, 40, 8)
        | _rotated(5e5, 40960)
        | _experts("num_local_experts", 16, 1)
        | {"intermediate_size_mlp": 16384, "head_dim": 128, "interleave_moe_layer_step": 1, "use_qk_norm": True}
        | {"attention_chunk_size": 8192},
    ),
    "gpt-oss-20b": Shape("GptOssConfig", 24, _gpt_oss(32)),
    "gpt-oss-120b": Shape("GptOssConfig", 36, _gpt_oss(128)),
    "llama3-1b": Shape("LlamaConfig", 16, _llama_3(2048, 8192, 32, tied=True)),  # Llama-3.2
    "llama3-3b": Shape("LlamaConfig", 28, _llama_3(3072, 8192, 24, tied=True)),  # Llama-3.2
    "llama3-8b": Shape("LlamaConfig", 32, _llama_3(4096, 14336, 32)),
    # CodeLlama-34B, and a llama with BLOOM-176B's width, heads and depth whose MLP makes it 176 B parameters. The
    # models of these sizes in Ladder-Residual Table 1 have dimensions that the paper does not give.
    "llama-34b": Shape("LlamaConfig", 48, _llama_3(8192, 22016, 64, vocabulary=32000)),
    "llama3-70b": Shape("LlamaConfig", 80, _llama_3(8192, 28672, 64)),  # the model of Ladder-Residual Figure 2
    "llama-176b": Shape("LlamaConfig", 70, _llama_3(14336, 47104, 112)),
    "qwen3-32b": Shape(
        "Qwen3Config",
        64,
        _sizes(151936, 5120, 25600, 64, 8)
        | _rotated(1e6, 40960)
        | {"head_dim": 128, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
    ),
    # The dimensions of Qwen2.5-1.5B.
    "dense-1.5b": Shape(
        "LlamaConfig",
        28,
        _sizes(151936, 1536, 8960, 12, 2) | _rotated(1e6, 32768) | {"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
    ),
    # Very small ones, with which a benchmark can be tried on CPUs.
    "tiny": Shape(
        "Qwen3MoeConfig",
        4,
        _experts("num_experts", 8, 2)
        | {"vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
    ),
    "tiny-dense": Shape("LlamaConfig", 4, _sizes(256, 64, 128, 4, 4) | {"max_position_embeddings": 4096}),
}
