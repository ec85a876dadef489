"""The models that vLLM and transformers are compared with: originals, and what they are converted to.

All but the bundled teacher have four layers, and random weights that are large enough for the wiring to matter.
"""

import fcntl
import json
import shutil
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]  # its tiny models

TEACHER = "teacher"
TEXTS = ("Question: What is 12 plus 30? Answer:", "The capital of France is", "def add(a, b):\n    return")
BATCH, LENGTH = 3, 24
VOCAB = 256
HIDDEN = 128  # vLLM's kernels want more than the tests' 64
_HEADS, _MLP, _EXPERTS = dict(head_dim=32), dict(intermediate_size=256), dict(intermediate_size=64)
_MOE, _TIED = _MLP | dict(moe_intermediate_size=64), dict(tie_word_embeddings=True)
_LATENT = _MOE | dict(kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32)
_SIGMOID = dict(topk_method="noaux_tc", scoring_func="sigmoid")
_SCALED = dict(embedding_multiplier=1.5, attention_multiplier=0.2)
_LINEAR = dict(shared_expert_intermediate_size=64, linear_key_head_dim=64, linear_value_head_dim=64)


def _rotary(kind: str = "default", theta: float = 1e3, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": dict(rope_type=kind, rope_theta=theta, **more)}


_LONG = dict(original_max_position_embeddings=256, short_factor=[1.5] * 16, long_factor=[2.0] * 16)
SIZES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "phi3"), _MLP),
    **dict.fromkeys(("qwen3", "mistral", "ernie4_5", "glm", "nemotron", "glm4", "exaone4"), _MLP | _HEADS),
    **dict.fromkeys(("qwen3_moe", "glm4_moe", "mellum", "afmoe"), _MOE | _HEADS),
    "qwen2_moe": _MOE | dict(shared_expert_intermediate_size=128),
    "mixtral": dict(intermediate_size=128),
    "olmoe": _EXPERTS,
    "gpt_oss": _HEADS | dict(intermediate_size=128),
    "deepseek_v2": _LATENT | _HEADS,
    **dict.fromkeys(("deepseek_v3", "kimi_k25"), _LATENT | _SIGMOID | dict(q_lora_rank=64)),
    "llama4_text": _EXPERTS | _HEADS | dict(intermediate_size_mlp=256, attention_chunk_size=128),
    # Queries are scaled by their position from the eighth token on.
    "ministral3": _MLP | _HEADS | _rotary(
        "yarn", 1e4, factor=32.0, original_max_position_embeddings=8, beta_fast=32.0, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
    ),
    "minimax_m2": _EXPERTS | _HEADS | dict(rotary_dim=16, use_routing_bias=True, scoring_func="sigmoid"),
    "ernie4_5_moe": _MOE,
    "mimo_v2_flash": _MOE | _HEADS | _SIGMOID | dict(
        v_head_dim=32, hybrid_layer_pattern=[0, 1] * 2, layer_types=["full_attention", "sliding_attention"] * 2,
        moe_layer_freq=[0, 1, 1, 1], layernorm_epsilon=1e-5, rope_theta=5e6, swa_rope_theta=1e4,
        partial_rotary_factor=0.334, sliding_window_size=16, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_head_dim=32, swa_v_head_dim=32, add_swa_attention_sink_bias=True,
    ),
    # vLLM norms latents with this epsilon, and transformers with 1e-6 always; for minicpm3 as well.
    "glm4_moe_lite": _LATENT | dict(rms_norm_eps=1e-6, q_lora_rank=64),
    # Outputs are normed on arrival. vLLM asserts that Gemma's output head is its embedding.
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma3"), _MLP | _HEADS | _TIED),
    # vLLM's layers add their outputs to the stream themselves, and those of Granite and its like multiply them first.
    **dict.fromkeys(("olmo2", "olmo3"), _MLP),
    "flex_olmo": _EXPERTS,
    # Its biases are always there in vLLM.
    "phimoe": _EXPERTS | dict(attention_bias=True, lm_head_bias=True, max_position_embeddings=512)
    | _rotary("longrope", 1e4, short_mscale=1.1, long_mscale=1.2, **_LONG),
    "granite": _MLP | _SCALED,
    "granitemoe": _EXPERTS | _SCALED,
    "granitemoehybrid": _EXPERTS | _SCALED | dict(
        shared_intermediate_size=64, mamba_n_heads=8, mamba_d_head=32, mamba_d_state=16
    ),
    "hyperclovax": _MLP | _HEADS | _SCALED | dict(residual_multiplier=0.5, logits_scaling=0.5),
    "minicpm3": _MLP | dict(
        kv_lora_rank=64, q_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, scale_depth=0.8,
        rms_norm_eps=1e-6, max_position_embeddings=256,
    ) | _rotary("longrope", 1e4, factor=1.0, **_LONG),
    # vLLM reads the width of an expert and the windows of layers in fields of its own.
    "hy_v3": _MOE | _HEADS | dict(expert_hidden_dim=64),
    "exaone_moe": _MOE | _HEADS | dict(sliding_windows=[16, None] * 2, mtp_sliding_windows=None),
    "qwen3_next": _MOE | _HEADS | _LINEAR,
    # The sections of rotary embeddings are half of the dimensions that are rotated.
    "glm4v": _MLP | _HEADS | _rotary(partial_rotary_factor=0.5, mrope_section=[4, 2, 2]),
    "glm4v_moe": _MOE | _HEADS | dict(use_qk_norm=False)
    | _rotary(partial_rotary_factor=0.5, mrope_section=[4, 2, 2]),
    "qwen3_vl": _MLP | _HEADS | _rotary(mrope_section=[8, 4, 4], mrope_interleaved=True),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _MLP | _rotary(mrope_section=[4, 6, 6])),
    "internvl": _MLP | _HEADS,  # around qwen3
    "internvl+qwen2": _MLP,
    "internvl+qwen3_moe": _MOE | _HEADS,
    "mistral3": _MLP | _HEADS | dict(model_type="mistral", sliding_window=None) | _rotary(theta=1e4),
    **dict.fromkeys(
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe"),
        _MOE | _HEADS | _LINEAR
        | _rotary(partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True),
    ),
    "laguna": _MOE | _HEADS | dict(shared_expert_intermediate_size=64, mlp_only_layers=[0], decoder_sparse_step=1),
    **dict.fromkeys(("gemma4_text", "gemma4"), _MOE | _HEADS | _TIED | dict(global_head_dim=64)),
    "qwen3_vl_moe": _MLP | _HEADS | dict(moe_intermediate_size=96, norm_topk_prob=True)
    | _rotary(mrope_section=[8, 4, 4], mrope_interleaved=True),
    # vLLM's classes tie the output head to the embedding.
    "lfm2": _MLP | _TIED | dict(conv_dim=HIDDEN, block_dim=HIDDEN),
    "lfm2_moe": _MOE | _TIED,
    "jamba": dict(intermediate_size=128),
}  # fmt: skip
# Cases as AMD publishes Instella-MoE: DeepSeek-V3 with gates, trained with FarSkip. vLLM has no class of that name.
GATED = ("deepseek_v3-gated",)
# Cases whose weights are saved in fp8, in blocks of 128 x 128 with a scale each. vLLM divides a matrix at whole blocks.
FP8 = ("qwen3_moe-fp8",)
FP8_SIZES: dict[str, Any] = dict(
    hidden_size=256, head_dim=128, intermediate_size=256, moe_intermediate_size=256, vocab_size=256
)
# Cases whose linear layers are stored by the methods that people serve, in groups of 128 where a method has groups:
# the end of a case's name -> a method of tests/quantised.py.
STORED = {
    "w4a16": "packed", "awq": "awq", "gptq": "gptq_symmetric", "gptq-ordered": "gptq_symmetric_ordered",
    "auto-round": "auto_round", "w8a8": "int8", "fp8-dynamic": "float8_dynamic", "nvfp4a16": "nvfp4",
}  # fmt: skip
QUANTISED = {f"{arch}-{end}": method for arch in ("llama", "qwen3_moe") for end, method in STORED.items()}
# vLLM joins matrices that read the same, and has one scale for a whole matrix of NVFP4 then.
SHARED_SCALE = 2.0**-11
QUANTISED_SIZES: dict[str, Any] = dict(
    hidden_size=512, head_dim=64, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1024,
    moe_intermediate_size=512, vocab_size=256,
)  # fmt: skip
# Cases with the sizes that vLLM's kernels for latent attention know.
LATENT = ("deepseek_v2-latent",)
LATENT_SIZES: dict[str, Any] = dict(
    num_attention_heads=16, num_key_value_heads=16, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, head_dim=64,
)  # fmt: skip
# Families whose norms, biases and factors are random, too; those of the others are what transformers begins with.
STIRRED = (
    *("gemma4_text", "gemma4", "qwen3_vl_moe", "kimi_k25", "lfm2", "lfm2_moe", "jamba"),
    *("qwen2_vl", "qwen2_5_vl", "internvl", "internvl+qwen2", "internvl+qwen3_moe"),
)
# Fields of config.json of a multimodal type that differ from those of the tests, and of its vision tower. The tokens
# for images are none of the prompts and answers, because what they stand for is not given.
OUTER: dict[str, dict[str, Any]] = {
    "gemma4": dict(image_token_id=VOCAB, video_token_id=VOCAB + 1, audio_token_id=VOCAB + 2),
    "kimi_k25": dict(image_token_id=VOCAB, video_token_id=VOCAB + 1, media_placeholder_token_id=VOCAB),
}
VISION: dict[str, dict[str, Any]] = {"kimi_k25": dict(init_pos_emb_height=4, init_pos_emb_width=4)}
# What preprocessor_config.json of a published model says. vLLM 0.28 to 0.30 ask the processor how images are normed,
# and a processor has a tokenizer.
PROCESSOR = {
    arch: dict(
        image_processor_type="Qwen2VLImageProcessor", processor_class=name, patch_size=14, temporal_patch_size=2,
        merge_size=2, image_mean=[0.48, 0.46, 0.41], image_std=[0.27, 0.26, 0.28],
    )
    for arch, name in (("qwen2_vl", "Qwen2VLProcessor"), ("qwen2_5_vl", "Qwen2_5_VLProcessor"))
}  # fmt: skip
# Families of which transformers saves other names than published files have, or experts in another layout.
PUBLISHED = ("qwen3_vl_moe", "kimi_k25")
# Cases for four ranks, each of which has heads of keys and values of its own under Desync.
BY_FOUR = ("llama-desync-4x-by-4",)
# Cases of HyperCLOVA X whose layers norm no output.
PLAIN = ("hyperclovax-plain",)
# Families with two cases each: three of four layers (``ARCH-WIRING``), and all (``ARCH-WIRING-all``).
MORE = {
    "ladder": (
        *("mistral", "gemma", "phi3", "ernie4_5", "glm", "nemotron", "gemma2", "gemma3_text", "gemma3", "glm4"),
        *("qwen3_vl", "glm4v", "mistral3", "qwen3_5_text", "qwen3_5", "olmo2", "olmo3", "exaone4", "granite"),
        *("hyperclovax", "minicpm3", "lfm2", "qwen2_vl", "qwen2_5_vl", "internvl", "internvl+qwen2"),
    ),
    "farskip": (
        *("minimax_m2", "ernie4_5_moe", "glm4_moe_lite", "mellum", "laguna", "afmoe", "hy_v3", "exaone_moe"),
        *("glm4v_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe", "flex_olmo", "phimoe", "granitemoe"),
        *("gemma4_text", "gemma4", "qwen3_vl_moe", "kimi_k25", "lfm2_moe", "jamba"),
        *("granitemoehybrid", "internvl+qwen3_moe"),
    ),
}
# Name of the case -> architecture, layers, and the other options of `fcsd convert`. ``TYPE+TEXT`` is an architecture
# with another language model inside than that of the tests.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-ladder": ("llama", "1-3", dict(wiring="ladder")),
    "qwen3-parallel": ("qwen3", "all", dict(wiring="parallel")),
    "qwen3-ladder": ("qwen3", "1-3", dict(wiring="ladder")),
    "qwen3_moe-farskip": ("qwen3_moe", "1-3", dict(wiring="farskip")),
    "qwen2_moe-farskip": ("qwen2_moe", "1-3", dict(wiring="farskip")),
    "mixtral-ladder": ("mixtral", "1-3", dict(wiring="ladder")),
    "olmoe-farskip": ("olmoe", "all", dict(wiring="farskip")),
    "glm4_moe-farskip": ("glm4_moe", "1-3", dict(wiring="farskip")),
    "deepseek_v2-farskip": ("deepseek_v2", "all", dict(wiring="farskip")),
    "deepseek_v2-latent": ("deepseek_v2", "all", dict(wiring="farskip")),
    "deepseek_v3-farskip": ("deepseek_v3", "1-3", dict(wiring="farskip")),
    "gpt_oss-farskip": ("gpt_oss", "1-3", dict(wiring="farskip")),
    "llama4_text-farskip": ("llama4_text", "1-3", dict(wiring="farskip")),
    "qwen2_moe-partly": ("qwen2_moe", "0,2", dict(wiring="farskip", border="partial")),
    "glm4_moe-attn-only": ("glm4_moe", "1-3", dict(wiring="farskip", variant="attn-only")),
    "llama-mlp-only": ("llama", "0,2-3", dict(wiring="ladder", variant="mlp-only")),
    "qwen3_moe-fp8": ("qwen3_moe", "1-3", dict(wiring="farskip")),
    **{
        f"{arch}-{end}": (arch, "1-3", dict(wiring=wiring))
        for arch, wiring in (("llama", "ladder"), ("qwen3_moe", "farskip"))
        for end in STORED
    },
    "llama-desync-2x": ("llama", "1-3", dict(wiring="desync-2x", tp_degree=2)),
    "llama-desync-4x": ("llama", "all", dict(wiring="desync-4x", tp_degree=2)),
    "llama-desync-4x-by-4": ("llama", "all", dict(wiring="desync-4x", tp_degree=4)),
    "granite-desync-2x": ("granite", "1-3", dict(wiring="desync-2x", tp_degree=2)),
    "hyperclovax-plain": ("hyperclovax", "1-3", dict(wiring="ladder")),
    "deepseek_v3-gated": ("deepseek_v3", "", {}),  # AMD's keys say how it is wired
    # The plugin refuses these two: vLLM computes something else for the originals, too.
    "ministral3-ladder": ("ministral3", "1-3", dict(wiring="ladder")),
    "mimo_v2_flash-sinks": ("mimo_v2_flash", "1-3", dict(wiring="farskip")),
    **{
        f"{arch}-{wiring}{suffix}": (arch, layers, dict(wiring=wiring))
        for wiring, archs in MORE.items()
        for arch in archs
        for suffix, layers in (("", "1-3"), ("-all", "all"))
    },
}


