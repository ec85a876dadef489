"""How long a server takes for a step and for first tokens, by prediction.

The schedule of the wiring (``fcsd.models.schedule``) says which sums travel and what is computed meanwhile. The time of
a part is that of reading its weights or of its products, whichever is longer. What a sum takes beyond its cover is
exposed, and what it hides costs a share. The shares of the data sheets' rates were set on fcsd's own engine with two
H100s (``infer_slow_16_layers_2xh100.json`` in benchmarks/results); servers of vLLM had no part in them, and
``studies/real/speeds.py`` holds the predictions beside nine of those.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fcsd.advise.cards import Card
from fcsd.bench.serve.workload import LARGE, SMALL
from fcsd.models.build import arch_of, key_value_heads
from fcsd.models.schedule import Kind, Output, reductions
from fcsd.models.wiring_block import Blocks, Wiring
from fcsd.plan.model import LayerNumbers, MetaModel, ModelNumbers

STANDARD = Wiring("standard", ())
# Shares of the data sheet's rates: reading weights (launches included), large products, attention in a prompt.
READ_SHARE, PRODUCT_SHARE, ATTENTION_SHARE = 1.9e12 / 3.35e12, 560 / 989, 380 / 989
# Seconds that computation loses for each second of a sum that it hides.
HIDDEN_COST = 0.24
BYTES = 2  # of a value in bf16

Sum = Callable[[float], float]  # the seconds of an all-reduce of so many bytes


def _none(_: float) -> float:
    return 0.0


@dataclass(frozen=True)
class Load:
    """What is asked: ``concurrency`` prompts of ``prompt_tokens`` at once, then answers to all of them."""

    prompt_tokens: int = 2048
    concurrency: int = 16


@dataclass(frozen=True)
class Served:
    """A prediction.

    Attributes:
        step: seconds of a step in which every request gets a token (TPOT).
        first: mean seconds to the first token of prompts that come at once (TTFT).
    """

    step: float
    first: float


@dataclass(frozen=True)
class Server:
    """A model on GPUs of one kind.

    Attributes:
        numbers: parameters and dimensions.
        kinds: the kind of each decoder layer.
        blocks: how its layers are put together.
        kv_share: key-value heads as a share of the query heads.
        card: the GPU.
        load: what is asked.
    """

    numbers: ModelNumbers
    kinds: Sequence[Kind]
    blocks: Blocks
    kv_share: float
    card: Card
    load: Load

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.numbers.stored

    @property
    def cache_bytes(self) -> float:
        """Bytes of the keys and values of the load's prompts, in bf16."""
        tokens = self.load.concurrency * self.load.prompt_tokens
        return BYTES * tokens * len(self.numbers.layers) * self.numbers.attention * self.kv_share

    def tensor_parallel(self, ranks: int, wiring: Wiring, of: Sum) -> Served:
        """One server of ``ranks`` GPUs, each with a part of every layer."""
        step = self.seconds(ranks, wiring, of, self.load.concurrency, prefill=False)
        chunks, tokens = self._chunks(self.load.concurrency)
        return Served(step, (chunks + 1) / 2 * self.seconds(ranks, wiring, of, tokens, prefill=True))

    def replicas(self, count: int) -> Served:
        """A server on each of ``count`` GPUs, between which requests are divided."""
        share = -(-self.load.concurrency // count)
        step = self.seconds(1, STANDARD, _none, share, prefill=False)
        chunks, tokens = self._chunks(share)
        return Served(step, (chunks + 1) / 2 * self.seconds(1, STANDARD, _none, tokens, prefill=True))

    def stages(self, count: int, ranks: int = 1, of: Sum = _none) -> Served:
        """``count`` stages of ``ranks`` GPUs each, filled by as many micro-batches of answers or short chunks."""
        step = self.seconds(ranks, STANDARD, of, max(1, self.load.concurrency // count), prefill=False)
        total = self.load.concurrency * self.load.prompt_tokens
        pieces = max(-(-total // SMALL), count)
        each = self.seconds(ranks, STANDARD, of, total / pieces, prefill=True) / count
        return Served(step, (count + (pieces - 1) / 2) * each)

    def _chunks(self, prompts: int) -> tuple[int, float]:
        """The steps in which prompts are read, and the tokens of each."""
        total = prompts * self.load.prompt_tokens
        large = self.card.memory_gb * 1e9 >= 70 * 2**30 and "A100" not in self.card.name  # vLLM's choice for servers
        chunks = max(1, -(-total // (LARGE if large else SMALL)))
        return chunks, total / chunks

    def seconds(self, ranks: int, wiring: Wiring, of: Sum, rows: float, prefill: bool) -> float:
        """The seconds of one pass.

        Args:
            rows: tokens of the pass: of prompts (``prefill``), or one of each answer.
        """
        parts = {
            Output(number, part): self._part(layer, part, ranks, rows, prefill)
            for number, layer in enumerate(self.numbers.layers)
            for part in ("attn", "shared", "routed")
        }
        seconds = sum(parts.values()) + self._products(self.numbers.head, self.load.concurrency, ranks, 8 * BYTES)
        if ranks > 1:
            one = of(rows * self.numbers.hidden * BYTES)
            for layer in reductions(wiring, self.kinds, self.blocks):
                for sum_ in layer:
                    hidden = min(one, sum(parts[output] for output in sum_.covered_by))
                    seconds += one - hidden + HIDDEN_COST * hidden  # FarSkip eq. 9 has no cost of what is hidden
        return seconds

    def _part(self, layer: LayerNumbers, part: str, ranks: int, rows: float, prefill: bool) -> float:
        numbers, context, own = self.numbers, self.load.prompt_tokens, layer.projections + layer.output
        if part == "attn":
            width = numbers.attention / ranks
            if prefill:  # a token attends to half of the prompt in the mean: two products of 2 operations each
                inside = rows * width * context / (ATTENTION_SHARE * self.card.tflops * 1e12)
            else:
                inside = BYTES * width * self.kv_share * rows * context / self._read_rate
            return self._products(own, rows, ranks, self.numbers.bits) + inside
        if part == "shared":
            dense = layer.shared if layer.routed else layer.dense - own
            return self._products(dense, rows, ranks, self.numbers.bits)
        if not layer.routed:
            return 0.0
        chosen = numbers.top_k / numbers.experts
        read = layer.routed * (1 - (1 - chosen) ** rows)  # of the experts, those that any token chose
        return self._products(read, rows, ranks, self.numbers.bits, layer.routed * chosen)

    def _products(self, read: float, rows: float, ranks: int, bits: float, active: float | None = None) -> float:
        """Seconds in which ``rows`` pass through ``active`` parameters, of which ``read`` are read."""
        active = read if active is None else active
        compute = 2 * rows * active / (PRODUCT_SHARE * self.card.tflops * 1e12)
        return max(bits / 8 * read / self._read_rate, compute) / ranks

    @property
    def _read_rate(self) -> float:
        return READ_SHARE * self.card.read_gb_per_s * 1e9


def server_of(model: MetaModel, card: Card, load: Load) -> Server:
    """The server of a model."""
    arch = arch_of(model.config)
    kinds: list[Kind] = [kind_of_numbers(layer) for layer in model.numbers.layers]
    return Server(model.numbers, kinds, arch.blocks, kv_share(model.config), card, load)


def kind_of_numbers(layer: LayerNumbers) -> Kind:
    """The kind of a decoder layer, by its numbers of parameters."""
    if not layer.routed:
        return "dense"
    return "moe-shared" if layer.shared else "moe"


def kv_share(config: Any) -> float:
    """The key-value heads as a share of the query heads; 1 where the config does not say it."""
    heads = getattr(config.get_text_config(), "num_attention_heads", None) or 1
    own = [kept for kept, _ in key_value_heads(config)]
    return sum(own) / len(own) / heads
