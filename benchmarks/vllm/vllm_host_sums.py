"""Compares what vLLM answers with its own sums and with sums through memory of the host: tokens and log-probabilities.

    NCCL_P2P_DISABLE=1 python3 benchmarks/vllm/vllm_host_sums.py OUT.json SHAPE[:LAYERS] [SHAPE[:LAYERS] ...]

Every model has random weights of a shape and runs in a process of its own for each way: eager, and with vLLM's compiler
and CUDA graphs, by TP (2) GPUs. Prompts have 3 to 700 tokens, so that sums of all sizes are made. Between two ranks the
exact sums have NCCL's bits, so tokens and log-probabilities have to be equal; in a format they differ, and the file
says by how much. MODES and WAYS choose some of them, separated by commas; MEMORY is the share of a GPU. Logs
and answers lie beside OUT.json. PYTHONPATH is the root of the repository, and vLLM is installed.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LENGTHS = (3, 40, 700)
WAYS = {"NCCL": "", "NCCL again": "", "host": "host", "host:int8": "host:int8"}
MODES = ("eager", "graphs")


def answers(folder: str, eager: bool) -> list[dict[str, Any]]:
    """What vLLM answers to every prompt: its greedy tokens and their log-probabilities."""
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    llm = LLM(
        model=folder,
        load_format="dummy",
        tensor_parallel_size=int(os.environ.get("TP", "2")),
        skip_tokenizer_init=True,
        enforce_eager=eager,
        disable_custom_all_reduce=True,
        max_model_len=1024,
        gpu_memory_utilization=float(os.environ.get("MEMORY", "0.4")),
        seed=0,
    )
    prompts = [{"prompt_token_ids": [(7 * n + length) % 5000 for n in range(length)]} for length in LENGTHS]
    settings = SamplingParams(temperature=0, max_tokens=24, logprobs=1, detokenize=False)
    found = []
    for answer in llm.generate(prompts, settings):
        (output,) = answer.outputs
        said = [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)]
        found.append({"tokens": list(output.token_ids), "logprobs": said})
    return found


def compared(first: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether tokens are equal, and the largest difference of log-probabilities before the first other token."""
    worst, equal = 0.0, 0
    for a, b in zip(first, other, strict=True):
        equal += a["tokens"] == b["tokens"]
        for x, y, p, q in zip(a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True):
            worst = max(worst, abs(p - q))
            if x != y:
                break
    return {"equal answers": equal, "answers": len(first), "largest difference": worst}


def main() -> None:
    """See the head of this file."""
    if sys.argv[1] == "--one":
        Path(sys.argv[4]).write_text(json.dumps(answers(sys.argv[2], sys.argv[3] == "eager")))
        return
    from fcsd.bench.shapes import SHAPES

    out, found = Path(sys.argv[1]), {}
    for name in sys.argv[2:]:
        shape, _, layers = name.partition(":")
        for mode in os.environ.get("MODES", ",".join(MODES)).split(","):
            with tempfile.TemporaryDirectory() as folder:
                SHAPES[shape](int(layers or SHAPES[shape].depth)).save_pretrained(folder)
                rows = {}
                for way in os.environ.get("WAYS", ",".join(WAYS)).split(","):
                    file = Path(folder, "answer.json")
                    file.unlink(missing_ok=True)
                    command = [sys.executable, __file__, "--one", folder, mode, str(file)]
                    environment = {**os.environ, "FCSD_ALL_REDUCE": WAYS[way]}
                    beside = out.with_name(f"{shape}-{mode}-{way.replace(':', '-').replace(' ', '-')}")
                    log = beside.with_suffix(".log")
                    with log.open("w") as messages:
                        subprocess.run(
                            command, env=environment, stdout=messages, stderr=messages, timeout=240, check=False
                        )
                    lines = log.read_text(errors="replace").splitlines()
                    told = [line[-600:] for line in lines if "sums through" in line or "sums are vLLM" in line]
                    rows[way] = json.loads(file.read_text()) if file.exists() else None
                    beside.with_suffix(".json").write_text(json.dumps(rows[way]) + "\n")
                    first = next(iter(rows.values()))
                    found.setdefault(f"{name}, {mode}", {})[way] = (
                        {"failed": lines[-20:]}
                        if rows[way] is None or first is None
                        else {**compared(first, rows[way]), "log": told[:1]}
                    )
                    out.write_text(json.dumps(found, indent=1) + "\n")
    for name, ways in found.items():
        for way, row in ways.items():
            print(name, way, row.get("failed", row), flush=True)


if __name__ == "__main__":
    main()
