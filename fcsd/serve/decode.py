"""Greedy generation in slots: fixed shapes, so that a step can be a CUDA graph, and the host looks on now and then.

A step of transformers' ``generate`` is hundreds of small launches and several waits for the device; on a fast GPU
the host is what one waits for. Here a step reads and writes fixed buffers and never waits: captured once as a graph
it is a single launch. Every ``BLOCK`` steps the host reads the new tokens, lets answers that have ended go, and
fills their slots with the next prompts.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from fcsd.launch.shared_work import ALONE
from fcsd.serve.generate import CACHE_TOKENS
from fcsd.serve.logprobs import FORWARD_TOKENS, batches, decoder_of, head_logits
from fcsd.serve.slots import Slots

# Steps between two looks of the host, and the grain of the width that attention looks at: one graph for each.
BLOCK = 16
WIDTH = 256
MAX_SLOTS = 256
GRAIN = 64  # of a slot's length: masks and keys stay aligned

log = logging.getLogger(__name__)


def plan_slots(
    sizes: Sequence[int], prompts: Sequence[int], batch_size: int | None
) -> tuple[int, int, list[list[int]]]:
    """How many slots of how many tokens, and which prompts are read together, the longest first.

    Depends on all the prompts of a task and not on who shares them, so that every rank computes the same shapes.

    Args:
        sizes: tokens of each prompt and its answer.
        prompts: tokens of each prompt.
        batch_size: most slots; None for as many as ``CACHE_TOKENS`` and ``MAX_SLOTS`` allow.
    """
    length = _up(max(sizes), GRAIN)
    count = min(len(sizes), batch_size or MAX_SLOTS, max(1, CACHE_TOKENS // length))
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
) -> Iterator[tuple[int, list[int]]]:
    """Continue prompts by their most likely tokens, as ``generate_greedy`` does.

    Args:
        model: a causal LM in eval mode for which ``why_no_slots`` has no objection.
        prompts: token ids, none empty.
        groups: indices of the prompts that are read in one forward; a group waits until enough slots are free.
        count: slots, at least as many as any group has prompts.
        length: tokens of a slot, at least those of any prompt and its answer.
        max_new_tokens: the most tokens to add to a prompt.
        ended: told the new tokens of an answer and how many of them it has seen; at how many the answer ends, if it
            does.
        graphs: capture the steps as CUDA graphs; where that fails the reason is logged and they run one by one.

    Yields:
        ``(index of the prompt, its new tokens, the one that ended it included)`` as answers are done.

    Raises:
        NonFiniteError: NaN or infinite logits.
    """
    stepper = _Stepper(model, Slots(count, length, model.device), graphs)
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
            first = stepper.prefill([prompts[index] for index in group], slots)
            yield from take({slot: [token] for slot, token in zip(slots, first, strict=True)})
        if running:
            lengths = [(len(prompts[index]), len(new[index])) for index in running.values()]
            steps = min(BLOCK, max_new_tokens - min(done for _, done in lengths))
            stepper.slots.width = min(length, _up(max(map(sum, lengths)) + steps, WIDTH))
            rows = stepper.decode(steps, list(running))
            yield from take({slot: rows[slot] for slot in list(running)})


def _up(number: int, grain: int) -> int:
    return -(-number // grain) * grain


class _Stepper:
    """The model with its buffers: the last token of every slot ``[slots, 1]``, and whether all logits were finite."""

    def __init__(self, model: PreTrainedModel, slots: Slots, graphs: bool) -> None:
        self.model = model
        self.slots = slots
        self.cache = slots.cache(model.config.get_text_config().num_hidden_layers)
        self.ids = torch.zeros(slots.count, 1, dtype=torch.long, device=model.device)
        self.finite = torch.ones(slots.count, dtype=torch.bool, device=model.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] | None = {} if graphs else None

    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[int]) -> list[int]:
        """Read prompts into slots; the first new token of each."""
        width = max(map(len, prompts))
        device = self.model.device
        rows = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts], device=device)
        ends = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.slots.filling = torch.tensor(slots, device=device)
        try:
            hidden = decoder_of(self.model)(
                input_ids=rows, past_key_values=self.cache, use_cache=True
            ).last_hidden_state
        finally:
            filling, self.slots.filling = self.slots.filling, None
        logits = head_logits(self.model, hidden[torch.arange(len(prompts), device=device), ends - 1])
        ALONE.require_finite(bool(logits.isfinite().all()))
        first = logits.argmax(-1)
        self.ids[filling, 0] = first
        self.slots.positions[filling] = ends
        self.finite[filling] = True
        return first.tolist()

    def decode(self, steps: int, running: list[int]) -> list[list[int]]:
        """The next tokens ``[slots][steps]``; those of slots that are not running mean nothing."""
        tokens = []
        for _ in range(steps):
            self._play()
            tokens.append(self.ids.clone())
        ALONE.require_finite(bool(self.finite[running].all()))
        return torch.cat(tokens, dim=1).tolist()

    def _step(self) -> torch.Tensor:
        """One token for every slot, without waiting for the device; the logits ``[slots, vocab]``."""
        slots = self.slots
        logits = self.model(
            input_ids=self.ids,
            attention_mask=slots.mask(self.model.dtype),
            position_ids=slots.positions[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        self.finite &= logits.isfinite().all(-1)
        self.ids.copy_(logits.argmax(-1, keepdim=True))
        slots.positions.add_(1).clamp_(max=slots.length - 1)  # a slot whose answer is over stays inside
        return logits

    def _play(self) -> None:
        if self.graphs is not None and self.slots.width not in self.graphs:
            try:
                self.graphs[self.slots.width] = self._capture()
            except RuntimeError as error:
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                log.warning("generating without CUDA graphs, which is slower: %s", reason)
                self.graphs = None
        if self.graphs is None:
            self._step()
        else:
            self.graphs[self.slots.width].replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """A graph of one step, checked against a step that runs as usual; the buffers are as before.

        Both write the same keys and values to the same places, so the cache needs no restoring.

        Raises:
            RuntimeError: a part of the model waits for the device, or the graph computes something else.
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
            with torch.cuda.stream(side):  # libraries set up what they must not while a graph is captured
                expected = self._step().clone()
            torch.cuda.current_stream().wait_stream(side)
            restore()
            with torch.cuda.graph(graph, pool=others[0].pool() if others else None):  # never two at a time
                logits = self._step()
            graph.replay()
            rounding = 8 * torch.finfo(expected.dtype).eps * expected.abs().max()
            if not (logits - expected).abs().max() <= rounding:
                raise RuntimeError("a captured step gives other logits")
        finally:
            restore()
        return graph
