"""The command `fcsd serve`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import emit
from fcsd.cli.options import AsJson, Concurrency, Gpus, Model


def serve(
    model: Model,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTION...", help="Options of `vllm serve`, behind `--`."),
    ] = None,
    gpus: Gpus = None,
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
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The ways to sum that `fcsd bench serve --table` has written.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt, for CUDA graphs of steps that read prompts beside answers."),
    ] = None,
    concurrency: Concurrency = 16,
    as_json: AsJson = False,
) -> None:
    """Serve MODEL by vLLM, converted or as it is. Prints the URL when the server answers."""
    from fcsd.serve.server import serve as run_server

    def ready(url: str) -> None:
        emit(json.dumps({"url": url}) if as_json else url)

    graphs = None if prompt_tokens is None else (prompt_tokens, concurrency)
    run_server(
        model,
        gpus=gpus,
        port=port,
        options=options or [],
        all_reduce=all_reduce,
        table=table,
        graphs=graphs,
        ready=ready,
    )
