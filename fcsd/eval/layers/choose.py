"""Chooses which layers to convert by the loss on a text, measured for sets of layers.

Layers interact. A converted layer whose predecessor is converted too lacks more of the residual stream than a layer
whose predecessor is not converted. An error early in the model affects every later layer. The losses of single layers
therefore do not add up, and the search measures sets of layers. It adds one layer after the other, each time the layer
that gives the lowest loss.
"""

import heapq
import json
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fcsd.checkpoint.tokenizer import text_ids
from fcsd.disk import json_sha256, require_folder, write_text
from fcsd.errors import ConfigError
from fcsd.eval.engines.adapter import HFAdapter
from fcsd.eval.engines.answer_cache import AnswerCache, are_losses
from fcsd.eval.layers.compare_choice import compare_choice, draw, table
from fcsd.eval.layers.rewiring import Layers, Subject, first, last, load_subject, reads_in_flight
from fcsd.eval.perplexity import read_texts
from fcsd.eval.statistics import estimate
from fcsd.models.selection import layers_text
from fcsd.progress import progress

log = logging.getLogger(__name__)

# (negative log-likelihood in nats, tokens) of each document with these layers converted
Measure = Callable[[Layers], list[tuple[float, int]]]

# Tokens of text that one measurement reads.
TOKENS = 16384


@dataclass(frozen=True)
class Step:
    """A chosen set, and how it was reached.

    Attributes:
        layers: the set.
        found_by: ``greedy``, or ``first`` or ``last`` where as many first or last layers have a lower loss.
        loss: in nats per token on the search text; ``increase`` relative to the unconverted model.
        measured: how many sets the search had measured by then.
    """

    layers: Layers
    found_by: str
    loss: float
    increase: float
    measured: int


def choose_layers(
    model: str,
    *,
    text: str | Path,
    layers: Sequence[int] | None = None,
    budget: str | None = None,
    check: str | Path | None = None,
    wiring: str = "farskip",
    variant: str = "full",
    tokens: int = TOKENS,
    batch_size: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    out: str | Path | None = None,
) -> dict[str, Any]:
    """Choose the layers whose untrained conversion raises the loss on a text by the least.

    Args:
        model: directory or hub id of an original.
        text: the text to search on: ``.jsonl``, ``.jsonl.gz`` or ``.parquet``.
        layers: how many layers to convert; there is a choice for each number. This or ``budget`` is given.
        budget: convert as many layers as raise the loss by at most this share, e.g. ``2%``.
        check: a text on which the choices are compared with as many first, last and random layers. Documents that
            the search may have read are left out.
        tokens: whole documents of each text are read until they have this number of tokens.
        batch_size: the most documents in one forward pass; None for as many as the limits on tokens allow.
        device, dtype: see ``load_subject``.
        out: directory for ``choice.json``, with ``check`` also ``comparison.md`` and ``comparison.png``. What was
            measured is kept there, so that a search that was killed repeats none of it.

    Returns:
        The content of ``choice.json``: every choice with its ``layers`` as a list and as ``spec``, the text that
        ``fcsd convert --layers`` takes; the search's ``path``; and the ``comparison``.

    Raises:
        ConfigError: not exactly one of ``layers`` and ``budget`` is given, the model cannot have its value, or ``out``
            is not a directory.
        BadInputError: the checkpoint or a text cannot be used.
        NonFiniteError: the model gives NaN or infinite logits.
        DiskError: ``out`` may not be written.
    """
    if (layers is None) == (budget is None):
        raise ConfigError("give either --layers, how many layers to convert, or --budget, how much the loss may rise")
    if out is not None:
        require_folder(Path(out), "--out")
    allowed = None if budget is None else _share(budget)
    seen = read_texts(Path(text))
    unseen = None if check is None else [t for t in read_texts(Path(check)) if t not in set(seen)]
    if unseen is not None and not unseen:
        raise ConfigError(
            f"{check} has no document that is not in {text}", "Give a text that the search does not read."
        )
    subject = load_subject(model, wiring=wiring, variant=variant, device=device, dtype=dtype)
    depth = subject.depth
    if wrong := [n for n in layers or [] if not 0 < n < depth]:
        raise ConfigError(
            f"--layers: {wrong[0]} of {depth} layers cannot be chosen", f"Give a number from 1 to {depth - 1}."
        )

    answers = None if out is None else AnswerCache(Path(out) / "measured.jsonl")
    try:
        measure = measuring(subject, take(seen, tokens, subject), answers, batch_size)
        steps, path = search(measure, depth, sizes=layers, allowed=allowed)
        choice = {
            "model": subject.name,
            "depth": depth,
            **subject.identity(),
            "tokens": sum(count for _, count in measure(())),
            "unconverted_loss": estimate(measure(()))[0],
            "budget": allowed,
            "choices": [_plain(step, subject) for step in steps],
            "path": [_plain(step, subject) for step in path],
        }
        if unseen is not None:
            unseen_measure = measuring(subject, take(unseen, tokens, subject), answers, batch_size)
            choice["comparison"] = [
                compare_choice(unseen_measure, step.layers, subject) for step in steps if step.layers
            ]
    finally:
        if answers is not None:
            answers.close()
    compared = choice.get("comparison")
    if compared:
        log.info("\n%s\n", table(compared))
    if out is not None:
        write_text(Path(out) / "choice.json", json.dumps(choice, indent=1) + "\n")
        if compared:
            write_text(Path(out) / "comparison.md", table(compared) + "\n")
            draw(compared, Path(out) / "comparison.png")
    return choice


