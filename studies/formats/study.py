"""Measures the perplexity and the scores of a model over each wire of ``plan``, in pieces from which it can resume.

A piece is one wire in one measurement, of perplexity or of the tasks. It is stored as soon as it is known. Pieces do
not depend on each other, so several processes may measure different pieces at a time, also on one GPU.
"""

import json
import logging
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from studies.formats.formats import studied
from studies.formats.plan import TABLE_7, TASKS, Direction, pieces
from transformers import PreTrainedModel

from fcsd.checkpoint import resolve
from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.disk import file_sha256, json_sha256, write_text
from fcsd.errors import ConfigError
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.answer_cache import AnswerCache, are_losses
from fcsd.eval.engines.engine import Engine
from fcsd.eval.harness import Loaded, evaluate_models
from fcsd.eval.layers.rewiring import model_sha256
from fcsd.eval.perplexity import read_texts
from fcsd.eval.statistics import estimate, paired_difference
from fcsd.launch.environment import snapshot
from fcsd.models.build import load_model
from fcsd.parallel.quantised.simulated_model import SimulatedCommunication, over_formats

log = logging.getLogger(__name__)

NAME = "wires.json"
_QUESTIONS = 16  # how many questions, which are short, are scored in place of one window


@dataclass(frozen=True)
class Study:
    """What one study depends on.

    Attributes:
        model: directory or hub id of an original or converted model.
        text: a held-out text, ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        every: take the first document and every ``every``-th one after it.
        max_length: the length of the windows in which documents are read, in tokens.
        batch_size: the number of windows in one forward pass. On CPUs, small batches are faster, because the values
            that are rounded stay in the cache.
        tp_degree: the tensor-parallel degree of the all-reduce.
        tasks: tasks for table 7; none measures the perplexity only.
        limit: how many documents of each task are scored; None for all.
        data_mirror: the directory of the tasks' data; None for the hub.
        device: ``cpu`` or ``cuda``.
        dtype: the data type of the weights.
        processes: how many pieces are measured at a time, each by a process with a copy of the model.
    """

    model: str
    text: Path
    every: int = 1
    max_length: int = 512
    batch_size: int = 4
    tp_degree: int = 4
    tasks: tuple[str, ...] = TASKS
    limit: int | None = None
    data_mirror: Path | None = None
    device: str = "cpu"
    dtype: str = "float32"
    processes: int = 1

    def texts(self) -> list[str]:
        """The documents whose perplexity is measured."""
        return read_texts(self.text)[:: self.every]


class Piece(NamedTuple):
    """One measurement. Without a direction and a format, it is that of the model without a format."""

    kind: Literal["losses", "tasks"]
    direction: Direction | None = None
    format: str | None = None


class Opened(NamedTuple):
    """What a process needs to measure pieces."""

    network: PreTrainedModel
    tokenizer: Any
    texts: list[str]


def simulated(direction: Direction, format: str, tp_degree: int) -> SimulatedCommunication:
    """The wire of one piece of the study."""
    rounding = studied(format).rounding
    if direction == "all-reduce":
        return SimulatedCommunication(all_reduce=rounding, tp_degree=tp_degree)
    return SimulatedCommunication(dispatch=rounding, combine=rounding if direction == "dispatch+combine" else None)


def run(study: Study, out: Path) -> dict[str, Any]:
    """Measure what is not yet in ``out``, and write ``out/wires.json``.

    No random number is drawn: the formats round to nearest, and the tasks take lm-eval's fixed examples.

    Returns:
        The content of ``wires.json``. ``losses`` has a piece for each direction and format: the perplexity, and the
        difference in nats per token from the model without a format, with its standard error paired by documents.

    Raises:
        ConfigError, BadInputError: the model, the text or the tasks cannot be used.
    """
    path = resolve(study.model).path
    texts = study.texts()
    identity = {
        "model_sha256": model_sha256(path),
        "texts_sha256": json_sha256(texts),
        **{key: getattr(study, key) for key in ("max_length", "batch_size", "tp_degree", "device", "dtype")},
        "versions": {name: version(name) for name in ("torch", "transformers", "lm_eval")},
    }
    of_tasks = {
        "tasks": study.tasks,
        "limit": study.limit,
        "data_mirror": None if study.data_mirror is None else _content(study.data_mirror),
    }

    def key(piece: Piece) -> list[Any]:
        return [*piece, json_sha256([identity, of_tasks if piece.kind == "tasks" else None])]

    wanted = [Piece("losses"), *(Piece("losses", *wire) for wire in pieces())]
    if study.tasks:
        wanted += [Piece("tasks"), *(Piece("tasks", "all-reduce", row.format) for row in TABLE_7)]
    known = AnswerCache(out / "pieces.jsonl")
    try:
        for piece, answer in _measured(study, [piece for piece in wanted if known.get(key(piece), _is_answer) is None]):
            known.add(key(piece), answer)
            log.info("%s, %s over %s: measured", piece.kind, piece.direction or "no wire", piece.format or "bf16")
        answers = {piece: known.get(key(piece), _is_answer) for piece in wanted}
    finally:
        known.close()
    without = answers[Piece("losses")]
    tasks = [answer for piece, answer in answers.items() if piece.kind == "tasks"]
    found = {
        "model": path.resolve().name,
        "text": study.text.name,
        "text_sha256": file_sha256(study.text),
        "every": study.every,
        "documents": len(texts),
        "tokens": sum(tokens for _, tokens in without),
        **identity,
        **of_tasks,
        "seeds": "none: rounding to nearest, greedy scores",
        "environment": snapshot(),
        "perplexity": math.exp(estimate(without)[0]),
        "losses": [_loss(*wire, answers[Piece("losses", *wire)], without) for wire in pieces()],
        "scores": [_scores(row, tasks[0]) for row in tasks],
    }
    write_text(out / NAME, _compact(found))
    return found


