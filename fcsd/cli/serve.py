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
    all_reduce: Annotated[
        str | None,
        typer.Option(
            "--all-reduce",
            metavar="host|host:FORMAT",
            help="Sum through memory of the host where that is faster than vLLM's own way, as it is between GPUs "
            "without peer access; with a FORMAT such as int8 in fewer bits, which changes answers a little.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve MODEL by vLLM, converted or as it is. Prints the URL when the server answers."""
    from fcsd.serve.server import serve as run_server

    def ready(url: str) -> None:
        emit(json.dumps({"url": url}) if as_json else url)

    run_server(model, gpus=gpus, port=port, options=options or [], all_reduce=all_reduce, ready=ready)