def search(
    measure: Measure, depth: int, *, sizes: Sequence[int] | None = None, allowed: float | None = None
) -> tuple[list[Step], list[Step]]:
    """Search for the set of each size, or for the largest set whose relative loss increase is at most ``allowed``.

    The first and the last N layers are candidates as well, so that a chosen set never has a higher loss than they do
    on the search text.

    Returns:
        The chosen sets, and the sets of the greedy path.
    """
    measured = set()

    @cache
    def loss(layers: Layers) -> float:
        measured.add(layers)
        return estimate(measure(layers))[0]

    def step(layers: Layers, found_by: str) -> Step:
        found = Step(layers, found_by, loss(layers), loss(layers) / loss(()) - 1, len(measured))
        log.info("%3d: %s  %+.2f %% (%s)", len(layers), layers_text(layers), 100 * found.increase, found_by)
        return found

    def best(greedy: Step) -> Step:
        n = len(greedy.layers)
        ends = [step(first(n), "first"), step(last(n, depth), "last")]
        return min([greedy, *ends], key=lambda candidate: candidate.loss)

    path: list[Step] = []
    chosen: dict[int, Step] = {}
    most = max(sizes) if sizes else depth
    # The first layers take longest, so the time left is an upper limit.
    with progress("adding layers", most) as advance:
        for layers in greedy_path(loss, depth):
            path.append(step(layers, "greedy"))
            n = len(layers)
            if allowed is not None:
                found = best(path[-1]) if n else path[-1]
                if found.increase > allowed:
                    return [chosen[n - 1]], path
                chosen[n] = found
            elif n in (sizes or ()):
                chosen[n] = best(path[-1])
                if n == most:
                    break
            advance(min(1, n))
    return [chosen[n] for n in sizes or [depth]], path


def greedy_path(loss: Callable[[Layers], float], depth: int) -> Iterator[Layers]:
    """Sets of 0, 1, ... ``depth`` layers. Each is the previous set plus the layer that gives the lowest loss.

    A layer is measured again only if the increase that it last caused is the lowest known (lazy greedy, Minoux 1978).
    This finds the same sets as measuring every layer at every step, as long as no conversion lowers the increase that
    another layer causes. Conversions of neighbours mostly raise each other's.
    """
    chosen: Layers = ()
    yield chosen
    costs = [(-math.inf, layer) for layer in range(depth)]  # last known; a heap
    while costs:
        measured_now = set()
        while costs[0][1] not in measured_now:
            layer = costs[0][1]
            heapq.heapreplace(costs, (loss(_with(chosen, layer)) - loss(chosen), layer))
            measured_now.add(layer)
        chosen = _with(chosen, heapq.heappop(costs)[1])
        yield chosen


def _with(layers: Layers, layer: int) -> Layers:
    return tuple(sorted((*layers, layer)))


def measuring(
    subject: Subject, texts: list[str], answers: AnswerCache | None, batch_size: int | None = None
) -> Measure:
    """A function that measures sets of layers on texts, each set once."""
    key = json_sha256([subject.identity(), texts])
    adapter = HFAdapter(subject.model, subject.tokenizer, batch_size=batch_size)

    def valid(answer: Any) -> bool:
        return are_losses(answer) and len(answer) == len(texts)

    @cache
    def measure(layers: Layers) -> list[tuple[float, int]]:
        known = None if answers is None else answers.get([key, layers], valid)
        if known is not None:
            return known
        with subject.converted(layers):
            items = [(-loglikelihood, count) for loglikelihood, count in adapter.text_loglikelihoods(texts)]
        if answers is not None:
            answers.add([key, layers], items)
        return items

    return measure


def take(texts: list[str], tokens: int, subject: Subject) -> list[str]:
    """Documents, each once, until they have ``tokens`` tokens. The sample does not depend on their order."""
    taken, total = [], 0
    for text in sorted(set(texts), key=json_sha256):
        if total >= tokens:
            break
        taken.append(text)
        total += len(text_ids([text], subject.tokenizer)[0])
    return taken


def to_text(choice: dict[str, Any]) -> str:
    """One line per choice, which ``fcsd convert --layers`` takes."""
    return "\n".join(found["spec"] for found in choice["choices"])


def _share(budget: str) -> float:
    try:
        share = float(budget.removesuffix("%")) / 100
    except ValueError:
        share = math.nan
    if not budget.endswith("%") or not 0 <= share < math.inf:
        raise ConfigError(f"--budget: {budget!r} is not a percentage", "Write for example --budget 2%")
    return share


def _plain(step: Step, subject: Subject) -> dict[str, Any]:
    reads = reads_in_flight(subject.wired(step.layers), subject.halves)
    return {"n": len(step.layers), "spec": layers_text(step.layers), **asdict(step), "reads_in_flight": reads}
