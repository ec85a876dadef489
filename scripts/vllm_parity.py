"""Compares converted models in vLLM with fcsd's reference in transformers: log-probabilities of prompts and answers.

    python scripts/vllm_parity.py make FOLDER [CASE...]     tiny random models, converted, and their reference
    python scripts/vllm_parity.py serve FOLDER TP [CASE...] asks vLLM, and prints a row of the table for each model
        options: --stock serves the original by vLLM's own class, --ep divides the experts, --compile compiles,
        --native computes rotary embeddings and norms by torch, --bf16 loads the weights in bfloat16
    python scripts/vllm_parity.py refused FOLDER TP CASE... without fcsd's plugin, with the shipped code: vLLM refuses

``scripts/vllm_cpu.sh`` runs it in an environment of its own. Every model has four layers and random weights that are
large enough for its wiring to matter: the table also shows how far the unwired model is from the reference.
"""

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests")]  # the tiny models of the tests

BATCH, LENGTH, NEW = 3, 24, 8
TOLERANCE = 1e-5
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
    "llama-desync-2x": ("llama", "1-3", dict(wiring="desync-2x", tp_degree=2)),
}


def make(folder: Path, cases: list[str]) -> None:
    """Write ``FOLDER/CASE``, a converted model, and ``FOLDER/CASE.pt``, what the reference says about prompts."""
    import tiny
    import torch

    from fcsd.convert import convert_checkpoint
    from fcsd.models.build import load_model

    ids = tiny.tokens(BATCH, LENGTH)
    for case in cases:
        arch, layers, options = CASES[case]
        base = tiny.model(arch, hidden_size=HIDDEN, **SIZES[arch])
        for parameter in base.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(3)
        base.save_pretrained(folder / f"{case}.base")
        convert_checkpoint(folder / f"{case}.base", folder / case, layers=layers, check=False, **options)
        wired = load_model(folder / case, dtype=torch.float32)
        with torch.no_grad():
            found, before = (torch.log_softmax(model(ids).logits.float(), -1) for model in (wired, base))
            new = wired.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)[:, LENGTH:]
        torch.save(dict(ids=ids, logprobs=found, unwired=before, new=new), folder / f"{case}.pt")
        print(f"made {case}", flush=True)


def serve(folder: Path, tensor_parallel: int, cases: list[str], options: list[str]) -> None:
    """Print ``| case | ranks | largest difference | from the original | greedy answers equal |`` for each case."""
    from vllm.distributed import cleanup_dist_env_and_memory  # pyright: ignore[reportMissingImports]

    wrong = []
    for case in cases:
        try:
            worst, wiring, equal = differences(folder / case, tensor_parallel, options)
        except Exception as error:
            print(f"| {case} | {tensor_parallel} | {type(error).__name__}: {error} |", flush=True)
            wrong.append(case)
        else:
            numbers = f"{worst:.1e} | {wiring:.2f} | {equal} of {BATCH}"
            print(f"| {case} {' '.join(options)} | {tensor_parallel} | {numbers} |", flush=True)
            if not (worst <= TOLERANCE and equal == BATCH) and "--stock" not in options and "--bf16" not in options:
                wrong.append(case)
        cleanup_dist_env_and_memory()
    if wrong:
        sys.exit(f"not equal: {', '.join(wrong)}")


def differences(path: Path, tensor_parallel: int, options: list[str]) -> tuple[float, float, int]:
    """Ask vLLM for the log-probabilities of the prompts' tokens, and for answers.

    Returns:
        The largest difference from the reference, the largest one from the other wiring (that of the original, or with
        ``--stock`` that of the converted model), and how many answers are those of the reference.
    """
    import torch
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    told, stock = torch.load(f"{path}.pt"), "--stock" in options
    expected, other = (told["unwired"], told["logprobs"]) if stock else (told["logprobs"], told["unwired"])
    llm = LLM(
        f"{path}.base" if stock else str(path),
        dtype="bfloat16" if "--bf16" in options else "float32",
        tensor_parallel_size=tensor_parallel,
        enable_expert_parallel="--ep" in options,
        enforce_eager="--compile" not in options,
        compilation_config={"custom_ops": ["none"]} if "--native" in options else {},
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    sampling = SamplingParams(
        max_tokens=NEW, temperature=0, detokenize=False, prompt_logprobs=1, logprobs=1, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": ids.tolist()} for ids in told["ids"]]
    worst, wiring, equal = 0.0, 0.0, 0
    for row, output in enumerate(llm.generate(prompts, sampling, use_tqdm=False)):
        for place, found in enumerate(output.prompt_logprobs[1:]):
            token = told["ids"][row, place + 1].item()
            worst = max(worst, abs(found[token].logprob - expected[row, place, token].item()))
            wiring = max(wiring, abs(found[token].logprob - other[row, place, token].item()))
        equal += list(output.outputs[0].token_ids) == told["new"][row].tolist()
    return worst, wiring, equal


def refused(folder: Path, tensor_parallel: int, cases: list[str]) -> None:
    """Without the plugin (``VLLM_PLUGINS=``), check that vLLM does not serve the shipped code by its own backend."""
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    for case in cases:
        for trust in (False, True):
            try:
                LLM(
                    str(folder / case), skip_tokenizer_init=True, trust_remote_code=trust, enforce_eager=True,
                    tensor_parallel_size=tensor_parallel, dtype="float32", max_model_len=128,
                )  # fmt: skip
            except Exception as error:
                line = str(error).strip().splitlines()
                print(f"refused {case}, trust_remote_code={trust}: {' '.join(line)[:300]}", flush=True)
            else:
                sys.exit(f"{case}: vLLM served the shipped code without fcsd's plugin")


def main() -> None:
    """Run the part that the arguments name."""
    part, folder, *words = sys.argv[1:]
    options = [word for word in words if word.startswith("--")]
    words = [word for word in words if not word.startswith("--")]
    if part == "make":
        make(Path(folder), words or list(CASES))
    elif part == "serve":
        serve(Path(folder), int(words[0]), words[1:] or list(CASES), options)
    else:
        refused(Path(folder), int(words[0]), words[1:])


if __name__ == "__main__":
    main()
