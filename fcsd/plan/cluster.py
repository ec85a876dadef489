"""Predicts whether converting a model pays on a cluster: the training step of the standard wiring and of farskip.

The step is computation, whose time comes from ``fcsd.plan.speed``, and what the all-to-alls and the reduction of
gradients leave exposed, whose times come from a machine file and ``fcsd.parallel.cost``. The standard wiring awaits
every all-to-all at once. Under farskip each of them has a cover (FarSkip Figure 10), which is estimated from FLOPs.

``tests/plan/test_cluster.py`` compares predictions for one node with the runs in ``benchmarks/results``. No prediction
for several nodes has been compared with a run.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fcsd.disk import write_picture
from fcsd.errors import ConfigError
from fcsd.kernels.bit_split import Format
from fcsd.kernels.bit_split.format import bits_sent
from fcsd.parallel.cost import Collective, Dedup, Links, Rows, kernel_seconds, transfer_seconds
from fcsd.plan.model import LayerNumbers, ModelNumbers
from fcsd.plan.setup import Setup
from fcsd.plan.speed import micro_batch_seconds, update_seconds

NODES = (1, 2, 4, 8, 16, 32, 64, 128)

# FLOP/s of an H200 in the computation that covers all-to-alls in a forward pass: in attention itself, and in the
# products with weights around it. With them the covers of three shapes are within 45 % of those that were measured on
# four H200s, and their sum within 20 %.
ATTENTION_RATE = 380e12
PRODUCT_RATE = 700e12

# Seconds for each byte that a GPU sends to others of its node, as four H200s have reached in all-to-alls of NCCL.
NVLINK = 1 / 302e9

# The least speed-up that ``answer`` calls one; predictions are less exact than that.
WORTH = 1.02

# Covers in the backward pass as multiples of all covers of the forward pass: the gradient of combine, of dispatch.
BACKWARD_COVERS = (1.6, 1.0)


@dataclass(frozen=True)
class Choice:
    """A row of the table: a wiring, and what may shorten its all-to-alls.

    Attributes:
        name: as it is printed.
        wiring: ``standard`` or ``farskip``.
        dedups: the levels of deduplication from which the prediction takes the fastest.
        formats: the formats from which it takes the fastest; None is bf16.
    """

    name: str
    wiring: str
    dedups: tuple[Dedup, ...] = ("off",)
    formats: tuple[str | None, ...] = (None,)


@dataclass(frozen=True)
class Prediction:
    """A training step of one choice on one number of nodes; times in seconds.

    Attributes:
        ep_size: ranks that share the experts.
        taken: the level of deduplication and the format that were taken.
        computation: the step without communication: the comm-free bound.
        exposed: time by which all-to-alls make the step longer.
        gradients: time of the optimizer's communication beyond that over NVLink.
    """

    choice: Choice
    nodes: int
    gpus: int
    ep_size: int
    taken: tuple[Dedup, str | None]
    computation: float
    exposed: float
    gradients: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.computation + self.exposed + self.gradients

    @property
    def of_bound(self) -> float:
        """The speed of the step as a share of that of a step without any communication."""
        return self.computation / self.step


def choices(format: str) -> tuple[Choice, ...]:
    """The rows of the table; ``format`` is the format of those with quantised communication."""
    plain: tuple[Dedup, ...] = ("off",)
    levels: tuple[Dedup, ...] = ("off", "rank", "node")
    return tuple(
        Choice(f"{wiring}{name}", wiring, dedups, formats)
        for wiring in ("standard", "farskip")
        for name, dedups, formats in (
            ("", plain, (None,)),
            (" + dedup", levels, (None,)),
            (f" + dedup + {format}", levels, (None, format)),
        )
    )


def predict(model: ModelNumbers, setup: Setup, links: Links, format: str = "int8") -> list[Prediction]:
    """Predicts every choice on every number of nodes.

    The micro-batch is that of ``setup``, and so is the global batch as long as it is at least one micro-batch for each
    GPU. The experts are spread over ``setup.ep_size`` GPUs, or over all if there are fewer.

    Raises:
        ConfigError: the model has no routed experts, or ``format`` is not a format or does not fit the model's rows.
    """
    if not model.experts:
        raise ConfigError(
            "a dense model sends no rows between experts, so this prediction does not apply to it",
            hint="leave out --machine",
        )
    Format.parse(format).row_bytes(model.hidden)  # refuses groups that do not divide a row
    nodes = NODES if links.far else (1,)
    return [predicted(model, setup, links, choice, count) for count in nodes for choice in choices(format)]


def predicted(model: ModelNumbers, setup: Setup, links: Links, choice: Choice, nodes: int) -> Prediction:
    """Predicts a training step, without a teacher, of one choice on ``nodes`` nodes."""
    world = nodes * links.per_node
    sizes = range(min(world, setup.ep_size), 0, -1)
    ep_size = next(size for size in sizes if model.experts % size == 0 == world % size)
    tokens = setup.micro_batch_size * setup.seq_len
    accumulation = max(1, setup.batch_tokens // (tokens * world))
    alone = replace(setup, world=world, ep_size=ep_size, teacher="none", batch_tokens=tokens * world * accumulation)
    device, host = micro_batch_seconds(model, model, alone)
    computation = accumulation * max(device / links.speed, host) + update_seconds(model, alone)
    exposed: dict[tuple[Dedup, str | None], float] = {
        (dedup, format): accumulation * _exposed(model, alone, links, choice.wiring, dedup, format)
        for dedup in choice.dedups
        for format in choice.formats
    }
    taken = min(exposed, key=lambda way: exposed[way])
    gradients = _gradients(model, alone, links)
    return Prediction(choice, nodes, world, ep_size, taken, computation, exposed[taken], gradients)


def _exposed(model: ModelNumbers, setup: Setup, links: Links, wiring: str, dedup: Dedup, format: str | None) -> float:
    """Seconds by which the all-to-alls of one micro-batch make it longer."""
    if setup.ep_size == 1:
        return 0.0
    bits = 16.0 if format is None else Format.parse(format).bits_per_value
    tokens = setup.micro_batch_size * setup.seq_len
    rows = Rows(tokens, model.top_k, model.experts, setup.ep_size, model.hidden, bits)
    transfer, kernels = transfer_seconds(rows, links, dedup), kernel_seconds(rows, links, dedup)
    seconds = 0.0
    for layer in model.layers:
        if layer.routed:
            covers = covers_in_step(model, layer, setup, links, overlapped=wiring == "farskip")
            collectives = [Collective(transfer, cover, kernels) for cover in covers]
            seconds += sum(one.exposed(links.hidden_cost) for one in collectives)
    return seconds


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


def _gradients(model: ModelNumbers, setup: Setup, links: Links) -> float:
    """Seconds by which slower links than those between H200s make the optimizer's communication longer.

    ``plan.speed.UPDATE`` contains the time over NVLink. Dense gradients are summed over all GPUs, and the updated
    weights gathered, first inside of nodes and then between them. Experts are summed over the GPUs that hold the same.
    """
    nodes, copies = setup.world // links.per_node, setup.world // setup.ep_size
    dense, routed = 2 * setup.width * model.dense, 2 * setup.width * model.routed / setup.ep_size
    inside = dense * (links.per_node - 1) / links.per_node
    seconds = max(0.0, inside * (links.near.beta - NVLINK))
    if nodes > 1 and links.far is not None:
        between = dense / links.per_node * (nodes - 1) / nodes + routed * (copies - 1) / copies
        seconds += links.far.seconds(between)
    return seconds


def to_text(predictions: list[Prediction], assumed: str | None = None) -> str:
    """Formats a table with a line for each number of nodes and choice. Ratios are to the standard wiring.

    Args:
        assumed: what the prediction assumes of the machine, as a sentence.
    """
    from fcsd.markdown import table

    rows = []
    for nodes, group in _by_nodes(predictions).items():
        standard = group[0].step
        for one in group:
            times = [f"{seconds * 1e3:,.0f}" for seconds in (one.step, one.exposed)]
            sizes = [str(nodes), str(one.gpus), str(one.ep_size)] if one is group[0] else ["", "", ""]
            dedup, format = one.taken
            taken = f"{dedup}, {format or 'bf16'}"
            rows.append([one.choice.name, taken, *sizes, *times, f"{one.of_bound:.0%}", f"{standard / one.step:.2f}x"])
    head = ["wiring", "taken", "nodes", "GPUs", "EP", "step, ms", "exposed, ms", "of bound", "speed-up"]
    formats = dict.fromkeys(format for one in predictions for format in one.choice.formats if format)
    lines = [
        answer(predictions),
        "",
        "Predicted, not measured: a training step without a teacher. `taken` is the level of deduplication and the",
        "format that expose the least time. The speed-up is over the standard wiring on the same nodes.",
        f"Sent: {bits_sent(formats)}, where bf16 has 16.",
        *([assumed] if assumed else []),
    ]
    return "\n".join([*lines, "", table(head, rows, left=2)])


def answer(predictions: list[Prediction]) -> str:
    """Says on three lines whether converting pays: farskip is compared with the standard wiring that sends the same."""
    names = list(dict.fromkeys(one.choice.name for one in predictions if one.choice.wiring == "farskip"))
    speeds = {name: _speed_ups(predictions, name) for name in (names[0], names[-1])}
    pays = max(max(found)[0] for found in speeds.values()) >= WORTH
    said = [f"  {name} is {_between(found)} as fast as {_standard(name)}" for name, found in speeds.items()]
    return "\n".join([f"Converting {'pays' if pays else f'gains less than {WORTH - 1:.0%}'}:", *said])


def _speed_ups(predictions: list[Prediction], name: str) -> list[tuple[float, int]]:
    """The speed of farskip's row of this name relative to the same row of the standard wiring, with its nodes."""
    steps = {(one.choice.name, one.nodes): one.step for one in predictions}
    return [(steps[_standard(name), nodes] / step, nodes) for (row, nodes), step in steps.items() if row == name]


