"""Scores a model as if its communication were quantised, beside the same model without that: what each format costs.

    python -m studies.formats.scores MODEL OUT.json --quantised dispatch=int5,combine=int8 --tasks piqa --held-out FILE
    python -m studies.formats.scores MODEL OUT.json --quantised all-reduce=int5 --tp-degree 4 --tasks piqa

One process computes everything, on one device. The tables go to standard output, the results to OUT.json.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from studies.formats.communication import QuantisedCommunication, over

from fcsd import markdown
from fcsd.checkpoint import open_checkpoint
from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.engine.generate import BATCHES
from fcsd.eval import tables
from fcsd.eval.compare import compare_models
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.load_options import default_dtype
from fcsd.models.build import load_model


def scores(model: Loaded, formats: Sequence[QuantisedCommunication], **options: Any) -> list[dict[str, Any]]:
    """The results of a model without formats, which are the baseline, and then under each of the formats.

    The name of a model under formats ends with them. Its results hold them as ``wire``, with the bits per value as it
    is sent; by this key the card that ``fcsd export`` writes leaves such scores out.

    Args:
        options: passed to ``evaluate_models``.

    Raises:
        ConfigError: formats cannot be simulated for this model, or their groups do not divide its rows.
    """
    for quantised in formats:  # refused before hours of work
        with over(model.model, quantised):
            pass
    engine = Engine(generation=BATCHES)
    found = [row | {"baseline": True} for row in evaluate_models([model], engine=engine, **options)]
    for quantised in formats:
        named = model._replace(name=f"{model.name}+{quantised}")
        with over(model.model, quantised):
            rows = evaluate_models([named], engine=engine, **options)
        found += [row | {"wire": quantised.to_json()} for row in rows]
    return found


def bits_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown with a row for each model under formats: the bits per value as it is sent, by direction."""
    sent = {row["model"]: row["wire"]["bits_on_the_wire"] for row in rows if row.get("wire")}
    body = [[name, ", ".join(f"{way} {bits:g}" for way, bits in by_way.items())] for name, by_way in sent.items()]
    return markdown.table(["Model", "Bits as sent"], body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--quantised", action="append", required=True, metavar="DIRECTION=FORMAT,...")
    parser.add_argument("--tp-degree", type=int, help="the ranks of --quantised all-reduce=FORMAT")
    parser.add_argument("--suite", default="paper")
    parser.add_argument("--tasks", help="names with commas between them; all of the suite by default")
    parser.add_argument("--data-mirror", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    formats = [
        QuantisedCommunication.parse(text, given.tp_degree if "all-reduce" in text else None)
        for text in given.quantised
    ]
    path = open_checkpoint(given.model).path
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = load_model(path, dtype=getattr(torch, default_dtype(device == "cpu")), device=device).eval()
    rows = scores(
        Loaded(Path(given.model).name, network, load_tokenizer(path)),
        formats,
        suite=given.suite,
        tasks=given.tasks and given.tasks.split(","),
        data_mirror=given.data_mirror,
        held_out=given.held_out,
        limit=given.limit,
    )
    given.out.write_text(json.dumps(rows))
    compared = tables.difference_table(compare_models(rows), margin=1.0)
    print("\n\n".join([tables.plain_table(rows), bits_table(rows), compared]))


if __name__ == "__main__":
    main()