def made(folder: Path, case: str) -> dict[str, Path]:
    """The directories of the ``original`` and the ``converted`` model of a case, which are made unless they exist.

    Several processes may ask for the same case: one makes it, and the others wait.

    Args:
        folder: where the models of all cases are.
        case: a name in ``CASES``, or ``teacher``.
    """
    paths = dict(original=folder / f"{case}.base", converted=folder / case)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not paths["converted"].exists():  # fcsd renames it into place when it is complete
            _make(case, **paths)
    return paths


def _make(case: str, original: Path, converted: Path) -> None:
    from fcsd.convert import convert_checkpoint
    from fcsd.models.archs import ARCHS

    if case == TEACHER:
        original.unlink(missing_ok=True)
        original.symlink_to(ROOT / "assets" / "teacher")
        convert_checkpoint(original, converted, layers="all", wiring="farskip", check=False)
        return
    import quantised  # pyright: ignore[reportMissingImports]
    import tiny  # pyright: ignore[reportMissingImports]

    arch, layers, options = CASES[case]
    sizes = FP8_SIZES if case in FP8 else dict(hidden_size=HIDDEN) | deepcopy(SIZES[arch])
    if case in QUANTISED:
        sizes |= {name: size for name, size in QUANTISED_SIZES.items() if arch != "llama" or "moe" not in name}
    if case in LATENT:
        sizes |= LATENT_SIZES
    if case in BY_FOUR:
        sizes |= dict(num_key_value_heads=4)
    if case in GATED:
        sizes |= dict(q_lora_rank=None)
    if case in PLAIN:
        sizes |= dict(use_post_norm=False)
    model = tiny.model(arch, **sizes)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    if arch in STIRRED:
        stir(model)
    if case in QUANTISED and "moe" in arch:
        decide(model)
    # Some cases are rewritten as one file.
    shards = {} if case in (*FP8, *GATED, *QUANTISED) or arch in PUBLISHED else dict(max_shard_size="1MB")
    model.save_pretrained(original, **shards)
    config = json.loads((original / "config.json").read_text())
    outer = arch.partition("+")[0]
    config["architectures"] = [ARCHS[outer].vllm_causal_lm]  # as it is published, and as vLLM knows it
    config |= OUTER.get(arch, {})
    if arch in VISION:
        config["vision_config"] |= VISION[arch]
    (original / "config.json").write_text(json.dumps(config))
    if arch in PROCESSOR:
        (original / "preprocessor_config.json").write_text(json.dumps(PROCESSOR[arch]))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "assets" / "teacher" / name, original)
    if arch in PUBLISHED:
        publish(arch, model, original)
    if case in FP8:
        quantise(original)
    if case in QUANTISED:
        quantised.quantise_layers(original, *scheme(case, model))
    if case in GATED:
        gate(original)
        convert_checkpoint(original, converted, check=False)
        return
    convert_checkpoint(original, converted, layers=layers, check=False, **options)


