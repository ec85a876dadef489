"""The evaluation adapter beside lm-eval's own HFLM: speed, and whether the answers are the same.

``python -m benchmarks.infer.evaluate --tokenizer assets/teacher [--arch llama|qwen3_moe] [--out evaluate.json]``. One
random model of 1.5 (llama) billion parameters in memory, synthetic items whose shapes are those of the benchmarks.
Answers are compared in fp32 on a part of the items; speed and flips are measured in bf16 on all of them. A flip
is a question on which the two choose another answer, or a prompt they continue differently; a random model is
nearly indifferent between its choices, so rounding flips far more of its answers than of a trained one's. The
last column says how many HFLM flips itself when its batch size is a quarter.
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.out_file import out_file
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from fcsd.eval.engines.adapter import HFAdapter

# task -> (choices, tokens of the context, tokens of a choice). A choice of one token is a letter. A negative number
# means that the task is like WinoGrande: the choice is a part of the context, and the text after it is scored.
CHOICES = {
    "PIQA": (2, 12, 20),
    "ARC-E": (4, 28, 4),
    "ARC-C": (4, 32, 6),
    "HS": (4, 55, 25),
    "CSQa": (5, 45, 1),
    "WG": (2, 12, -8),
    "MMLU": (4, 110, 1),
    "OBook": (4, 14, 4),
}
# task -> tokens of the prompt, including the few-shot examples
PROMPTS = {"HEval+": 150, "GSM-8K": 800, "MBPP+": 450}
SHAPES = {
    "llama": (LlamaConfig, dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16)),
    "qwen3_moe": (
        Qwen3MoeConfig,
        dict(
            hidden_size=2048,
            num_hidden_layers=12,
            num_experts=32,
            num_experts_per_tok=4,
            moe_intermediate_size=512,
            head_dim=64,
        ),
    ),
}
SHARED = dict(
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128_256,
    tie_word_embeddings=False,
    max_position_embeddings=4096,
)
HFLM_BATCH = 64  # the largest batch size that HFLM's own search tries


@dataclass
class Speed:
    """The results of one task.

    Attributes:
        hflm: items per second of HFLM.
        ours: items per second of the adapter.
        ratio: seconds of HFLM divided by seconds of the adapter.
        fp32_items: items that were compared in fp32.
        fp32_flips: items that the two answer differently in fp32.
        fp32_difference: the largest difference of a log-probability in fp32, in nats.
        bf16_flips: items that the two answer differently in bf16.
        bf16_difference: the largest difference of a log-probability in bf16, in nats.
        hflm_flips: items that HFLM itself answers differently with a quarter of its batch size, in bf16.
    """

    task: str
    items: int
    hflm: float = 0.0
    ours: float = 0.0
    ratio: float = 0.0
    fp32_items: int = 0
    fp32_flips: int = 0
    fp32_difference: float = 0.0
    bf16_flips: int = 0
    bf16_difference: float = 0.0
    hflm_flips: int = 0


Items = list[list[Instance]]  # for each item its requests


def build(arch: str, words: int, layers: int | None) -> PreTrainedModel:
    """Builds a random fp32 model that generates only tokens of the tokenizer, so that its texts can be compared.

    Args:
        words: number of tokens that the tokenizer has.
        layers: decoder layers; None for those of the shape.
    """
    config_class, shape = SHAPES[arch]
    config: Any = config_class(**{**SHARED, **shape, **({"num_hidden_layers": layers} if layers else {})})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[words:] = 0  # their logits are 0, which is far below the largest of the others
    return model.eval()


def words_of(tokenizer: Any) -> list[str]:
    """The tokens that are a space and a word of three letters or more; random texts are made of them."""
    pieces = map(tokenizer.decode, range(len(tokenizer)))
    return [piece for piece in pieces if piece[:1] == " " and piece[1:].isalpha() and len(piece) > 3]


def choice_items(task: str, count: int, words: list[str]) -> Items:
    """Makes random questions of a multiple-choice task, whose lengths vary around those of the task."""
    choices, context, length = CHOICES[task]
    rng = random.Random(task)

    def text(tokens: int) -> str:
        return "".join(rng.choices(words, k=max(1, round(tokens * rng.uniform(0.5, 1.5)))))

    items = []
    for _ in range(count):
        before = text(context)
        if length < 0:
            after = text(-length)
            pairs = [(before + text(2), after) for _ in range(choices)]
        elif length == 1:
            pairs = [(before, " " + letter) for letter in "ABCDE"[:choices]]
        else:
            pairs = [(before, text(length)) for _ in range(choices)]
        items.append([Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)])
    return items


def prompt_items(task: str, count: int, words: list[str], new_tokens: int) -> Items:
    """Makes random prompts of a generation task; no stop string ends an answer early."""
    rng = random.Random(task)
    settings = {"until": ["[never]"], "max_gen_toks": new_tokens, "do_sample": False}
    lengths = [max(1, round(PROMPTS[task] * rng.uniform(0.8, 1.2))) for _ in range(count)]
    return [[Instance("generate_until", {}, ("".join(rng.choices(words, k=n)), settings), 0)] for n in lengths]


def answers(lm: Any, items: Items) -> tuple[list[Any], float]:
    """Returns for each item the model's answers (log-probabilities or a text), and the seconds that all items took."""
    requests = [request for item in items for request in item]
    kind = requests[0].request_type
    _wait()
    began = time.perf_counter()
    replies = iter(getattr(lm, kind)(requests, disable_tqdm=True))
    _wait()
    seconds = time.perf_counter() - began
    return [[next(replies) for _ in item] for item in items], seconds


