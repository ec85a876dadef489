"""Generates in slots of fixed shape, greedily or by sampling, so that a step can be a CUDA graph.

A step of transformers' ``generate`` launches hundreds of small kernels and waits for the device several times, so that
on a fast GPU the host limits the speed. A step of this module reads and writes buffers of fixed shape and never waits
for the device; captured as a graph, it is one launch. Every ``BLOCK`` steps the host reads the new tokens, removes the
answers that have ended, and puts the next prompts into their slots.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from fcsd.engine.attention import attention_of_step
from fcsd.engine.batches import CACHE_TOKENS
from fcsd.engine.logprobs import FORWARD_TOKENS, batches, decoder_of, head_logits, right_padded
from fcsd.engine.slots import Slots
from fcsd.foreign_errors import reason_of
from fcsd.launch.shared_work import ALONE
from fcsd.models.config_keys import cache_keyword
from fcsd.models.rope import rope_border

# Steps after which the host reads the new tokens.
BLOCK = 16
# Attention reads a multiple of this number of tokens of every slot. There is one graph for each multiple.
WIDTH = 256
MAX_SLOTS = 256
# The length of a slot is a multiple of this number of tokens, which keeps masks and keys aligned in memory.
GRAIN = 64

log = logging.getLogger(__name__)


def plan_slots(
    sizes: Sequence[int], prompts: Sequence[int], batch_size: int | None, cache_tokens: int = CACHE_TOKENS
) -> tuple[int, int, list[list[int]]]:
    """The number of slots, the length of a slot in tokens, and the groups of prompts that one prefill reads.

    The groups are ordered by length, longest first.

    The result depends on all prompts of a task and not on how ranks share them, so that every rank computes the same
    shapes.

    Args:
        sizes: for each prompt, its length in tokens plus the most tokens of its answer.
        prompts: for each prompt, its length in tokens.
        batch_size: the most slots; None for as many as ``cache_tokens`` and ``MAX_SLOTS`` allow.
        cache_tokens: the most tokens of all slots.
    """
    length = _up(max(sizes), GRAIN)
    count = min(len(sizes), batch_size or MAX_SLOTS, max(1, cache_tokens // length))
    return count, length, list(batches(prompts, FORWARD_TOKENS, max(1, count // 4)))


@torch.no_grad()
def generate_in_slots(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    *,
    count: int,
    length: int,
    max_new_tokens: int,
    ended: Callable[[list[int], int], int | None],
    graphs: bool,
    temperatures: Sequence[float] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Continue prompts as ``generate.generate`` does, which describes the other arguments, results and errors.

    Args:
        model: a causal LM in eval mode for which ``why_no_slots`` returns None.
        groups: indices of the prompts that are read in one forward; a group waits until enough slots are free.
        count: the number of slots, at least as many as any group has prompts.
        length: the length of a slot in tokens, at least that of every prompt with its answer.
        graphs: whether to capture the steps as CUDA graphs. If that fails, the reason is logged and the kernels of
            each step are launched one by one.
    """
    stepper = Stepper(model, Slots(count, length, model.device), graphs, sampled=temperatures is not None)
    queue, free = deque(groups), list(range(count))
    running: dict[int, int] = {}  # slot -> prompt
    new: dict[int, list[int]] = {}

    def take(tokens: dict[int, list[int]]) -> Iterator[tuple[int, list[int]]]:
        for slot, more in tokens.items():
            index = running[slot]
            answer, seen = new[index], len(new[index])
            answer.extend(more[: max_new_tokens - seen])
            end = ended(answer, seen)
            if end is not None or len(answer) == max_new_tokens:
                free.append(slot)
                del running[slot], new[index]
                yield index, answer[:end]

    while queue or running:
        while queue and len(queue[0]) <= len(free):
            group = queue.popleft()
            slots = [free.pop() for _ in group]
            running |= dict(zip(slots, group, strict=True))
            new |= {index: [] for index in group}
            heat = None if temperatures is None else [temperatures[index] for index in group]
            first = stepper.prefill([prompts[index] for index in group], slots, heat)
            yield from take({slot: [token] for slot, token in zip(slots, first, strict=True)})
        if running:
            lengths = [(len(prompts[index]), len(new[index])) for index in running.values()]
            steps = min(BLOCK, max_new_tokens - min(done for _, done in lengths))
            stepper.slots.width = min(length, _up(max(map(sum, lengths)) + steps, WIDTH))
            rows = stepper.decode(steps, list(running))
            yield from take({slot: rows[slot] for slot in list(running)})


def _up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


