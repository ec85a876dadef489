"""How models continue the prompts of HumanEval+, which end with a newline, and the same prompts without it.

    python studies/capability/border.py OUT.json --models DIR... --samples FILE...

The tokenizer makes one token of a newline and the spaces after it. A text that is encoded as a whole therefore has no
token of the newline alone before an indented line, and a prompt that ends with a newline does. OUT.json gets, for each
model and both forms of the prompts, how many programs pass the tests of HumanEval+, and how the others begin. FILE is
the humaneval.jsonl of ``fcsd eval --log-samples --suite strict``, whose programs are sorted in the same way.
"""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import fcsd
from fcsd.eval.code.judge import Problem, score
from fcsd.eval.code.problems import load_evalplus

PROBLEMS = Path("assets/mirror/evalplus/HumanEvalPlus.jsonl")
NEW_TOKENS = 64  # the longest right answer has 38
BATCH = 40
STOPS = ("\ndef ", "\nclass ", "\nif ", "\nprint(", "\nassert ", "\nimport ", "\nfrom ")


def kind_of(added: str) -> str:
    """What a model added to a prompt that it did not solve: nothing, the closing quotes once more, or a program."""
    if not added.strip():
        return "nothing"
    return "quotes again" if added.strip().startswith('"""') else "another program"


def sorted_out(problems: list[Problem], programs: list[str], passed: list[bool]) -> dict[str, int]:
    """How many programs pass, and how many of the others are of each kind."""
    added = [program.removeprefix(problem.prefix.strip()) for problem, program in zip(problems, programs, strict=True)]
    return dict(Counter("pass" if right else kind_of(text) for text, right in zip(added, passed, strict=True)))


def programs_of(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """The prompts with what the model adds to each, greedily."""
    programs = []
    for first in range(0, len(prompts), BATCH):
        batch = tokenizer(prompts[first : first + BATCH], return_tensors="pt", padding=True, padding_side="left")
        ids, mask = (batch[name].to(model.device) for name in ("input_ids", "attention_mask"))
        rows = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        for added in tokenizer.batch_decode(rows[:, ids.shape[1] :], skip_special_tokens=True):
            end = min((at for stop in STOPS if (at := added.find(stop)) >= 0), default=len(added))
            programs.append(prompts[len(programs)] + added[:end])
    return programs


def of_model(directory: Path, problems: list[Problem], device: str) -> dict[str, dict[str, int]]:
    """The counts of a model for prompts with the newline, and without it."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model: Any = fcsd.load_model(directory, dtype=torch.float32, device=device).eval()
    found = {}
    for form, end in (("newline", "\n"), ("no newline", "")):
        programs = programs_of(model, tokenizer, [problem.prefix.strip() + end for problem in problems])
        verdicts = score(problems, programs, accept_unsafe_exec=True)
        passed = [verdict.plus is not None and verdict.plus.status == "pass" for verdict in verdicts]
        found[form] = sorted_out(problems, programs, passed)
    return found


def of_samples(file: Path, problems: list[Problem]) -> dict[str, int]:
    """The counts of stored programs."""
    rows = [json.loads(line) for line in file.open()]
    return sorted_out(problems, [row["solution"] for row in rows], [row["plus"] == "pass" for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", type=Path, nargs="*", default=[], help="run DIR/final or any model directory")
    parser.add_argument(
        "--samples", type=Path, nargs="*", default=[], help="EVALUATION/samples/MODEL/strict/humaneval.jsonl"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    args = parser.parse_args()
    problems = load_evalplus(PROBLEMS)
    results: dict[str, Any] = {"models": {}, "samples": {}}
    for model in args.models:
        results["models"][str(model.parent.name)] = of_model(model, problems, args.device)
    for file in args.samples:
        *_, subject, _, run, _, _, _, _ = file.parts
        results["samples"][f"{subject}/{run}"] = of_samples(file, problems)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
