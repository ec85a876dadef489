"""What models lose when their weights are rounded to INT4 after training: divergences and answers to benchmarks.

    python -m studies.real.rounded TEACHER OUT NAME=DIR NAME+int4:g64=DIR ... --text NAME=DIR ... --mirror DIR
        [--tasks NAMES] [--limit N] [--held-out FILE]

A form is a model as it is, or one whose name ends with `+int4:gN`. In the latter the weights of all linear layers in
decoder layers are rounded to nearest, in groups of N neighbouring inputs. Embeddings and head are not. Every form is
asked the benchmarks, and `OUT/NAME.json` receives each answer as soon as it is known; paired differences follow from
these files. Then `OUT/kl.jsonl` receives a line for each with its divergences from TEACHER on held-out text. Several
such programs may write to one OUT at the same time.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from studies.real.heal import TASKS, divergences, tasks_of

from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.eval.harness import Loaded, evaluate_models  # the package's own name for it demands evalplus
from fcsd.models.build import load_model
from fcsd.models.rounded import round_weights

ROUNDED = "+int4:g"


def main() -> None:
    """Ask every form, then measure every form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("forms", nargs="+", metavar="NAME[+int4:gN]=DIR")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--mirror", type=Path, required=True)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--held-out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    forms = [load(*form.split("=", 1)) for form in given.forms]
    how: dict[str, Any] = {"data_mirror": given.mirror, "held_out": given.held_out, "limit": given.limit}
    evaluate_models(forms, tasks=tasks_of(given.mirror, given.tasks).split(","), out=given.out, **how)
    texts = {name: Path(folder) for name, folder in (text.split("=", 1) for text in given.text)}
    teacher = load("teacher", given.teacher).model
    for form in forms:
        began = time.time()
        line = {"name": form.name, "kl": divergences(form.model, teacher, texts), "seconds": time.time() - began}
        with (given.out / "kl.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def load(name: str, folder: str | Path) -> Loaded:
    """A form in memory, with its weights rounded if its name says so."""
    cuda = torch.cuda.is_available()
    model = load_model(folder, dtype=torch.bfloat16 if cuda else torch.float32, device="cuda" if cuda else "cpu").eval()
    _, _, group = name.partition(ROUNDED)
    if group:
        round_weights(model, f"int4:g{group}")
    return Loaded(name, model, load_tokenizer(Path(folder)))


if __name__ == "__main__":
    main()
