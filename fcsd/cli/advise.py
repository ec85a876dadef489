"""The command `fcsd advise`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, Concurrency, Gpus, Model, PromptTokens, require_models
from fcsd.errors import ConfigError
from fcsd.extras import require_extra


def _factor(text: str) -> float:
    """``1.15`` or ``1.15x`` as a number."""
    try:
        factor = float(text.removesuffix("x"))
    except ValueError:
        factor = 0.0
    if not 1 <= factor < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a number of at least 1, such as 1.15 or 1.15x")
    return factor


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
        float | None,
        typer.Option(metavar="X", parser=_factor, help="Ask for the simplest way to be X times as fast: 1.15x."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time all-reduces and servers here first, for some minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say how to serve MODEL on these GPUs: as it is, with better sums, or converted. Reads config.json alone."""
    from fcsd.advise.host import host_of

    require_models(model, weights=False)
    if measure and (gpu is not None or machine is not None):
        raise ConfigError("--measure times this machine, and --gpu and --machine name another one")
    if measure:
        require_extra("vllm", "fcsd advise --measure")
        require_extra("train", "fcsd advise --measure", "scipy")
    host = host_of(gpus, gpu, machine)

    from fcsd.advise.speed import Load
    from fcsd.advise.verdict import advise as weigh
    from fcsd.advise.verdict import to_json, to_text

    load, times = Load(prompt_tokens, concurrency), {}
    if measure and host.gpus > 1:
        from fcsd.advise.measure import measure as time_servers
        from fcsd.checkpoint import open_checkpoint

        host, times = time_servers(open_checkpoint(model, weights=False).path, host, load)
    found = weigh(model, host, load, price, speed, times)
    emit(json.dumps(to_json(found), indent=2) if as_json else to_text(found))
