"""Makes small real runs: a random teacher, its farskip conversion, a corpus and a recipe."""

import copy
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import texts
import tiny
from ranks import results
from safetensors.torch import load_file
from torch import Tensor

from fcsd.config import ResolvedRecipe, load_recipe
from fcsd.distill.run.report import read_metrics

SECTIONS: dict[str, Any] = {
    "train": {
        "batch_tokens": 256,
        "micro_batch_size": 2,
        "steps": 4,
        "dtype": "fp32",
        "log_every": 1,
        "sample_tokens": 0,
    },
    "optim": {"lr": 1e-3, "warmup_steps": 1},
    "checkpoint": {"every_steps": 2},
}


def write_models(folder: Path, arch: str = "deepseek_v2", **changes: Any) -> tuple[Path, Path]:
    """Write a teacher and its farskip conversion of all layers, both with tokenizers; return their directories.

    ``changes`` are fields of the config.
    """
    from fcsd.models.build import converted_config, model_classes, register
    from fcsd.models.wiring import Wiring

    register()  # so that experts are saved under the architecture's on-disk names
    # The weights are large enough that the wiring changes the outputs.
    teacher = tiny.model(arch, initializer_range=0.1, **changes)
    for name, weight in teacher.named_parameters():
        if any(key in name for key in teacher._keep_in_fp32_modules_strict):
            weight.data = weight.data.bfloat16().float()  # as published; DeepSpeed rounds a student's router to bf16
    wiring = Wiring("farskip", tuple(range(teacher.config.num_hidden_layers)))
    block = wiring.to_block(base_model=str(folder / "teacher"), base_revision=None, base_sha256=None)
    student = model_classes(arch)["AutoModelForCausalLM"](converted_config(teacher.config, block))
    student.load_state_dict(teacher.state_dict())
    for name, model in (("teacher", teacher), ("student", student)):
        model.save_pretrained(folder / name)
        texts.tokenizer().save_pretrained(folder / name)
    return folder / "teacher", folder / "student"


def resolved(folder: Path, **changes: Any) -> ResolvedRecipe:
    """A recipe for ``folder/student`` and a corpus. ``changes`` are values by dotted key, with ``__`` for the dot."""
    corpus, held_out = folder / "corpus.jsonl", folder / "held_out.jsonl"
    if not corpus.exists():
        lines = [f"line {n}: " + "the quick brown fox " * (n % 5) for n in range(60)]
        texts.write_jsonl(corpus, lines)
        texts.write_jsonl(held_out, lines[:10])
    recipe: dict[str, Any] = {
        "name": "test",
        "model": str(folder / "student"),
        "output_dir": str(folder / "run"),
        "data": {"sources": [{"path": str(corpus)}], "seq_len": 32, "held_out": {"path": str(held_out)}},
        "objective": {"kl": 1.0, "sft": 0.5, "chunk_tokens": 16},
        **copy.deepcopy(SECTIONS),
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = recipe
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return load_recipe(folder / "recipe.yaml")


def train(recipe: ResolvedRecipe, size: int = 1, resume: str = "auto") -> None:
    """Train in ``size`` new processes. An error of a process is raised here."""
    results(size, _distill, recipe, resume)


def train_all(recipes: list[ResolvedRecipe], size: int = 1) -> None:
    """Train recipes one after the other in the same ``size`` new processes. An error of a process is raised here."""
    results(size, _distill_all, recipes)


def _distill(recipe: ResolvedRecipe, resume: str) -> None:
    from fcsd.distill import loop

    loop.distill_model(recipe, resume=resume)


def _distill_all(recipes: list[ResolvedRecipe]) -> None:
    for recipe in recipes:
        _distill(recipe, "auto")


def outcome(run: Path) -> tuple[list[tuple[str, ...]], str]:
    """Every loss, learning rate and norm of a run, to the last bit, and the hash of the trained weights."""
    numbers = [
        tuple(float(m[key]).hex() for key in ("loss", "kl", "sft", "lr", "grad_norm")) for m in read_metrics(run)
    ]
    return numbers, hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


def cut_short(run: Path, copy: Path) -> Path:
    """A copy of a finished run of four steps as it was after its second step."""
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / "step-4")
    return copy


def numbers(run: Path) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """The losses and norms of a run by step, and the trained weights."""
    kept = ("loss", "kl", "sft", "hidden", "grad_norm", "held_out_kl", "held_out_sft", "best_step")
    metrics = [{key: line[key] for key in kept if key in line} for line in read_metrics(run)]
    return metrics, load_file(run / "final" / "model.safetensors")
