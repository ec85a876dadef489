"""Says which deduplication ``parallel.dedup: auto`` chooses for a layer, and why.

``fcsd plan`` assumes random routing. A run counts the routing of its first step (``distill.experts.dedup_choice``).
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fcsd import config
from fcsd.kernels.bit_split import Format
from fcsd.parallel.cost import Dedup, Links, Rows, Sent, expected_bytes
from fcsd.parallel.expert.choice import Option, arrangements, node_size_for, options
from fcsd.parallel.machine import require_far
from fcsd.plan.model import LayerNumbers, ModelNumbers
from fcsd.plan.setup import Setup

# FLOP/s of an H200 in the computation that covers all-to-alls in a forward pass: in attention itself, and in the
# products with weights around it. With them the covers of three shapes are within 45 % of those that were measured on
# four H200s, and their sum within 20 %.
ATTENTION_RATE = 380e12
PRODUCT_RATE = 700e12

# Covers in the backward pass as multiples of all covers of the forward pass: the gradient of combine, of dispatch.
BACKWARD_COVERS = (1.6, 1.0)


def rows_of(model: ModelNumbers, setup: Setup, quantised: config.Quantised) -> Rows:
    """The rows of one dispatch or combine of a rank; the bits of a value are the mean over the four directions."""
    plain = 8.0 * setup.width
    formats = (quantised.dispatch, quantised.combine, quantised.dispatch_grad, quantised.combine_grad)
    bits = sum(plain if name is None else Format.parse(name).bits_per_value for name in formats) / len(formats)
    tokens = setup.micro_batch_size * setup.seq_len
    return Rows(tokens, model.top_k, model.experts, setup.ep_size, model.hidden, bits)


def expected_options(model: ModelNumbers, setup: Setup, links: Links, parallel: config.Parallel) -> list[Option]:
    """The options of the last MoE layer under random routing, for a student that has farskip's wiring.

    The list is empty for a dense model and without divided experts.

    Raises:
        ConfigError: see ``require_far``.
    """
    layers = [layer for layer in model.layers if layer.routed]
    if not layers or setup.ep_size == 1:
        return []
    require_far(links, setup.ep_size)
    rows = rows_of(model, setup, parallel.quantised)
    offered = arrangements(setup.ep_size, node_size_for(setup.ep_size, links.per_node))
    sent: dict[Dedup, Sent] = {dedup: expected_bytes(rows, links, dedup) for dedup in offered}
    covers = covers_in_step(model, layers[-1], setup, links, overlapped=parallel.overlap == "on")
    return options(sent, rows, links, covers)


def covers_in_step(
    model: ModelNumbers, layer: LayerNumbers, setup: Setup, links: Links, overlapped: bool
) -> tuple[float, ...]:
    """Seconds of the computation that covers each collective of a layer in a micro-batch, also those of a recompute.

    Args:
        overlapped: whether the layer has farskip's wiring; otherwise every collective is awaited at once.
    """
    covers = tuple(cover / links.speed for cover in covers_of(model, layer, setup)) if overlapped else (0.0,) * 4
    return (*covers, *covers[:2]) if setup.recompute else covers


def covers_of(model: ModelNumbers, layer: LayerNumbers, setup: Setup) -> tuple[float, float, float, float]:
    """Seconds of the computation of an H200 that covers a layer's collectives under farskip.

    The order is dispatch and combine of the forward pass, then the gradients of combine and of dispatch. Dispatch lies
    under attention itself and its output projection, combine under the other projections and the shared experts.
    """
    tokens = setup.micro_batch_size * setup.seq_len
    attention = tokens * model.attention * setup.seq_len / ATTENTION_RATE
    dispatch = attention + 2 * tokens * layer.output / PRODUCT_RATE
    combine = 2 * tokens * (layer.projections + layer.shared) / PRODUCT_RATE
    return dispatch, combine, *(share * (dispatch + combine) for share in BACKWARD_COVERS)  # type: ignore[return-value]


def to_text(found: Sequence[Option]) -> str:
    """Formats a table of the options, with the reason for the choice above it."""
    from fcsd.markdown import table

    rows = [
        [option.dedup, *(f"{1e3 * seconds:.2f}" for seconds in (option.transfer, option.kernels, option.exposed))]
        for option in found
    ]
    lines = [
        f"parallel.dedup auto: under random routing it chooses {reason(found)}.",
        "Predicted, not measured. A run decides for each layer by the routing of its first step.",
        "",
        table(["dedup", "transfer, ms", "kernels, ms", "exposed in a micro-batch, ms"], rows, left=1),
    ]
    return "\n".join(lines)


def reason(found: Sequence[Option]) -> str:
    """The choice and why, such as ``node, which exposes 3.10 ms per layer and micro-batch (rank 9.02, off 25.10)``."""
    best, *others = found
    rest = ", ".join(f"{option.dedup} {1e3 * option.exposed:.2f}" for option in others)
    return f"{best.dedup}, which exposes {1e3 * best.exposed:.2f} ms per layer and micro-batch ({rest})"


def to_json(found: Sequence[Option]) -> list[dict[str, Any]]:
    """The options as data that can be written as JSON, the best one first; times are in seconds."""
    return [asdict(option) for option in found]
