"""A key-value cache of fixed shape with a slot per answer. When an answer has ended, the next prompt gets its slot."""

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from fcsd.models.rope import rope_border


class Slots:
    """The state that all layers of the cache share.

    Attributes:
        count: the number of slots.
        length: the number of tokens that a slot holds.
        positions: the position of each slot's next token, ``[count]``.
        width: how many tokens of every slot attention reads while decoding; at least all positions in use.
        filling: the slots into which a prefill writes its prompts, ``[prompts]``; None while decoding.
    """

    def __init__(self, count: int, length: int, device: torch.device) -> None:
        self.count = count
        self.length = length
        self.positions = torch.zeros(count, dtype=torch.long, device=device)
        self.width = length
        self.filling: torch.Tensor | None = None

    def cache(self, layers: int) -> Cache:
        """A cache for a model of this many layers."""
        return Cache(layers=[SlotLayer(self) for _ in range(layers)])

    def masks(self, config: Any, dtype: torch.dtype) -> torch.Tensor | dict[str, torch.Tensor]:
        """The masks of a decoding step, in the form in which transformers' model takes them.

        They are made from the positions on the device, so that a captured step makes them again.

        Args:
            config: the config of the language model.
            dtype: of the masks.

        Returns:
            One mask for all layers, or a mask for each type of layer if some layers have a sliding window.
        """
        window = getattr(config, "sliding_window", None) or None  # some configs have 0 for no window
        types = getattr(config, "layer_types", None)
        if types and "sliding_attention" in types:
            return {"full_attention": self.mask(dtype), "sliding_attention": self.mask(dtype, window)}
        return self.mask(dtype, None if types else window)

    def mask(self, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
        """The additive attention mask ``[count, 1, 1, width]`` of the next token of every slot.

        Args:
            window: how many of the last tokens, the next one among them, attention reads; None for all.
        """
        places = torch.arange(self.width, device=self.positions.device)
        seen = places <= self.positions[:, None]
        if window is not None:
            seen &= places > self.positions[:, None] - window
        hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=self.positions.device)
        return torch.where(seen, torch.zeros_like(hidden), hidden)[:, None, None]


class SlotLayer(CacheLayerMixin):
    """Keys and values ``[slots, heads, length, head size]`` of one layer.

    A prefill of right-padded prompts writes whole prompts, and attention reads these prompts only. The keys and values
    of padding are overwritten before attention reads them. Decoding writes one token per slot. Layers with Desync
    wiring have ``ranks * batch`` rows, one rank after the other.
    """

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        rows = self._slots.count * self._ranks(key_states)
        self.keys, self.values = (
            new.new_zeros(rows, new.shape[1], self._slots.length, new.shape[3]) for new in (key_states, value_states)
        )
        self._rows = torch.arange(rows, device=self.keys.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        slots, ranks = self._slots, self._ranks(key_states)
        if slots.filling is not None:
            rows = torch.cat([slots.filling + rank * slots.count for rank in range(ranks)])
            for store, new in ((self.keys, key_states), (self.values, value_states)):
                store[rows, :, : new.shape[2]] = new
            return key_states, value_states
        at = slots.positions.repeat(ranks)
        for store, new in ((self.keys, key_states), (self.values, value_states)):
            store[self._rows, :, at] = new[:, :, 0]
        return self.keys[:, :, : slots.width], self.values[:, :, : slots.width]

    def _ranks(self, states: torch.Tensor) -> int:
        return states.shape[0] // (self._slots.count if self._slots.filling is None else len(self._slots.filling))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # for a prefill; decoding passes a mask of its own

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._slots.length


def why_no_slots(model: PreTrainedModel, length: int) -> str | None:
    """The reason why a model cannot decode ``length`` tokens in slots; None if it can."""
    if model.config._attn_implementation not in ("sdpa", "eager"):
        return f"its attention is {model.config._attn_implementation}"
    if len({parameter.device for parameter in model.parameters()}) > 1:
        return "it is spread over several devices"
    config: Any = model.config.get_text_config()
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    # Some layers of Llama-4 scale their queries by the position, from this one on. A step in slots does not tell them.
    if getattr(config, "attn_temperature_tuning", False) and length >= config.floor_scale:
        return f"layers scale queries by their position from token {config.floor_scale} on, and {length} are needed"
    border = rope_border(model.config)
    if border is not None and border.beyond(length):
        return f"rotary factors change beyond {border.positions} tokens, and {length} are needed"
    for layer in DynamicCache(config=model.config).layers:
        if isinstance(layer, DynamicSlidingWindowLayer):
            if chunked and layer.sliding_window < length:
                return f"a layer attends to chunks of {layer.sliding_window} tokens, and {length} are needed"
        elif type(layer) is not DynamicLayer:
            return f"a layer keeps a {type(layer).__name__}"
    return None
