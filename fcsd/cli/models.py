"""The commands `fcsd inspect`, `convert`, `export` and `push`, which take a model directory."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, CreatePr, DryRun, Force, Model, Out, Private, Revision, Trust, Wiring
from fcsd.disk import write_json
from fcsd.errors import ConfigError
from fcsd.extras import require_extra


def inspect(
    model: Model,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Describe MODEL: layers, experts, size, possible wirings, missing tensors. Only headers are read."""
    from fcsd.checkpoint import inspect_checkpoint

    found = inspect_checkpoint(model, trust_remote_code=trust_remote_code)
    emit(found.to_json() if as_json else found.to_text())


def convert(
    model: Model,
    out: Out,
    wiring: Wiring = "farskip",
    layers: Annotated[
        str,
        typer.Option(
            help="all, auto, auto:26, last:24, first:8, 50%, 12-27 or 0,2,5-7. auto measures every layer alone "
            "and converts the half that costs least; auto:26 the 26 that do."
        ),
    ] = "all",
    variant: Annotated[str, typer.Option(help="full, attn-only or mlp-only.")] = "full",
    border: Annotated[
        str | None,
        typer.Option(
            help="full or partial: the stream that a converted layer reads after a layer that is not converted. "
            "The default is full for farskip and partial for ladder."
        ),
    ] = None,
    distance: Annotated[int, typer.Option(min=1, help="Sub-blocks whose outputs may be in flight.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="For desync: the GPUs over which OUT will be divided.")] = 1,
    reduce: Annotated[
        str | None,
        typer.Option(
            help="Reductions that desync keeps: 2x, 4x, another Nx, last, or a pattern by layer such as '-,m'."
        ),
    ] = None,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Do not compare OUT, with its wiring off, with the original.")
    ] = False,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text for --layers auto, in place of the model's own.")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --layers auto: a new file for what each layer alone costs."),
    ] = None,
    dry_run: DryRun = False,
    force: Force = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write a rewired copy of MODEL to OUT. Weights are linked, and parity with MODEL is proven."""
    from fcsd.convert import ConvertReport, convert_checkpoint
    from fcsd.models.selection import is_auto, layers_text

    if calibration is not None:
        require_extra("train", "convert --calibration", "pyarrow")
        if not is_auto(layers):
            raise ConfigError("--calibration is the text for --layers auto, which is not given")
    if costs is not None:
        if not is_auto(layers):
            raise ConfigError("--costs are measured by --layers auto, which is not given")
        if costs.exists() or not costs.parent.is_dir():
            why = "exists" if costs.exists() else "has no directory"
            raise ConfigError(f"--costs {costs} {why}", "Choose a new file; nothing was overwritten.")
    how: dict[str, Any] = {
        "variant": variant,
        "border": border,
        "distance": distance,
        "tp_degree": gpus,
        "reduce": reduce,
    }
    trust: dict[str, Any] = {"trust_remote_code": trust_remote_code}

    def run(layers: str, dry_run: bool) -> ConvertReport:
        options: dict[str, Any] = {"check": not no_check, "dry_run": dry_run, "force": force, **trust}
        return convert_checkpoint(model, out, wiring=wiring, layers=layers, **how, **options)

    found = None
    if is_auto(layers):
        if dry_run:
            raise ConfigError("--layers auto reads the weights", "Leave out --dry-run, or choose the layers.")
        run("all", dry_run=True)  # whatever can be refused is refused before minutes of measuring
        from fcsd.distill.layer_costs import choose_by_cost

        found = choose_by_cost(model, wiring, layers, calibration, **trust, **how)
        layers = layers_text(found.wiring.layers)
    done = run(layers, dry_run)
    if costs is not None and found is not None:  # last: after an interruption the same command would refuse the file
        write_json(costs, found.to_json())
    emit(done.to_json() if as_json else done.to_text())


def export(
    run: Annotated[str, typer.Argument(metavar="RUN|MODEL", help="A run directory or a converted model.")],
    out: Out,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The checkpoint of a run: latest, best or step-N. The default is best where scores or held-out "
            "losses were measured, and latest otherwise.",
        ),
    ] = None,
    force: Force = False,
    push: Annotated[str | None, typer.Option(metavar="ORG/NAME", help="Then push to the hub.")] = None,
    private: Private = False,
    create_pr: CreatePr = False,
    revision: Revision = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="Round the weights by llm-compressor: W4A16 (GPTQ with a text), AWQ, W8A8, FP8_DYNAMIC, FP8_BLOCK "
            "or NVFP4A16.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text for --quantise W4A16, AWQ or W8A8; without it, round to nearest."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the directory to give to others, with a card, and prove that it reloads. Prints OUT."""
    from fcsd.export.final import export_model

    target: dict[str, Any] = {"private": private, "create_pr": create_pr, "revision": revision}
    target |= {"quantise": quantise, "calibration": calibration}
    written = export_model(run, out, checkpoint=checkpoint, force=force, push=push, **target)
    emit(json.dumps({"directory": str(written)}) if as_json else written)


def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory that `fcsd export` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="ORG/NAME", help="The hub repository.")],
    private: Private = False,
    create_pr: CreatePr = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Upload an exported directory to the hub. Prints its address."""
    from fcsd.export.push import push_model

    address = push_model(directory, repo, private=private, create_pr=create_pr, revision=revision)
    emit(json.dumps({"address": address}) if as_json else address)
