"""FarSkip Figure 3: the scores of untrained conversions of the first N layers, and of the last N, over N.

    python -m studies.capability.first_and_last MODEL --out OUT [--tasks NAME,...] [--held-out FILE]
        [--wiring farskip] [--points N,N,...] [--suite paper] [--data-mirror DIR] [--limit N] [--batch-size N]
        [--device cpu|cuda] [--dtype TYPE]

MODEL is an original, as a directory or hub id. It is loaded once and rewired in place for every point. Finished points
are kept in OUT: a run that was killed and is started again with the same model and settings repeats none of them.
"""

import argparse
import hashlib
import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd import markdown
from fcsd.checkpoint import open_checkpoint
from fcsd.checkpoint.location import short_names
from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.disk import file_sha256, json_sha256, require_folder, write_text
from fcsd.errors import ConfigError
from fcsd.eval.compare import nats
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.answer_cache import AnswerCache
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.perplexity import HeldOut, held_out_result
from fcsd.eval.results import PERPLEXITIES, UNITS, Result, are_sound, is_accuracy, shown
from fcsd.eval.statistics import paired_difference, spread
from fcsd.models.build import decoder_layers, load_on_device, unwired, wire
from fcsd.models.selection import layers_text
from fcsd.models.wiring import Wiring
from fcsd.progress import progress
from fcsd.version import __version__

log = logging.getLogger(__name__)

Layers = tuple[int, ...]  # indices of decoder layers, ascending

# Most values of N on a curve unless the caller names them.
POINTS = 13
# End of the model that is converted -> its colour in Figure 3.
ENDS = {"first": "tab:red", "last": "tab:blue"}


@dataclass(frozen=True)
class Subject:
    """An original model, and the wiring whose layers are varied.

    Attributes:
        sha256: the hash of the model's configuration and weights.
        wiring: the wiring, with an empty set of layers.
    """

    name: str
    sha256: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    wiring: Wiring

    @property
    def depth(self) -> int:
        """The number of decoder layers."""
        return len(decoder_layers(self.model))

    @contextmanager
    def converted(self, layers: Layers) -> Iterator[None]:
        """A block in which exactly these layers are converted; afterwards no layer is."""
        try:
            wire(self.model, replace(self.wiring, layers=layers))
            yield
        finally:
            wire(self.model, unwired())

    def identity(self) -> dict[str, Any]:
        """All that a measurement depends on besides the layers and the data, as JSON-like data."""
        block = self.wiring.to_block()
        return {
            "model_sha256": self.sha256,
            **{key: block[key] for key in ("wiring", "variant", "border", "distance")},
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.model.device.type,
            "versions": {"fcsd": __version__, **{name: version(name) for name in ("lm_eval", "transformers", "torch")}},
        }


def load_subject(model: str, wiring: str, device: str | None, dtype: str | None) -> Subject:
    """Load an original model for rewiring; ``load_on_device`` explains device and dtype."""
    source = open_checkpoint(model)
    source.require_original()
    path = source.path
    network = load_on_device(path, device=device, dtype=dtype)
    digest = hashlib.sha256()
    for file in sorted([*path.glob("*.json"), *path.glob("*.safetensors")]):
        digest.update(f"{file.name} {file_sha256(file)}\n".encode())
    return Subject(short_names([model])[0], digest.hexdigest(), network, load_tokenizer(path), Wiring(wiring, ()))


