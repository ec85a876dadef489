"""The models that vLLM and transformers are compared with: originals, and what they are converted to.

All but the bundled teacher have four layers, and random weights that are large enough for the wiring to matter.
"""

import fcntl
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # fcsd, and the tiny models of the tests

TEACHER = "teacher"
TEXTS = ("Question: What is 12 plus 30? Answer:", "The capital of France is", "def add(a, b):\n    return")
BATCH, LENGTH = 3, 24
HIDDEN = 128  # vLLM's kernels want more than the tests' 64
SIZES: dict[str, dict[str, Any]] = {
    "llama": dict(intermediate_size=256),
    "qwen3": dict(intermediate_size=256, head_dim=32),
    "qwen3_moe": dict(intermediate_size=256, moe_intermediate_size=64, head_dim=32),
    "qwen2_moe": dict(intermediate_size=256, moe_intermediate_size=64, shared_expert_intermediate_size=128),
    "mixtral": dict(intermediate_size=128),
    "olmoe": dict(intermediate_size=64),
    "glm4_moe": dict(intermediate_size=256, moe_intermediate_size=64, head_dim=32),
    "gpt_oss": dict(intermediate_size=128, head_dim=32),
    "deepseek_v2": dict(
        intermediate_size=256, moe_intermediate_size=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
        v_head_dim=32, head_dim=32,
    ),
    "deepseek_v3": dict(
        intermediate_size=256, moe_intermediate_size=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32,
        v_head_dim=32, q_lora_rank=64, topk_method="noaux_tc", scoring_func="sigmoid",
    ),
    "llama4_text": dict(intermediate_size=64, intermediate_size_mlp=256, head_dim=32, attention_chunk_size=128),
}  # fmt: skip
# Cases whose weights are saved in fp8, in blocks of 128 x 128 with a scale each. vLLM divides a matrix at whole blocks.
FP8 = ("qwen3_moe-fp8",)
FP8_SIZES: dict[str, Any] = dict(
    hidden_size=256, head_dim=128, intermediate_size=256, moe_intermediate_size=256, vocab_size=256
)
# Name of the case -> architecture, layers, and the other options of `fcsd convert`.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama-ladder": ("llama", "1-3", dict(wiring="ladder")),
    "qwen3-parallel": ("qwen3", "all", dict(wiring="parallel")),
    "qwen3_moe-farskip": ("qwen3_moe", "1-3", dict(wiring="farskip")),
    "qwen2_moe-farskip": ("qwen2_moe", "1-3", dict(wiring="farskip")),
    "mixtral-ladder": ("mixtral", "1-3", dict(wiring="ladder")),
    "olmoe-farskip": ("olmoe", "all", dict(wiring="farskip")),
    "glm4_moe-farskip": ("glm4_moe", "1-3", dict(wiring="farskip")),
    "deepseek_v2-farskip": ("deepseek_v2", "all", dict(wiring="farskip")),
    "deepseek_v3-farskip": ("deepseek_v3", "1-3", dict(wiring="farskip")),
    "gpt_oss-farskip": ("gpt_oss", "1-3", dict(wiring="farskip")),
    "llama4_text-farskip": ("llama4_text", "1-3", dict(wiring="farskip")),
    "qwen2_moe-partly": ("qwen2_moe", "0,2", dict(wiring="farskip", border="partial")),
    "glm4_moe-attn-only": ("glm4_moe", "1-3", dict(wiring="farskip", variant="attn-only")),
    "llama-mlp-only": ("llama", "0,2-3", dict(wiring="ladder", variant="mlp-only")),
    "qwen3_moe-fp8": ("qwen3_moe", "1-3", dict(wiring="farskip")),
    "llama-desync-2x": ("llama", "1-3", dict(wiring="desync-2x", tp_degree=2)),
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

    if case == TEACHER:
        original.unlink(missing_ok=True)
        original.symlink_to(ROOT / "assets" / "teacher")
        convert_checkpoint(original, converted, layers="all", wiring="farskip", check=False)
        return
    import tiny  # pyright: ignore[reportMissingImports]

    arch, layers, options = CASES[case]
    sizes = FP8_SIZES if case in FP8 else dict(hidden_size=HIDDEN) | SIZES[arch]
    model = tiny.model(arch, **sizes)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(3)
    model.save_pretrained(original)
    if case in FP8:
        quantise(original)
    convert_checkpoint(original, converted, layers=layers, check=False, **options)


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


def prompts(original: Path, case: str) -> list[list[int]]:
    """The token ids of the prompts of a case."""
    if case == TEACHER:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(original)
        return [tokenizer(text)["input_ids"] for text in TEXTS]
    import tiny  # pyright: ignore[reportMissingImports]

    return tiny.tokens(BATCH, LENGTH).tolist()


def inspect_here() -> None:
    """Let vLLM look at model classes in this process.

    By itself it starts a process for each class, which imports everything again, in 15 to 30 s. vLLM 0.24 does not
    touch a GPU when it looks at the classes of these models, so this process can still fork an engine afterwards.
    """
    import vllm.model_executor.models.registry as registry  # pyright: ignore[reportMissingImports]

    registry._run_in_subprocess = lambda work: work()