def stir(model: Any) -> None:
    """Change every vector of a model at random."""
    import torch

    generator = torch.Generator().manual_seed(5)
    for tensor in model.state_dict().values():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.add_(0.4 * torch.rand(tensor.shape, generator=generator))


def publish(arch: str, model: Any, path: Path) -> None:
    """Write the tensors of a checkpoint again under the names and in the layout of published files, for vLLM."""
    import published  # pyright: ignore[reportMissingImports]
    from safetensors.torch import save_file

    tensors = {name: x.clone() for name, x in published.NAMED[arch](model).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def gate(path: Path) -> None:
    """Turn a checkpoint of DeepSeek-V3 into one as AMD publishes Instella-MoE, whose first layer is standard."""
    import torch
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors, config = load_file(file), json.loads((path / "config.json").read_text())
    heads, generator = config["num_attention_heads"] * config["v_head_dim"], torch.Generator().manual_seed(7)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.gate_proj.weight"
        tensors[name] = 0.2 * torch.randn(heads, config["hidden_size"], generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    keys = dict(architectures=["InstellaMoEForCausalLM"], gated_attention=True, farskip=True, farskip_start_idx=1)
    (path / "config.json").write_text(json.dumps(config | keys))


def quantise(path: Path) -> None:
    """Round the projections of a checkpoint to fp8, in the layout of DeepSeek-V3's checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    file, block = path / "model.safetensors", 128
    found = {}
    for name, value in load_file(file).items():
        if not name.endswith("proj.weight"):
            found[name] = value.bfloat16()
            continue
        rows, columns = (size // block for size in value.shape)
        blocks = value.view(rows, block, columns, block)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        found[name] = (blocks / scales[:, None, :, None]).reshape(value.shape).to(torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = scales
    save_file(found, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    kept = ["lm_head", *(name.removesuffix(".weight") for name in found if name.endswith("gate.weight"))]
    scheme = dict(quant_method="fp8", fmt="e4m3", weight_block_size=[block, block], activation_scheme="dynamic")
    scheme["modules_to_not_convert"] = kept
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme, "dtype": "bfloat16"}))


def scheme(case: str, model: Any) -> tuple[Any, dict[str, Any]]:
    """What stores a linear layer of a quantised case, and its ``quantization_config``, which leaves routers out."""
    import quantised  # pyright: ignore[reportMissingImports]

    stored, block = quantised.methods(128, SHARED_SCALE)[QUANTISED[case]]
    routers = [name for name, _ in model.named_modules() if name.endswith("mlp.gate")]
    if block["quant_method"] == "compressed-tensors":
        block["ignore"] += routers
    elif block["quant_method"] == "auto-round":
        block["extra_config"] = {name: {"bits": 16} for name in routers}
    elif routers:
        block["modules_to_not_convert"] = routers
    return stored, block


def decide(model: Any) -> None:
    """Let the routers of a model decide clearly: by a part of the embedding that layers hardly change.

    Otherwise two experts are nearly alike for some token, and what is rounded before chooses between them.
    """
    import torch
    from torch.nn.functional import one_hot

    embedding = model.get_input_embeddings().weight.data
    routers = [module.gate.weight.data for module in model.modules() if hasattr(module, "experts")]
    experts, tokens = len(routers[0]), torch.arange(len(embedding))
    first, second = (one_hot((tokens + n) % experts, experts) for n in (0, 1))
    embedding[:, :experts] = 12 * embedding.std() * (first + 0.8 * second)
    for name, weight in model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.data.transpose(-2, -1)[..., :experts] *= 1e-3
    for weight in routers:
        weight *= 0.1
        weight[:, :experts] += 10 * torch.eye(experts)


def prompts(original: Path, case: str) -> list[list[int]]:
    """The token ids of the prompts of a case."""
    if case == TEACHER:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(original)
        return [tokenizer(text)["input_ids"] for text in TEXTS]
    import tiny  # pyright: ignore[reportMissingImports]

    return tiny.tokens(BATCH, LENGTH).tolist()