def _standard(name: str) -> str:
    return name.replace("farskip", "standard")


def _between(speeds: list[tuple[float, int]]) -> str:
    """``1.05x (1 node) to 1.23x (8 nodes)``, or one speed if all are alike."""
    slowest, fastest = min(speeds), max(speeds)
    ends = [f"{speed:.2f}x ({nodes} node{'s' if nodes > 1 else ''})" for speed, nodes in (slowest, fastest)]
    return f"{fastest[0]:.2f}x" if round(slowest[0], 2) == round(fastest[0], 2) else " to ".join(ends)


def to_json(predictions: list[Prediction]) -> list[dict[str, Any]]:
    """The predictions as data that can be written as JSON; times are in seconds."""
    return [{**vars(one), "choice": one.choice.name, "step": one.step, "of_bound": one.of_bound} for one in predictions]


def draw(predictions: list[Prediction], path: Path, title: str) -> None:
    """Writes a PNG with the speed of each choice, as a share of a step without communication, over the nodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    groups = _by_nodes(predictions)
    for index, first in enumerate(next(iter(groups.values()))):
        shares = [group[index].of_bound for group in groups.values()]
        dashed = first.choice.wiring == "standard"
        axes.plot(range(len(groups)), shares, "o--" if dashed else "o-", label=first.choice.name)
    axes.set_xticks(range(len(groups)), [f"{nodes}\n{group[0].gpus} GPUs" for nodes, group in groups.items()])
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("nodes")
    axes.set_ylabel("speed as a share of the comm-free bound")
    axes.set_title(f"{title}: predicted", loc="left", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_picture(path, figure)


def _by_nodes(predictions: list[Prediction]) -> dict[int, list[Prediction]]:
    """The predictions by their number of nodes, in the order in which they were given."""
    groups: dict[int, list[Prediction]] = {}
    for one in predictions:
        groups.setdefault(one.nodes, []).append(one)
    return groups