def measure(
    model: str,
    out: Path,
    *,
    wiring: str = "farskip",
    points: Sequence[int] | None = None,
    suite: str = "paper",
    tasks: Sequence[str] | None = None,
    data_mirror: Path | None = None,
    held_out: Path | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Measure both curves; write ``sweep.json``, ``sweep.md`` and ``sweep.png`` into ``out``.

    Args:
        points: values of N; None for at most ``POINTS`` from 0 to all layers. 0 is always measured.
        tasks: some of ``suite`` or of lm-eval's; None for none, then only the held-out loss is measured.
        limit: use only so many documents of every task and of the held-out text, evenly spread.

    Returns:
        The content of ``sweep.json``. Each point has a score per column with its ``change`` from the unconverted
        model as ``[difference, paired standard error]``; that of a perplexity is in nats.
    """
    if not tasks and held_out is None:
        raise ConfigError("a sweep needs something to measure", "Give --tasks, --held-out or both.")
    require_folder(out, "--out")
    text = None if held_out is None else HeldOut(held_out)
    if text is not None:
        text.texts = [text.texts[i] for i in spread(len(text.texts), limit)]  # type: ignore[assignment]
    subject = load_subject(model, wiring, device, dtype)
    numbers = _points(points, subject.depth)
    settings = {
        "suite": suite,
        "tasks": list(tasks or []),
        "limit": limit,
        "batch_size": batch_size,
        "data_mirror": None if data_mirror is None else _content(data_mirror),
        "held_out_sha256": None if text is None else json_sha256(text.texts),
    }

    def ask() -> list[Result]:
        results = []
        if tasks:
            loaded, engine = Loaded(subject.name, subject.model, subject.tokenizer), Engine(batch_size=batch_size)
            asked: dict[str, Any] = {"suite": suite, "tasks": tasks, "data_mirror": data_mirror, "limit": limit}
            results += evaluate_models([loaded], engine=engine, **asked)
        if text is not None:
            results.append(held_out_result(text, HFAdapter(subject.model, subject.tokenizer, batch_size=batch_size)))
        return results

    cache = AnswerCache(out / "points.jsonl")
    identity = json_sha256([subject.identity(), settings])
    measured: dict[Layers, list[Result]] = {}
    points_to_measure = dict.fromkeys(_layers(end, n, subject.depth) for n in numbers for end in ENDS)
    try:
        with progress("measuring points", len(points_to_measure)) as advance:
            for layers in points_to_measure:
                results = cache.get([identity, layers], are_sound)
                if results is None:
                    with subject.converted(layers):
                        results = ask()
                    cache.add([identity, layers], results)
                measured[layers] = results
                scores = "  ".join(f"{result['column']} {shown(result)[0]}" for result in results)
                place = f"[{len(measured)} of {len(points_to_measure)}]"
                log.info("layers %s converted: %s  %s", layers_text(layers), scores, place)
                advance(1)
    finally:
        cache.close()
    sweep = _sweep(subject, settings, numbers, measured)
    write_text(out / "sweep.json", json.dumps(sweep, indent=1) + "\n")
    write_text(out / "sweep.md", to_text(sweep) + "\n")
    draw(sweep, out / "sweep.png")
    return sweep


def _points(points: Sequence[int] | None, depth: int) -> list[int]:
    if points is None:
        steps = min(POINTS, depth + 1) - 1
        return [round(depth * step / steps) for step in range(steps + 1)]
    if wrong := [n for n in points if not 0 <= n <= depth]:
        raise ConfigError(f"--points: {wrong[0]} is outside of the model, which has {depth} layers")
    return sorted({0, *points})


def _layers(end: str, n: int, depth: int) -> Layers:
    return tuple(range(n)) if end == "first" else tuple(range(depth - n, depth))


def _content(mirror: Path) -> dict[str, str]:
    """Hash of every file of a data mirror by its path there."""
    files = sorted(path for path in mirror.rglob("*") if path.is_file())
    return {path.relative_to(mirror).as_posix(): file_sha256(path) for path in files}


def _sweep(
    subject: Subject, settings: dict[str, Any], numbers: list[int], measured: dict[Layers, list[Result]]
) -> dict[str, Any]:
    """The content of ``sweep.json``: everything but the results of single questions."""
    reference = {row["column"]: row for row in measured[()]}
    points = []
    for end in ENDS:
        for n in numbers:
            layers = _layers(end, n, subject.depth)
            scores = {
                row["column"]: {
                    "value": row["value"],
                    "stderr": row["stderr"],
                    "change": paired_difference(nats(row), nats(reference[row["column"]])),
                }
                for row in measured[layers]
            }
            points.append({"end": end, "n": n, "layers": layers_text(layers), "scores": scores})
    keys = ("column", "task", "metric", "n", "chance", "settings_sha256", "data_sha256")
    return {
        "model": subject.name,
        "depth": subject.depth,
        **subject.identity(),
        **{key: settings[key] for key in ("suite", "limit", "batch_size")},
        "columns": [{key: row[key] for key in keys} for row in measured[()]],
        "points": points,
    }


def to_text(sweep: dict[str, Any]) -> str:
    """The points as a Markdown table: accuracies in points, losses in nats.

    Behind each is the change from the unconverted model with its paired standard error.
    """
    columns = sweep["columns"]
    head = ["Converted", "N", *(column["column"] for column in columns)]
    body = []
    for point in sweep["points"]:
        cells = []
        for column in columns:
            score = point["scores"][column["column"]]
            scale, digits = (100, 1) if is_accuracy(column) else (1, 3)
            change, error = (scale * value for value in score["change"])
            paired = f" ({change:+.{digits}f} ± {error:.{digits}f})" if point["n"] else f" ± {shown(column | score)[1]}"
            cells.append(shown(column | score)[0] + paired)
        body.append([point["end"], str(point["n"]), *cells])
    return markdown.table(head, body)


def draw(sweep: dict[str, Any], path: Path) -> None:
    """A PNG with one panel per column: both curves over N, chance as a dotted line.

    Whiskers are the paired standard errors of the change from the unconverted model. Perplexities are drawn as their
    logarithms, in which they are compared.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = sweep["columns"]
    figure = Figure(figsize=(3.4 * len(columns), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, column in enumerate(columns, 1):
        axes = figure.add_subplot(1, len(columns), place)
        scale = 100 if is_accuracy(column) else 1
        for end, colour in ENDS.items():
            points = [point for point in sweep["points"] if point["end"] == end]
            scores = [point["scores"][column["column"]] for point in points]
            logs = column["metric"] in PERPLEXITIES
            values = [math.log(score["value"]) if logs else scale * score["value"] for score in scores]
            errors = [scale * score["change"][1] for score in scores]
            numbers = [point["n"] for point in points]
            axes.errorbar(numbers, values, errors, color=colour, marker="o", markersize=3, label=f"{end} N layers")
        if column["chance"] is not None:
            axes.axhline(column["chance"], color="black", linestyle="dotted", linewidth=1)
        axes.set_title(column["column"])
        axes.set_xlabel(f"N converted layers of {sweep['depth']}, untrained")
        axes.set_ylabel("points" if scale == 100 else f"nats per {UNITS[column['metric']]}")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    """Reads the arguments, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    for name in ("tasks", "points"):
        parser.add_argument(f"--{name}", type=lambda text: text.split(","))
    for name in ("data-mirror", "held-out"):
        parser.add_argument(f"--{name}", type=Path)
    for name in ("limit", "batch-size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--wiring", default="farskip")
    parser.add_argument("--suite", default="paper")
    for name in ("device", "dtype"):
        parser.add_argument(f"--{name}")
    given = vars(parser.parse_args())
    points = given.pop("points")
    print(to_text(measure(**given, points=None if points is None else [int(n) for n in points])))


if __name__ == "__main__":
    main()
