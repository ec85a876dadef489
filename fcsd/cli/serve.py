"""The command `fcsd serve`."""

import json
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, Model


def serve(
    model: Model,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTION...", help="Options of `vllm serve`, behind `--`."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="The number of GPUs: the tensor-parallel degree.")] = 1,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port at which the server listens.")] = 8000,
    as_json: AsJson = False,
) -> None:
    """Serve MODEL by vLLM, with its reductions in flight. Prints the URL when the server answers."""
    from fcsd.serve.server import serve as run_server

    def ready(url: str) -> None:
        emit(json.dumps({"url": url}) if as_json else url)

    run_server(model, gpus=gpus, port=port, options=options or [], ready=ready)