def _measured(study: Study, wanted: Sequence[Piece]) -> Iterator[tuple[Piece, Any]]:
    """Each piece with its answer, as soon as it is known. Tasks take the longest, so they are measured first."""
    wanted = sorted(wanted, key=lambda piece: piece.kind != "tasks")
    if not wanted:
        return
    if study.processes == 1:
        opened = _open(study)
        yield from ((piece, _measure(study, piece, opened)) for piece in wanted)
        return
    # A process that has used a GPU cannot be forked, so each worker is a new interpreter.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(study.processes, len(wanted)), spawned) as pool:
        begun = {pool.submit(_measure_in_worker, study, piece): piece for piece in wanted}
        try:
            for future in as_completed(begun):
                if future.exception() is None:
                    yield begun[future], future.result()
            for future in begun:  # a piece that failed does not stop the others
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _open(study: Study) -> Opened:
    path = resolve(study.model).path
    network: PreTrainedModel = load_model(path, dtype=getattr(torch, study.dtype), device=study.device).eval()
    return Opened(network, load_tokenizer(path), study.texts())


_open_once = cache(_open)  # a worker measures several pieces with one copy of the model


def _measure_in_worker(study: Study, piece: Piece) -> Any:
    return _measure(study, piece, _open_once(study))


def _measure(study: Study, piece: Piece, opened: Opened) -> Any:
    kind, direction, format = piece
    network, tokenizer, texts = opened
    if direction is not None and format is not None:
        with over_formats(network, simulated(direction, format, study.tp_degree)):
            return _measure(study, Piece(kind, None, format), opened)
    if kind == "losses":
        lm = HFAdapter(network, tokenizer, max_length=study.max_length, batch_size=study.batch_size)
        return [(-loglikelihood, tokens) for loglikelihood, tokens in lm.text_loglikelihoods(texts)]
    results = evaluate_models(
        [Loaded("model", network, tokenizer)],
        tasks=study.tasks,
        limit=study.limit,
        data_mirror=study.data_mirror,
        engine=Engine(batch_size=_QUESTIONS * study.batch_size),
    )
    keys = ("column", "metric", "n", "settings_sha256", "data_sha256", "items")
    return {"format": format, "results": [{key: result[key] for key in keys} for result in results]}


def _is_answer(answer: Any) -> bool:
    """Whether an answer is one of ``_measure``: losses of documents, or scores of tasks."""
    return are_losses(answer) or (isinstance(answer, dict) and answer.keys() == {"format", "results"})


def _loss(direction: Direction, format: str, items: Any, without: Any) -> dict[str, Any]:
    difference, stderr = paired_difference(items, without)
    return {
        "direction": direction,
        "format": format,
        "bits_on_the_wire": studied(format).bits,
        "perplexity": math.exp(estimate(items)[0]),
        "nats": difference,
        "stderr": stderr,
    }


def _scores(measured: Any, without: Any) -> dict[str, Any]:
    """The scores over one format, as fractions; differences are paired by questions. ``Avg`` weights tasks equally."""
    format = measured["format"]
    scores = {}
    for own, plain in zip(measured["results"], without["results"], strict=True):
        if (own["settings_sha256"], own["data_sha256"]) != (plain["settings_sha256"], plain["data_sha256"]):
            raise ConfigError(f"{own['column']}: the pieces were measured on different questions", "use another --out")
        change = paired_difference(own["items"], plain["items"])
        scores[own["column"]] = {"n": own["n"], "value": estimate(own["items"])[0], "change": change}
    values = [score["value"] for score in scores.values()]
    changes = [score["change"] for score in scores.values()]
    mean = sum(change for change, _ in changes) / len(changes)
    stderr = math.hypot(*(error for _, error in changes)) / len(changes)
    scores["Avg"] = {"n": None, "value": sum(values) / len(values), "change": (mean, stderr)}
    return {"format": format, "bits_on_the_wire": None if format is None else studied(format).bits, "scores": scores}


def _content(mirror: Path) -> str:
    """A hash over the files of a data mirror and their places in it."""
    files = sorted(path for path in mirror.rglob("*") if path.is_file())
    return json_sha256({path.relative_to(mirror).as_posix(): file_sha256(path) for path in files})


def _compact(found: dict[str, Any]) -> str:
    """JSON with one line for each piece."""
    lists = ("losses", "scores")
    head = json.dumps({key: value for key, value in found.items() if key not in lists}, indent=1).removesuffix("\n}")
    parts = [f' "{key}": [\n  ' + ",\n  ".join(map(json.dumps, found[key])) + "\n ]" for key in lists]
    return ",\n".join([head, *parts]) + "\n}\n"
