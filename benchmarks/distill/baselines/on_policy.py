"""On-policy distillation, text and training together: the commands of fcsd beside TRL's ``DistillationTrainer``.

    python -m benchmarks.distill.baselines.on_policy STUDENT TEACHER --out DIR [--sides fcsd,1024,1024:liger]

STUDENT is the directory of a converted model, and TEACHER that of its original, with a chat template or without. The
side of fcsd is one round: what ``fcsd write`` does, by the student, and ``fcsd distill`` on this text. Its rates are
that of the second of two files of text, and the median of the logged steps; ``wall_seconds`` have the starts of both
processes, too. The side of TRL generates with transformers, as it does without vLLM, in bf16 with fp32 master weights.
``--sides`` names ``fcsd`` and tries of TRL: the completions that are generated at a time, and after colons ``static``
for a cache of fixed size and ``liger`` for Liger's kernels in both models. The prompts of TRL are given, and count as
its tokens; fcsd's student writes the users' turns itself. Each side is a process of its own, and
``DIR/on_policy.json`` is written after each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from fcsd.launch.environment import snapshot

BETAS = {"kl": 0.0, "jsd": 0.5, "reverse_kl": 1.0}  # TRL's name of a divergence
ASKED = ("Explain", "Write a short story about", "Give three facts about", "Compare two opinions on", "Teach a child")
ABOUT = ("the sea", "a lost key", "bread", "the moon", "old maps", "winter", "bicycles", "a choir", "glass", "rivers")


def main() -> None:
    """Runs every side; or one, which prints its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("student", type=Path)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=float, default=4e6, help="of fcsd's round")
    parser.add_argument("--divergence", choices=BETAS, default="reverse_kl")
    parser.add_argument("--max-tokens", type=int, default=512, help="of an answer")
    parser.add_argument("--micro-batch", type=int, default=32, help="rows of fcsd")
    parser.add_argument("--trl-micro-batch", type=int, default=64, help="completions of TRL")
    parser.add_argument("--write-batch", type=int, default=1024, help="documents that fcsd writes at a time")
    parser.add_argument("--seq", type=int, default=1024, help="tokens of a row of fcsd")
    parser.add_argument("--steps", type=int, default=2, help="of TRL that are timed, after one that is not")
    parser.add_argument("--sides", default="fcsd,1024", metavar="SIDE[,SIDE...]")
    parser.add_argument("--timeout", type=float, default=150, help="seconds of one side")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        name, *how = given.side.split(":")
        print(json.dumps(fcsd(given) if name == "fcsd" else trl(given, int(name), how)))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(given).items()}
    result: dict[str, Any] = {"settings": settings, "environment": snapshot(), "sides": {}}
    for side in given.sides.split(","):
        command = [sys.executable, "-m", "benchmarks.distill.baselines.on_policy", *sys.argv[1:], "--side", side]
        with (given.out / f"{side.replace(':', '-')}.log").open("w") as log:
            try:
                done = subprocess.run(command, stdout=-1, stderr=log, timeout=given.timeout, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
            except (subprocess.SubprocessError, ValueError) as error:
                found = {"failed": str(error)[-300:]}
        result["sides"][side if side == "fcsd" else f"trl:{side}"] = found
        print(side, json.dumps(found), file=sys.stderr, flush=True)
        (given.out / "on_policy.json").write_text(json.dumps(result, indent=1) + "\n")


def fcsd(given: argparse.Namespace) -> dict[str, Any]:
    """One round. ``tokens_per_second`` is the harmonic sum of the rates of writing and training."""
    on_gpu = torch.cuda.is_available()
    text, run = given.out / "text", given.out / "run"
    batch = given.micro_batch * given.seq * (4 if on_gpu else 1)
    recipe = {
        "name": "on-policy",
        "model": str(given.student),
        "teacher": str(given.teacher),
        "output_dir": str(run),
        "data": {"seq_len": given.seq, "sources": [{"path": f"{text}/train/*.parquet", "token_ids": "input_ids"}]},
        "objective": {"divergence": given.divergence},
        "train": {"tokens": given.tokens, "batch_tokens": batch, "micro_batch_size": given.micro_batch, "log_every": 1,
                  "dtype": "bf16" if on_gpu else "fp32", "compile": on_gpu, "sample_tokens": 0},
        "optim": {"lr": 1e-4, "warmup_steps": 1},
        "checkpoint": {"every_steps": 0, "keep": 1},
    }  # fmt: skip
    (given.out / "recipe.yaml").write_text(json.dumps(recipe))
    how = {"tokens": int(given.tokens), "shard_tokens": int(given.tokens / 2), "max_tokens": given.max_tokens}
    write = "from pathlib import Path; from fcsd.distill.own_text import write_own_text as write; "
    write += f"write({str(given.student)!r}, Path({str(text)!r}), batch_size={given.write_batch}, **{how})"
    times = [time.time()]
    for words in (["-c", write], ["-m", "fcsd", "distill", str(given.out / "recipe.yaml")]):
        subprocess.run([sys.executable, *words], check=True, stdout=sys.stderr)
        times.append(time.time())
    files = sorted((text / "train").glob("*.parquet"))
    counts = [tokens_of(file) + tokens_of(text / "held_out" / file.name) for file in files]
    writing = sum(counts[1:]) / (files[-1].stat().st_mtime - files[0].stat().st_mtime)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = statistics.median([line["tokens_per_second"] for line in lines if "tokens_per_second" in line][1:])
    return {
        "written": sum(counts),
        "writing": writing,
        "training": training,
        "tokens_per_second": 1 / (1 / writing + 1 / training),
        "command_seconds": [after - before for before, after in pairwise(times)],
        "wall_seconds": times[-1] - times[0],
    }


def tokens_of(file: Path) -> int:
    """The token ids in a file of ``fcsd write``."""
    import pyarrow.parquet as pq

    return sum(len(chunk.flatten()) for chunk in pq.read_table(file)["input_ids"].chunks)


def trl(given: argparse.Namespace, batch: int, how: list[str]) -> dict[str, Any]:
    """Steps of one generation each. ``tokens`` are those of prompts and completions, without padding."""
    from benchmarks.distill.baselines.loop import liger_kernels
    from benchmarks.distill.baselines.master_weights import MasterWeightsAdamW
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import DistillationConfig, DistillationTrainer  # pyright: ignore[reportMissingImports]

    from fcsd.checkpoint.tokenizer import load_tokenizer
    from fcsd.models.build import load_model

    on_gpu = torch.cuda.is_available()
    began = time.perf_counter()
    tokenizer = load_tokenizer(given.teacher)
    tokenizer.padding_side = "left"
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    student, teacher = (load_model(path, dtype=dtype).to(device) for path in (given.student, given.teacher))
    with liger_kernels(student, teacher) if "liger" in how else nullcontext(teacher) as teacher:
        settings = DistillationConfig(
            output_dir=str(given.out / "trl"),
            beta=BETAS[given.divergence],
            max_steps=1 + given.steps,
            per_device_train_batch_size=given.trl_micro_batch,
            gradient_accumulation_steps=batch // given.trl_micro_batch,  # their completions are generated together
            gradient_checkpointing=False,
            max_completion_length=given.max_tokens,
            cache_implementation="static" if "static" in how else None,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            bf16=False,  # the weights are bf16 already, and autocast would only slow the generation
            use_cpu=not on_gpu,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = DistillationTrainer(
            model=student,
            teacher_model=teacher,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": prompts(tokenizer, batch * (1 + given.steps))}),
            processing_class=tokenizer,
            optimizers=(MasterWeightsAdamW(list(student.parameters()), lr=1e-4), None),  # pyright: ignore
        )
        trainer.remove_callback(PrinterCallback)  # it prints to stdout, which has the figures
        with timed(trainer) as steps:
            trainer.train()
    (_, first, _), *rest = steps
    last = steps[-1]
    tokens, seconds = last[1] - first, last[0] - steps[0][0]
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "generating_share": (last[2] - steps[0][2]) / seconds,
        "completions": batch,
        "losses": losses,
        "wall_seconds": time.perf_counter() - began,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "timed_steps": len(rest),
    }


def prompts(tokenizer: Any, count: int) -> list[str]:
    """Texts up to where an answer begins."""
    turns = [f"{asked} {about}." for asked, about in product(ASKED, ABOUT)]
    if tokenizer.chat_template:
        chats = [[{"role": "user", "content": turn}] for turn in turns]
        turns = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    return [turns[i % len(turns)] for i in range(count)]


@contextmanager
def timed(trainer: Any) -> Iterator[list[tuple[float, int, float]]]:
    """Collects after each step the time, the tokens so far, and the seconds so far that were spent generating."""
    from transformers import TrainerCallback

    steps: list[tuple[float, int, float]] = []
    generating, generate = 0.0, trainer._generate_single_turn

    def generate_timed(*arguments: Any, **options: Any) -> Any:
        nonlocal generating
        began = time.perf_counter()
        found = generate(*arguments, **options)  # lists, so the device has ended
        generating += time.perf_counter() - began
        return found

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            steps.append((time.perf_counter(), state.num_input_tokens_seen, generating))

    trainer._generate_single_turn = generate_timed
    trainer.add_callback(Steps())
    yield steps


if __name__ == "__main__":
    main()
