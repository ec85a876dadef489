"""The command `fcsd advise`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, Concurrency, Gpus, Model, PromptTokens, require_models


def advise(
    model: Model,
    gpus: Gpus = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="Another machine's GPU: 'RTX 4090', L40S, 'A100 PCIe', ...")
    ] = None,
    machine: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Another machine, as fcsd bench links measured it.")
    ] = None,
    prompt_tokens: PromptTokens = 2048,
    concurrency: Concurrency = 16,
    price: Annotated[float | None, typer.Option(min=0, help="The price of an hour of one GPU that heals.")] = None,
    speed: Annotated[
        float | None, typer.Option(metavar="X", min=1, help="Ask for the simplest way to be X times as fast as stock.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how to serve MODEL on these GPUs: as it is, with better sums, or converted. Reads config.json alone."""
    from fcsd.advise.host import host_of

    require_models(model, weights=False)
    host = host_of(gpus, gpu, machine)

    from fcsd.advise.speed import Load
    from fcsd.advise.verdict import advise as weigh
    from fcsd.advise.verdict import to_json, to_text

    found = weigh(model, host, Load(prompt_tokens, concurrency), price, speed)
    emit(json.dumps(to_json(found), indent=2) if as_json else to_text(found))
