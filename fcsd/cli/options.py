"""Options and arguments that several commands share, one definition for each.

A command takes a whole group of options by a parameter that is one of the dataclasses below; see ``command``.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fcsd.errors import ConfigError
from fcsd.parallel.all_reduce.backends import described

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, or a hub id: org/name[@revision].")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must be empty or not exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would be done, but do nothing.")]
UnsafeExec = Annotated[
    bool, typer.Option("--accept-unsafe-exec", help="Run generated programs even without a sandbox.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is not empty.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Accept a MODEL with code of its own; it is not run.")]
Sets = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a value of the recipe; repeatable.")
]
Private = Annotated[bool, typer.Option("--private", help="Create the hub repository as private.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead of committing.")]
Revision = Annotated[str | None, typer.Option(metavar="BRANCH", help="Branch of the hub repository.")]
Rewiring = Annotated[str, typer.Option(help="The wiring: farskip, ladder or parallel.")]
Variant = Annotated[str, typer.Option(help="Which sub-blocks the wiring is for: full, attn-only or mlp-only.")]
Suite = Annotated[
    str,
    typer.Option(help="The benchmarks: paper, strict, ladder, pretrain-farskip, pretrain-ladder or quickstart."),
]
Tasks = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="Only these tasks: some of the suite, or any others that lm-eval has."),
]
NumFewshot = Annotated[
    int | None, typer.Option(min=0, metavar="N", help="Show N examples in each prompt of the tasks named by --tasks.")
]
ApplyChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--apply-chat-template/--no-apply-chat-template",
        help="Whether to put the prompts of the tasks named by --tasks into the tokenizer's chat template.",
    ),
]
DataMirror = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Read data sets from this directory instead of from the hub.")
]
HeldOut = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE|DIR",
        help="Measure the loss on this text or token ids (column input_ids), too: .jsonl, .jsonl.gz or .parquet files.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Use only N questions of every benchmark, spread evenly over its tasks and over each task; sweep-layers "
        "also N documents of its text.",
    ),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="The most sequences in one forward pass.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="float32|bfloat16|float16",
        help="Data type of the weights; the default is float32 on the CPU, else bfloat16.",
    ),
]
Gpus = Annotated[
    int | None, typer.Option(min=1, help="The number of processes on each machine, one per GPU; the default is 1.")
]
PlannedGpus = Annotated[
    int | None,
    typer.Option("--gpus", min=1, help="GPUs of each machine; the default is what ep_size and tp_size of RECIPE need."),
]
Reduce = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help=f"How the ranks of fcsd's engine sum partial results: {described('engine')}; or, in fcsd chat, "
        "by the table FILE.json that fcsd bench serve has written. See docs/engine.md.",
    ),
]
NoCompile = Annotated[
    bool,
    typer.Option(
        "--no-compile", help="Do not compile the parts of decoding steps in fcsd's engine, as it does on a GPU."
    ),
]
Device = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="The default is cuda if there is a GPU.")]
EvalGpus = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=1,
        help="The number of processes on this machine, one per GPU; under vLLM, the tensor-parallel degree. "
        "The default is 1.",
    ),
]
EvalDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="cuda|cpu|auto", help="auto spreads a model that is too large for one GPU."),
]
RecipeName = Annotated[str, typer.Argument(metavar="NAME", help="See `fcsd recipes list`.")]
Recipe = Annotated[str | None, typer.Argument(metavar="RECIPE", help="A YAML file, or a packaged name.")]
RecipeOption = Annotated[
    str | None, typer.Option("--recipe", metavar="NAME|FILE", help="The recipe, if it is not given as RECIPE.")
]


@dataclass(frozen=True)
class Questions:
    """The options that say what models are asked."""

    suite: Suite = "paper"
    tasks: Tasks = None
    num_fewshot: NumFewshot = None
    apply_chat_template: ApplyChatTemplate = None
    data_mirror: DataMirror = None
    held_out: HeldOut = None
    limit: Limit = None

    def arguments(self) -> dict[str, Any]:
        """The options as keyword arguments of the library functions."""
        names = [name.strip() for name in self.tasks.split(",") if name.strip()] if self.tasks is not None else None
        return {**asdict(self), "tasks": names}


@dataclass(frozen=True)
class Rewired:
    """The options that say how one model is rewired and computed while layers are tried."""

    wiring: Rewiring = "farskip"
    variant: Variant = "full"
    batch_size: BatchSize = None
    device: Device = None
    dtype: Dtype = None


def one_recipe(*given: str | None) -> str:
    """The only recipe that was given.

    Raises:
        ConfigError: there is none, or there are several.
    """
    names = [name for name in given if name is not None]
    if len(names) != 1:
        raise ConfigError(
            "Give one recipe: as RECIPE, by --recipe, or a sweep by --sweep of `fcsd distill`.",
            "`fcsd recipes list` shows the names.",
        )
    return names[0]


def gpu_memory(text: str) -> float:
    """The memory of a GPU in GiB. What is sold as 80 GB has 80 GiB, so that ``80``, ``80GB``, ``80GiB`` and ``80G`` are
    the same.

    Raises:
        ConfigError: the text has another form, or is less than 1.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?(?:Gi?B?)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) < 1:
        raise ConfigError(f"--gpu-mem {text}: expected a number of GiB, at least 1: 80, 80GB, 80GiB or 80G")
    return float(match[1])


def numbers(text: str) -> list[int]:
    """The numbers in a list such as ``2,5,8``.

    Raises:
        ConfigError: the text is not such a list.
    """
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):
        raise ConfigError(f"{text!r} is not a list of numbers.", "Separate the numbers by commas: 2,5,8")
    return [int(number) for number in text.split(",")]


def shares(text: str) -> tuple[float, ...]:
    """The numbers in a list such as ``0.3,0.6``.

    Raises:
        ConfigError: the text is not such a list.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of numbers.", "Separate the numbers by commas: 0.3,0.6") from None
