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
Rewiring = Annotated[str, typer.Option(help="farskip, ladder or parallel.")]
Variant = Annotated[str, typer.Option(help="full, attn-only or mlp-only.")]
Suite = Annotated[str, typer.Option(help="Which settings of the benchmarks.")]
Tasks = Annotated[str | None, typer.Option(help="Some of the suite, separated by commas.")]
DataMirror = Annotated[Path | None, typer.Option(help="Data sets on disk, instead of the hub.")]
HeldOut = Annotated[Path | None, typer.Option(help="Text file for the held-out loss.")]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Most sequences in one forward.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Processes on this machine, one per GPU.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda if there is one.")]
RecipeName = Annotated[str, typer.Argument(metavar="NAME", help="See `fcsd recipes list`.")]