def flips(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[int, float]:
    """Number of items that are answered differently, and the largest difference of a log-probability in nats."""
    count, largest = 0, 0.0
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine[0], str):
            count += mine != other
        else:
            first, second = [[logprob for logprob, _ in item] for item in (mine, other)]
            largest = max(largest, *(abs(a - b) for a, b in zip(first, second, strict=True)))
            count += first.index(max(first)) != second.index(max(second))
    return count, largest


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lm_eval_model(model: PreTrainedModel, tokenizer: Any, batch_size: int) -> Any:
    hflm: Any = HFLM
    return hflm(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)


def measure(model: PreTrainedModel, tokenizer: Any, tasks: dict[str, Items], share: float) -> list[Speed]:
    """Measures all tasks: first a share of the items in fp32, then all items in bf16."""
    rows = [Speed(task, len(items)) for task, items in tasks.items()]
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)  # type: ignore[arg-type]
        ours = HFAdapter(model, tokenizer)
        hflm, smaller = (lm_eval_model(model, tokenizer, size) for size in (HFLM_BATCH, HFLM_BATCH // 4))
        for row, items in zip(rows, tasks.values(), strict=True):
            part = items[: max(2, round(share * len(items)))]
            for lm in (ours, hflm):
                answers(lm, part[:HFLM_BATCH])  # this warm-up chooses kernels and allocates memory
            chosen = part if dtype == torch.float32 else items
            mine, my_seconds = answers(ours, chosen)
            other, other_seconds = answers(hflm, chosen)
            different, distance = flips(mine, other)
            if dtype == torch.float32:
                row.fp32_items, row.fp32_flips, row.fp32_difference = len(part), different, distance
                continue
            row.ours, row.hflm = len(items) / my_seconds, len(items) / other_seconds
            row.ratio, row.bf16_flips, row.bf16_difference = other_seconds / my_seconds, different, distance
            row.hflm_flips = flips(answers(smaller, part)[0], other[: len(part)])[0]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a directory with any fast tokenizer")
    parser.add_argument("--arch", choices=SHAPES, default="llama")
    parser.add_argument("--layers", type=int, help="fewer layers, for a trial")
    parser.add_argument("--items", type=int, default=2000, help="per multiple-choice task")
    parser.add_argument("--prompts", type=int, default=128, help="per generation task")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.1, help="of the items that are compared in fp32")
    parser.add_argument("--out", type=out_file)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    words = words_of(tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = build(options.arch, len(tokenizer), options.layers)
    tasks = {task: choice_items(task, options.items, words) for task in CHOICES}
    tasks |= {task: prompt_items(task, options.prompts, words, options.new_tokens) for task in PROMPTS}
    rows = measure(model, tokenizer, tasks, options.share)

    parameters = sum(parameter.numel() for parameter in model.parameters())
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    facts = {"device": name, "torch": torch.__version__, "arch": options.arch, "parameters": parameters}
    facts |= {"hflm_batch_size": HFLM_BATCH, "new_tokens": options.new_tokens}
    for kind, names in (("multiple_choice", CHOICES), ("generation", PROMPTS)):
        own = [row for row in rows if row.task in names]
        facts[f"{kind}_ratio"] = sum(r.items / r.hflm for r in own) / sum(r.items / r.ours for r in own)
        facts[f"{kind}_median_ratio"] = statistics.median(row.ratio for row in own)
    if options.out:
        options.out.write_text(json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1))
    print(f"\n{name}, torch {torch.__version__}, {options.arch} of {parameters / 1e9:.2f} B parameters, items a second")
    print("task    items    HFLM    ours ratio | fp32 flips  nats    | bf16 flips  nats | HFLM's own")
    for row in rows:
        print(
            f"{row.task:6s} {row.items:6d} {row.hflm:7.1f} {row.ours:7.1f} {row.ratio:5.2f} | "
            f"{row.fp32_flips:4d}/{row.fp32_items:<4d} {row.fp32_difference:8.1e} | "
            f"{row.bf16_flips:5d} {row.bf16_difference:8.1e} | {row.hflm_flips:4d}/{row.fp32_items}"
        )
    print(f"multiple choice {facts['multiple_choice_ratio']:.2f}x, generation {facts['generation_ratio']:.2f}x")


if __name__ == "__main__":
    main()