def drawn(logits: torch.Tensor, temperatures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A token id drawn for each row of logits ``[rows, vocab]``, ``[rows, 1]``, and whether all are finite.

    The largest of ``logits / temperature`` plus Gumbel noise is a draw from their softmax; this needs no sum over the
    vocabulary, and none of the noise for rows of temperature 0.

    Args:
        temperatures: ``[rows]``; 0 takes the most likely token.
    """
    heat = temperatures[:, None]
    # The noise of a draw of 0 would be infinite, and NaN where the heat is 0.
    draws = torch.empty_like(logits, dtype=torch.float32).exponential_().clamp_(min=torch.finfo(torch.float32).tiny)
    noise = -draws.log()
    return (logits.float() + heat * noise).argmax(-1, keepdim=True), logits.isfinite().all(-1)


class Stepper:
    """The model and its buffers of fixed shape.

    Args:
        model: a causal LM in eval mode for which ``why_no_slots`` returns None.
        slots: the slots, in which no answer is running.
        graphs: whether to capture the steps as CUDA graphs.
        cache: the keys and values of ``slots``, if another stepper of the same slots has made them.
        sampled: whether tokens are drawn, at the temperatures that ``prefill`` gets.

    Attributes:
        ids: the last token id of every slot, ``[slots, 1]``.
        finite: whether all logits of a slot's answer were finite, ``[slots]``.
        graphs: the captured graphs by width; None if steps are not captured.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: Slots,
        graphs: bool,
        cache: Cache | None = None,
        sampled: bool = False,
    ) -> None:
        self.model = model
        self.slots = slots
        self.cache = cache or slots.cache(model.config.get_text_config().num_hidden_layers)
        self.ids = torch.zeros(slots.count, 1, dtype=torch.long, device=model.device)
        self.finite = torch.ones(slots.count, dtype=torch.bool, device=model.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None
        # Ended answers go on with the others: their writes stay inside of their slots, and their positions before the
        # border of rotary factors, beyond which those of all slots would change.
        border = rope_border(model.config)
        self._last = slots.length - 1 if border is None else min(slots.length, border.positions) - 1
        self._temperatures = torch.zeros(slots.count, device=model.device) if sampled else None

    @torch.no_grad()
    def prefill(
        self, prompts: Sequence[Sequence[int]], slots: Sequence[int], temperatures: Sequence[float] | None = None
    ) -> list[int]:
        """Read prompts into slots, each with its temperature, and return the first new token id of each."""
        device = self.model.device
        rows, _ = right_padded(prompts, device)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.slots.filling = torch.tensor(slots, device=device)
        try:
            hidden = decoder_of(self.model)(
                input_ids=rows, use_cache=True, **{cache_keyword(): self.cache}
            ).last_hidden_state
        finally:
            filling, self.slots.filling = self.slots.filling, None
        logits = head_logits(self.model, hidden[torch.arange(len(prompts), device=device), ends - 1])
        if self._temperatures is not None:
            self._temperatures[filling] = torch.tensor(temperatures, dtype=torch.float32, device=device)
        first, finite = self._choose(logits, filling)
        ALONE.require_finite(bool(finite.all()))
        self.ids[filling] = first
        self.slots.positions[filling] = ends
        self.finite[filling] = True
        return first[:, 0].tolist()

    @torch.no_grad()
    def decode(self, steps: int, running: list[int]) -> list[list[int]]:
        """The next token ids ``[slots][steps]``; those of slots without an answer have no meaning."""
        tokens = []
        for _ in range(steps):
            self._play()
            tokens.append(self.ids.clone())
        ALONE.require_finite(bool(self.finite[running].all()))
        return torch.cat(tokens, dim=1).tolist()

    def _step(self) -> torch.Tensor:
        """Compute one token for every slot without waiting for the device, and return the logits ``[slots, vocab]``."""
        slots = self.slots
        masks = slots.masks(self.model.config.get_text_config(), self.model.dtype)
        with attention_of_step(self.model):
            logits = self.model(
                input_ids=self.ids,
                attention_mask=masks,
                position_ids=slots.positions[:, None],
                use_cache=True,
                **{cache_keyword(): self.cache},
            ).logits[:, -1]
        ids, finite = self._choose(logits)
        self.ids.copy_(ids)
        self.finite &= finite
        slots.positions.add_(1).clamp_(max=self._last)
        return logits

    def _choose(self, logits: torch.Tensor, slots: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``drawn``, or the most likely token ids if nothing is drawn; the rows are all slots, or these."""
        if self._temperatures is None:
            return logits.argmax(-1, keepdim=True), logits.isfinite().all(-1)
        return drawn(logits, self._temperatures if slots is None else self._temperatures[slots])

    def _play(self) -> None:
        if self.graphs is not None and self.slots.width not in self.graphs:
            try:
                self.graphs[self.slots.width] = self._capture()
            except RuntimeError as error:
                log.warning("generating without CUDA graphs, which is slower: %s", reason_of(error))
                self.graphs = None
        if self.graphs is None:
            self._step()
        else:
            self.graphs[self.slots.width].replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """Capture one step as a graph and compare it with a step that is not captured; the buffers are restored.

        Both write the same keys and values to the same places, so the cache need not be restored.

        Raises:
            RuntimeError: a part of the model waits for the device, or the graph computes other logits.
        """
        buffers = (self.ids, self.slots.positions, self.finite)
        before = [buffer.clone() for buffer in buffers]

        def restore() -> None:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

        graph = torch.cuda.CUDAGraph()
        others = list((self.graphs or {}).values())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):  # libraries initialise themselves, which is not allowed during a capture
                expected = self._step().clone()
            torch.cuda.current_stream().wait_stream(side)
            restore()
            # Graphs share their memory, because two graphs never run at the same time.
            with torch.cuda.graph(graph, pool=others[0].pool() if others else None):
                logits = self._step()
            graph.replay()
            rounding = 8 * torch.finfo(expected.dtype).eps * expected.abs().max()
            if not (logits - expected).abs().max() <= rounding:
                raise RuntimeError("a captured step gives other logits")
        finally:
            restore()
        return graph
