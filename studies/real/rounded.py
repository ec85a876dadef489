"""What models lose when their weights are rounded to INT4 after training: divergences and answers to benchmarks.

    python -m studies.real rounded TEACHER OUT NAME=DIR NAME+int4:g64=DIR ... --text NAME=DIR ... --mirror DIR
        [--tasks NAMES] [--limit N] [--held-out FILE]

A form is a model as it is, or one whose name ends with `+int4:gN`. In the latter the weights of all linear layers in
decoder layers are rounded to nearest, in groups of N neighbouring inputs. Embeddings and head are not. Every form is
asked the benchmarks, and `OUT/NAME.json` receives each answer as soon as it is known; paired differences follow from
these files. Then `OUT/kl.jsonl` receives a line for each with its divergences from TEACHER on held-out text. Several
such programs may write to one OUT at the same time.
"""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.programs import TEXTS, named
from studies.real.heal import TASKS, tasks_of
from studies.real.runner import divergences, loaded, store

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.models.build import decoder_layers

if TYPE_CHECKING:
    from fcsd.eval.harness import Loaded

ROUNDED = "+int4:g"
LEAST = 1e-30  # a step, also of zeros


ARGUMENTS = {
    "teacher": Path,
    "out": Path,
    "forms": dict(nargs="+", type=named, metavar="NAME[+int4:gN]=DIR"),
    "--text": TEXTS,
    "--mirror": dict(type=Path, required=True),
    "--tasks": TASKS,
    "--limit": 1000,
    "--held-out": Path,
}


def main(given: argparse.Namespace) -> None:
    """Ask every form, then measure every form."""
    from fcsd.eval.harness import evaluate_models  # the package's own name for it demands evalplus

    given.out.mkdir(parents=True, exist_ok=True)
    forms = [load(*form) for form in given.forms]
    how: dict[str, Any] = {"data_mirror": given.mirror, "held_out": given.held_out, "limit": given.limit}
    evaluate_models(forms, tasks=tasks_of(given.mirror, given.tasks).split(","), out=given.out, **how)
    teacher = loaded(given.teacher)
    for form in forms:
        began = time.time()
        kl = divergences(form.model, teacher, dict(given.text))
        store(given.out / "kl.jsonl", {"name": form.name, "kl": kl, "seconds": time.time() - began})


def load(name: str, folder: Path) -> "Loaded":
    """A form in memory, with its weights rounded if its name says so."""
    from fcsd.eval.harness import Loaded

    model, (_, _, group) = loaded(folder), name.partition(ROUNDED)
    if group:
        round_linears(model, int(group))
    return Loaded(name, model, load_tokenizer(folder))


def round_linears(model: Any, group: int) -> None:
    """Round the weights of all linear layers in a model's decoder layers, in place.

    Raises:
        ValueError: groups of this size do not divide the inputs of a layer.
    """
    linears = {name: layer for name, layer in decoder_layers(model).named_modules() if type(layer) is torch.nn.Linear}
    for name, layer in linears.items():
        if layer.in_features % group:
            raise ValueError(f"groups of {group} do not divide the {layer.in_features} inputs of {name}")
    for layer in linears.values():
        layer.weight.data = to_int4(layer.weight.data, group)


def to_int4(weight: torch.Tensor, group: int) -> torch.Tensor:
    """A weight ``[out, in]`` rounded to -8 to 7 steps, by a step for each ``group`` of inputs; of the same dtype.

    The largest value of a group is 7.5 steps, as in compressed-tensors' symmetric formats, and a step has the weight's
    dtype.
    """
    groups = weight.float().unflatten(-1, (-1, group))
    step = (groups.abs().amax(-1, keepdim=True) / 7.5).clamp(min=LEAST).to(weight.dtype).float()
    return ((groups / step).round().clamp(-8, 7) * step).flatten(-2).to(weight.dtype)
