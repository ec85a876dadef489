"""Times stock vLLM and a wiring by NCCL and through memory of the host, and stock with NVLink, in turns on two GPUs.

    python benchmarks/vllm/vllm_turns.py OUT.json SHAPE[:LAYERS] [--seconds 150]

All engines run at the same time, forked from one process that has imported vLLM, and wait for their turn. Weights are
random. A step is what one more token takes, over 64 tokens of 1, 16 and 64 answers in CUDA graphs; first tokens are
those of 16 prompts of 512 and 2048 tokens. ``fcsd bench serve`` does this with servers and more variants, in minutes.
What was measured is in OUT.json after every turn, and what engines say is beside it.
"""

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# name -> wiring, and what its environment has
ENGINES: dict[str, tuple[str, dict[str, str]]] = {
    "stock": ("standard", {"NCCL_P2P_DISABLE": "1"}),
    "stock, host sums": ("standard", {"NCCL_P2P_DISABLE": "1", "FCSD_ALL_REDUCE": "host"}),
    "ladder": ("ladder", {"NCCL_P2P_DISABLE": "1"}),
    "ladder, host sums": ("ladder", {"NCCL_P2P_DISABLE": "1", "FCSD_ALL_REDUCE": "host"}),
    "stock with NVLink": ("standard", {}),
}
STEPS, FIRST = (1, 16, 64), (512, 2048)
BEGIN, END = 8, 72  # tokens of an answer; a step is taken between them


def serve(turns: Connection, path: Path, log: Path, environment: dict[str, str]) -> None:
    """One engine: answers each request for (prompts, tokens of each, new tokens) by its seconds and its tokens."""
    with log.open("w") as messages:
        os.dup2(messages.fileno(), 1)
        os.dup2(messages.fileno(), 2)
    os.environ.update(environment)
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    llm = LLM(
        str(path), load_format="dummy", tensor_parallel_size=2, skip_tokenizer_init=True, enable_prefix_caching=False,
        max_model_len=2304, max_num_seqs=64, max_num_batched_tokens=8192, gpu_memory_utilization=0.15, seed=0,
        kv_cache_memory_bytes=4 << 30, compilation_config=dict(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 32, 64]),
        disable_custom_all_reduce="NCCL_P2P_DISABLE" in environment,
    )  # fmt: skip
    turns.send("up")
    while (asked := turns.recv()) is not None:
        count, tokens, new = asked
        prompts = [{"prompt_token_ids": [(7 * n + 31 * i) % 5000 for n in range(tokens)]} for i in range(count)]
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        turns.send((seconds, [list(output.outputs[0].token_ids) for output in outputs]))


def measured(turns: Connection) -> dict[str, float]:
    """One turn of an engine, in milliseconds."""

    def ask(*request: int) -> float:
        turns.send(request)
        return 1e3 * turns.recv()[0]

    found = {f"step of {n}": (ask(n, 64, END) - ask(n, 64, BEGIN)) / (END - BEGIN) for n in STEPS}
    return found | {f"first tokens of 16 x {tokens}": ask(16, tokens, 1) for tokens in FIRST}


def main() -> None:
    """See the head of this file."""
    # Imported once, before the forks.
    from vllm import LLM, __version__  # noqa: F401  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

    from fcsd.bench.serve.model import config_of, wiring_for
    from fcsd.bench.serve.running import write_directory

    out, (shape, _, layers) = Path(sys.argv[1]), sys.argv[2].partition(":")
    until = time.monotonic() + float(sys.argv[4] if sys.argv[3:4] == ["--seconds"] else 150)
    config = config_of(shape, int(layers) if layers else None)
    found: dict[str, Any] = {"command": " ".join(sys.argv), "vllm": __version__, "milliseconds": {}, "logs": {}}
    fork, ends = multiprocessing.get_context("fork"), {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, (wiring, environment)) in enumerate(ENGINES.items()):
            path = write_directory(shape, config, wiring_for(wiring, config, 2), Path(scratch, str(number)), 2304)
            ends[name], other = fork.Pipe()
            log = out.with_name(f"{name.replace(', ', '-').replace(' ', '-')}.log")
            fork.Process(target=serve, args=(other, path, log, environment)).start()
            other.close()
        running = {}
        for name, turns in ends.items():
            try:
                if turns.poll(max(0.0, until - 45 - time.monotonic())) and turns.recv() == "up":
                    running[name] = turns
            except EOFError:
                pass
        answers = {}
        for name, turns in running.items():
            turns.send((16, 40, END))
            answers[name] = turns.recv()[1]
        found["started"], first = list(running), answers.get("stock")
        found["answers like stock"] = {
            name: sum(a == b for a, b in zip(own, first or [], strict=False)) for name, own in answers.items()
        }
        turn = 0
        while running and time.monotonic() < until - 10:
            order = list(running)
            for name in order[turn % len(order) :] + order[: turn % len(order)]:
                for what, time_ in measured(running[name]).items():
                    if turn:  # the first round warms up
                        found["milliseconds"].setdefault(name, {}).setdefault(what, []).append(round(time_, 4))
            turn += 1
            out.write_text(json.dumps(found, indent=1) + "\n")
    for name, rows in found["milliseconds"].items():
        print(name, {what: round(statistics.median(times), 3) for what, times in rows.items()}, flush=True)
    print(found["started"], found["answers like stock"], flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
