"""Generation speed of the evaluation adapter, way by way, beside lm-eval's own HFLM.

``python -m benchmarks.infer.generate --tokenizer assets/teacher [--seconds 60] [--out generate.json]``. The model and
the prompts are those of ``benchmarks.infer.evaluate``: 1.5 billion random parameters in bf16, prompts as long as the
tasks', 128 new tokens each, no answer ending early. Every line is printed when it is measured; what would start after
``--seconds`` is left out. First graphs on every task, whether they give the answers of batches in fp32 and whether a
mixture of experts can be captured; then HFLM on every task, and the other ways on one.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.infer.evaluate import (
    HFLM_BATCH,
    PROMPTS,
    Items,
    answers,
    build,
    flips,
    lm_eval_model,
    prompt_items,
    words_of,
)
from benchmarks.out_file import out_file
from transformers import AutoTokenizer

from fcsd.engine.generate import BATCHES, GRAPHS, SLOTS
from fcsd.eval.engines.adapter import HFAdapter

SHORT = next(iter(PROMPTS))


class Clock:
    """Runs measurements one after another until the time is over, and prints each result at once."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self.rows: list[dict[str, Any]] = []

    def measure(self, what: str, task: str, lm: Any, items: Items) -> dict[str, Any] | None:
        """Measures the items per second of ``lm`` on a task; returns None without measuring if no time is left."""
        if time.perf_counter() > self._end:
            return None
        texts, seconds = answers(lm, items)
        row: dict[str, Any] = {"what": what, "task": task, "items": len(items), "seconds": seconds}
        self.say(**row, items_per_s=len(items) / seconds)
        return row | {"texts": texts}

    def check(self, what: str, work: Callable[[], dict[str, Any]]) -> None:
        """Runs ``work`` and prints the values that it returns, if there is time left."""
        if time.perf_counter() <= self._end:
            began = time.perf_counter()
            found = work()
            self.say(what=what, **found, seconds=time.perf_counter() - began)

    def say(self, **row: Any) -> None:
        """Prints a line with these values, and keeps them in ``rows``."""
        self.rows.append(row)
        shown = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
        print("  ".join(shown), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory with any fast tokenizer")
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--prompts", type=int, default=128, help="per task")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60.0, help="after which nothing more is started")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args(arguments)

    clock = Clock(options.seconds)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    words = words_of(tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def random_model(arch: str, dtype: torch.dtype) -> Any:
        with torch.device(device):
            return build(arch, len(tokenizer), options.layers).to(dtype)  # type: ignore[arg-type]

    def way(model: Any, name: str) -> HFAdapter:
        lm = HFAdapter(model, tokenizer, generation=name)
        answers(lm, prompt_items(SHORT, 8, words, 4))  # this warm-up chooses kernels and allocates memory
        return lm

    llama = random_model("llama", torch.bfloat16)
    tasks = {task: prompt_items(task, options.prompts, words, options.new_tokens) for task in PROMPTS}
    graphs, hflm = way(llama, GRAPHS), lm_eval_model(llama, tokenizer, HFLM_BATCH)
    answers(hflm, prompt_items(SHORT, 8, words, 4))
    clock.say(what="ready")
    ours = {task: clock.measure(GRAPHS, task, graphs, items) for task, items in tasks.items()}

    def equal() -> dict[str, Any]:
        llama.float()
        items = prompt_items(SHORT, 16, words, 32)
        texts = [answers(way(llama, name), items)[0] for name in (BATCHES, GRAPHS)]
        llama.bfloat16()
        return {"flips": flips(*texts)[0]}

    def experts() -> dict[str, Any]:
        lm = way(random_model("qwen3_moe", torch.bfloat16), GRAPHS)
        return {
            "items": options.prompts,
            "generating_s": answers(lm, prompt_items(SHORT, options.prompts, words, 32))[1],
        }

    clock.check("graphs against batches, fp32, 16 prompts, 32 tokens", equal)
    clock.check("a mixture of experts by graphs, 32 tokens", experts)
    theirs = {task: clock.measure("HFLM", task, hflm, items) for task, items in tasks.items()}
    both = [(row, other) for task, row in ours.items() if row and (other := theirs[task])]
    for row, other in both:
        changed = flips(row["texts"], other["texts"])[0]
        clock.say(what="HFLM / graphs", task=row["task"], ratio=other["seconds"] / row["seconds"], bf16_flips=changed)
    if both:
        total = sum(other["seconds"] for _, other in both) / sum(row["seconds"] for row, _ in both)
        clock.say(what="HFLM / graphs", task=f"{len(both)} tasks", ratio=total)
    clock.measure(SLOTS, SHORT, way(llama, SLOTS), tasks[SHORT])
    clock.measure(BATCHES, SHORT, way(llama, BATCHES), tasks[SHORT])
    if options.out:
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        facts = {"device": name, "torch": torch.__version__, "prompts": options.prompts}
        facts |= {"new_tokens": options.new_tokens, "hflm_batch_size": HFLM_BATCH, "rows": clock.rows}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
