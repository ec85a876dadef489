"""Measures what converting each layer alone costs, and leaves the dearest ones standard: ``convert --layers auto``.

In real models the first layers cost many times as much as others (docs/quality.md). The costs of single layers do
not add up to that of the untrained conversion, but what healing leaves follows their sum: a set of layers that is far
away untrained, and costs little layer by layer, heals as well as one that is near.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from fcsd.checkpoint import open_checkpoint
from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.convert import choose_wiring
from fcsd.errors import ConfigError, NonFiniteError
from fcsd.models.build import load_model, unwired, wire
from fcsd.models.selection import cheapest, layers_text
from fcsd.models.wiring_block import DESYNC, Wiring
from fcsd.progress import progress

log = logging.getLogger(__name__)

ROWS, TOKENS = 4, 512  # of the text that each measurement reads


@dataclass(frozen=True)
class LayerCosts:
    """What was measured, and what follows from it.

    Attributes:
        wiring: the wiring, with the layers that are converted.
        alone: layer -> KL(original || original with this layer converted), in nats per token.
        together: the same with all layers of ``wiring`` converted.
        tokens: how many tokens were read.
    """

    wiring: Wiring
    alone: dict[int, float]
    together: float
    tokens: int

    def to_json(self) -> dict[str, Any]:
        """What ``convert --costs`` writes, with None for the first layers if they cannot be converted."""
        name = self.wiring.name if self.wiring.variant == "full" else f"{self.wiring.name} {self.wiring.variant}"
        alone = [self.alone.get(layer) for layer in range(max(self.alone) + 1)]
        return {"tokens": self.tokens, name: {"alone": alone, "kept": self.wiring.layers, "together": self.together}}

    def to_text(self) -> str:
        """A table with a line for each layer."""
        whole, rest = sum(self.alone.values()), sum(self.alone[layer] for layer in self.wiring.layers)
        lines = [f"KL from the original in nats per token, over {self.tokens} tokens, of each layer converted alone:"]
        for layer, cost in self.alone.items():
            told = "" if layer in self.wiring.layers else "  stays standard"
            lines.append(f"  {layer:>3}  {cost:8.4f}{told}")
        lines += [
            f"  sum over all layers {whole:.4f}, and over layers {layers_text(self.wiring.layers)} {rest:.4f}",
            f"  these layers together, untrained: {self.together:.4f}",
            f"  {len(self.alone) - len(self.wiring.layers)} of {len(self.alone)} layers stay standard",
        ]
        return "\n".join(lines)


def choose_by_cost(
    model: str, wiring: str, layers: str, text: Path | None = None, *, trust_remote_code: bool = False, **how: Any
) -> LayerCosts:
    """Measure every layer that can be converted, and choose.

    Args:
        model: directory or hub id of the original.
        how: the further options of ``convert`` that say how layers are wired.
        layers: ``auto`` chooses as ``cheapest`` does; ``auto:N`` converts the N layers that cost least.
        text: a text file (``.jsonl`` or ``.parquet``) to measure on; None for text that the model writes itself.

    Raises:
        ConfigError: the wiring is a Desync one, or ``N`` is more than the layers.
        BadInputError: the checkpoint or the text cannot be used.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    source = open_checkpoint(model, trust_remote_code=trust_remote_code)
    source.require_original()
    source.require_usable()  # before what convert itself looks at after minutes
    whole = choose_wiring(source.config, source.config.arch, wiring, "all", **how)
    found = _measure(source.path, whole, layers, text)
    log.info(found.to_text())
    return found


def _measure(model: Path, wiring: Wiring, layers: str, text: Path | None) -> LayerCosts:
    if wiring.name in DESYNC:
        raise ConfigError(f"--layers auto does not measure {wiring.name}", "Choose the layers, or convert all.")
    number = layers.strip().partition(":")[2]
    count = int(number) if number else None
    if count is not None and not 0 < count <= len(wiring.layers):
        raise ConfigError(f"--layers {layers}: 1 to {len(wiring.layers)} layers can be converted")
    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", "bfloat16") if on_gpu else ("cpu", "float32")
    network = load_model(model, dtype=dtype, device=device)
    return measure_layers(network, wiring, calibration_rows(network, model, text, ROWS, TOKENS), count)


def measure_layers(
    network: PreTrainedModel, wiring: Wiring, rows: Sequence[Tensor], count: int | None = None
) -> LayerCosts:
    """Convert every layer of ``wiring`` alone, and then all that are chosen; ``network`` is standard again afterwards.

    Args:
        network: the original, on its device.
        rows: ``[1, seq]`` token ids on that device.
        count: how many layers are chosen; None for the choice of ``cheapest``.

    Raises:
        NonFiniteError: the model gives NaN or infinite logits.
    """
    alone = dict(zip(wiring.layers, divergences(network, wiring, rows, [(n,) for n in wiring.layers]), strict=True))
    kept = cheapest(alone, count)
    (together,) = divergences(network, wiring, rows, [kept])
    return LayerCosts(replace(wiring, layers=kept), alone, together, sum(row.numel() for row in rows))


def divergences(
    network: PreTrainedModel, wiring: Wiring, rows: Sequence[Tensor], sets: Sequence[tuple[int, ...]]
) -> list[float]:
    """KL(original || original with these layers converted), in nats per token, for each set of layers.

    Arguments and errors are those of ``measure_layers``.
    """
    found = []
    with torch.inference_mode(), progress("measuring layers", len(rows) * len(sets)) as advance:
        expected = [_log_probabilities(network, row) for row in rows]
        for layers in sets:
            wire(network, replace(wiring, layers=layers))
            total = 0.0
            for row, known in zip(rows, expected, strict=True):
                own = _log_probabilities(network, row)
                total += float((known.exp() * (known - own)).sum(-1).mean()) / len(rows)
                advance(1)
            wire(network, unwired())
            found.append(total)
    return found


def calibration_rows(
    network: PreTrainedModel, model: Path, text: Path | None, rows: int = ROWS, seq: int = TOKENS
) -> list[Tensor]:
    """At most ``rows`` rows ``[1, seq]`` of token ids on the model's device, of a text, or of what the model writes.

    Raises:
        BadInputError: the text cannot be read.
        ConfigError: it is empty.
    """
    tokenizer = load_tokenizer(model)
    if text is None:
        from fcsd.distill.writer import own_documents

        documents = own_documents(network, tokenizer, rows * seq)
    else:
        from fcsd.checkpoint.tokenizer import text_ids
        from fcsd.eval.perplexity import read_texts

        documents = [ids for part in read_texts(text)[: rows * seq] for ids in text_ids([part], tokenizer)]
    ids = [token for document in documents for token in document][: rows * seq]
    if len(ids) < 2:
        raise ConfigError("there is no text to measure the layers on", "Give a text by --calibration.")
    return [row[None] for row in torch.tensor(ids, device=network.device).split(seq) if len(row) > 1]


def _log_probabilities(network: PreTrainedModel, row: Tensor) -> Tensor:
    """``[1, seq, vocab]`` in fp32."""
    logits = network(row, use_cache=False).logits
    if not logits.isfinite().all():
        raise NonFiniteError("the model gives NaN or infinite logits", "Use another checkpoint.")
    return functional.log_softmax(logits.float(), -1)
