"""Options and arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A directory, or a hub id: org/name[@revision].")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write; it must be empty or not exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything, say what would be done, stop.")]
UnsafeExec = Annotated[
    bool, typer.Option("--accept-unsafe-exec", help="Run generated programs even without a sandbox.")
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT if it is not empty.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Accept a MODEL with code of its own; it is not run.")]
Sets = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a value; repeatable.")]
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
    Path | None, typer.Option(metavar="FILE", help="Measure the loss on this text, too: .jsonl, .jsonl.gz or .parquet.")
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Use only the first N documents of every task and text.")
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
    int | None, typer.Option(min=1, help="The number of processes on this machine, one per GPU; the default is 1.")
]
Reduce = Annotated[
    str,
    typer.Option(metavar="KIND", help="How the ranks of fcsd's engine sum partial results; see docs/engine.md."),
]
Device = Annotated[str | None, typer.Option(metavar="cuda|cpu", help="The default is cuda if there is a GPU.")]
RecipeName = Annotated[str, typer.Argument(metavar="NAME", help="See `fcsd recipes list`.")]
