"""Measures what each format of quantised communication costs a model: ``python -m studies.formats MODEL``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fcsd.cli.command import command, emit
from fcsd.cli.options import AsJson, DataMirror, Device, Dtype, Limit, Model
from fcsd.disk import write_text
from fcsd.extras import require_extra

app = typer.Typer(rich_markup_mode=None)


@command(app, "wires")
def wires(
    model: Model,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The held-out text: .jsonl, .jsonl.gz or .parquet.")],
    out: Annotated[
        Path, typer.Option(help="Directory for wires.json, tables.md and pareto.png; a killed study resumes from it.")
    ],
    every: Annotated[int, typer.Option(min=1, metavar="N", help="Read every N-th document of the text.")] = 1,
    max_length: Annotated[int, typer.Option(min=1, help="The length of the windows of text, in tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in one forward pass.")] = 4,
    tp_degree: Annotated[int, typer.Option(min=2, help="The tensor-parallel degree of the all-reduce.")] = 4,
    tasks: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="The tasks of table 7; none for an empty name.")
    ] = None,
    limit: Limit = None,
    data_mirror: DataMirror = None,
    device: Device = None,
    dtype: Dtype = None,
    processes: Annotated[
        int, typer.Option(min=1, help="How many formats are measured at a time, each by a process of its own.")
    ] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure what each format of the wire costs MODEL, by direction. FlashCommunication V2's tables of quality."""
    require_extra("eval", "studies.formats")
    import torch
    from studies.formats import study, tables
    from studies.formats.plan import TASKS

    from fcsd.models.load_options import check_device, check_dtype, default_dtype

    check_dtype(dtype)
    check_device(device)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = study.Study(
        model,
        text,
        every=every,
        max_length=max_length,
        batch_size=batch_size,
        tp_degree=tp_degree,
        tasks=TASKS if tasks is None else tuple(filter(None, tasks.replace(" ", "").split(","))),
        limit=limit,
        data_mirror=data_mirror,
        device=device,
        dtype=dtype or default_dtype(device == "cpu"),
        processes=processes,
    )
    found = study.run(settings, out)
    report = tables.to_text(found)
    write_text(out / "tables.md", report + "\n")
    tables.draw(found, out / "pareto.png")
    emit(json.dumps(found, indent=2) if as_json else report)


if __name__ == "__main__":
    app()
