"""The wiring of a model as data: its name, layers and options, as the ``fcsd`` block of ``config.json`` holds them.

This file needs the standard library only, so that a block can be read without importing torch. It is
shipped verbatim in exported checkpoints.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

VERSION = 1
# Maps a name to the depth at which (attention, MLP) read; 1 means that the last output may be in flight.
READS = {"standard": (0, 0), "farskip": (1, 1), "ladder": (1, 1), "parallel": (0, 1)}
# Maps a name to the ``reduce`` of ``kept_reductions``; it is empty if the field ``Wiring.reduce`` holds it.
DESYNC = {"desync": "", "desync-2x": "2x", "desync-4x": "4x"}
NAMES = (*READS, *DESYNC)
VARIANTS = {"full": (1, 1), "attn-only": (1, 0), "mlp-only": (0, 1)}
HAVE_VARIANTS = ("farskip", "ladder")
# Maps each wiring whose attention can read a partial stream to the default of ``border``. The published code is not
# consistent for farskip: AMD's training code and the paper read the full stream at a border, and AMD's transformers
# file reads a partial one.
BORDERS = {"farskip": "full", "ladder": "partial"}
ORIGIN = ("base_model", "base_revision", "base_sha256")
# A layer in a pattern -> whether the reductions after its (attention, MLP) are kept.
_KEEPS = {"-": (False, False), "a": (True, False), "m": (False, True), "am": (True, True)}


@dataclass(frozen=True)
class Wiring:
    """One residual wiring of one model, as exported in ``config.json`` under ``fcsd``.

    Args:
        name: one of ``NAMES``. Sources: FarSkip §3 eq. 8, Ladder eq. 2 and §5; ``parallel`` reads as in PaLM.
        layers: 0-based indices of the converted layers.
        variant: under ``attn-only`` or ``mlp-only`` the other sub-block reads the full stream.
        border: what the attention of a converted layer reads if the layer before it is not converted: the ``full``
            stream, or the ``partial`` stream, which lacks what the MLP of that layer has in flight. The default is in
            ``BORDERS``. Under ``mlp-only`` it has no effect, because the attention reads the full stream.
        distance: how many sub-block outputs may be in flight at a rewired read.
        tp_degree: the number of simulated tensor-parallel ranks; 1 for every wiring but Desync.
        reduce: which reductions the wiring ``desync`` keeps, see ``kept_reductions``; empty for all others.

    Raises:
        ValueError: a field is unknown, out of range, or does not go with the others.
    """

    name: str
    layers: tuple[int, ...]
    variant: str = "full"
    border: str = ""
    distance: int = 1
    tp_degree: int = 1
    reduce: str = ""

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"unknown wiring {self.name!r}; one of {', '.join(NAMES)}")
        if self.variant not in VARIANTS or (self.variant != "full" and self.name not in HAVE_VARIANTS):
            known = VARIANTS if self.name in HAVE_VARIANTS else ("full",)
            raise ValueError(f"wiring {self.name} has no variant {self.variant!r}; one of {', '.join(known)}")
        if not self.border:
            object.__setattr__(self, "border", BORDERS.get(self.name, "full"))
        if self.border not in ("full", "partial"):
            raise ValueError(f"border is 'full' or 'partial', not {self.border!r}")
        if self.border == "partial" and self.name not in BORDERS:
            raise ValueError(f"wiring {self.name} has no partial border: its attention reads the full stream there")
        if self.distance < 1 or (self.distance > 1 and self.name not in HAVE_VARIANTS):
            raise ValueError(f"wiring {self.name} has no distance {self.distance}: use 1")
        if (self.name in DESYNC) != (self.tp_degree > 1):
            rule = "needs a tp_degree of 2 or more" if self.name in DESYNC else "has no tp_degree: only desync has one"
            raise ValueError(f"wiring {self.name} {rule}")
        if self.reduce and self.name != "desync":
            raise ValueError(f"wiring {self.name} has no reduce: only desync has one")
        if list(self.layers) != sorted(set(self.layers)) or any(i < 0 for i in self.layers):
            raise ValueError(f"layers must be ascending, distinct and not negative, not {list(self.layers)}")
        if self.name in DESYNC:
            kept_reductions(self.layers, self.kept)

    @property
    def kept(self) -> str:
        """Which reductions of a Desync wiring are kept, as ``kept_reductions`` reads it."""
        return DESYNC[self.name] or self.reduce

    @property
    def reads(self) -> tuple[int, int]:
        """The depths at which the attention and the MLP of a converted layer read."""
        attn, mlp = READS[self.name]
        attn_varies, mlp_varies = VARIANTS[self.variant]
        return attn * attn_varies * self.distance, mlp * mlp_varies * self.distance

    def to_block(self, **origin: str | None) -> dict[str, Any]:
        """The ``fcsd`` block of ``config.json``; ``origin`` holds the keys of ``ORIGIN``.

        The key ``reduce`` is written for the wiring ``desync`` alone.
        """
        return {
            "version": VERSION,
            "wiring": self.name,
            "variant": self.variant,
            "layers": list(self.layers),
            "border": self.border,
            "tp_degree": self.tp_degree,
            "distance": self.distance,
            **({"reduce": self.reduce} if self.reduce else {}),
            **{key: origin.get(key) for key in ORIGIN},
        }

    @classmethod
    def from_block(cls, block: dict[str, Any]) -> "Wiring":
        """Read an ``fcsd`` block of ``config.json``.

        Raises:
            ValueError: the version or a key is unknown, a key is missing, or a value does not fit.
        """
        if not isinstance(block, dict):
            raise ValueError("config.json has no fcsd block")
        if block.get("version") != VERSION:
            raise ValueError(f"fcsd block version {block.get('version')!r}; this code reads {VERSION}")
        fields = {k: v for k, v in block.items() if k not in ("version", *ORIGIN)}
        expected = {"wiring", "variant", "layers", "border", "tp_degree", "distance"}
        if fields.get("wiring") == "desync":
            expected.add("reduce")
        if set(fields) != expected:
            raise ValueError(f"fcsd block keys differ: {', '.join(sorted(set(fields) ^ expected))}")
        integers = [fields["tp_degree"], fields["distance"], *fields["layers"]]
        if any(type(value) is not int for value in integers):
            raise ValueError("fcsd block: layers, tp_degree and distance are integers")
        if not isinstance(fields.get("reduce", ""), str):
            raise ValueError("fcsd block: reduce is text")
        return cls(fields.pop("wiring"), tuple(fields.pop("layers")), **fields)


@dataclass(frozen=True)
class Blocks:
    """Names of a decoder layer's children in one architecture of transformers, and how it computes its MoE.

    Attributes:
        mlp: the MLP or MoE block of the layer.
        router: the router, inside the MoE block like the next two.
        shared: the shared experts; None if there are none.
        shared_beside: whether the shared experts are a child of the layer beside the MoE block. A layer whose MoE block
            is None has them as its MLP.
        shared_gate: the gate whose sigmoid multiplies the shared experts' output; None if there is none.
        flattens: whether the MoE block flattens its input once for all its children.
        router_unflattened: whether the router of a block that ``flattens`` gets the input as it is.
        prescaled: whether the router's scores multiply the experts' inputs (llama4) instead of their outputs.
        shared_first: whether the shared experts are computed before the router. A block with a ``shared_gate`` does so.
        router_bias: the tensor of the MoE block that its router gets as an argument; None if the router has its own.
        routed_scale: the number of the MoE block by which it multiplies the routed experts' output before it adds that
            of the shared experts; None if there is none.
        dropouts: the layer's dropouts of the outputs of attention and MLP, before they are added to the stream.
        linear: the linear attention of a layer that has it in place of ``self_attn``; None if no layer has.
        attn_norms: the norm of what the attention reads, and the norm of its output on arrival; None for a norm that
            the layer does not have. A norm on arrival needs the whole output: what tensor-parallel ranks have summed,
            and for a MoE the routed and the shared experts' together.
        mlp_norms: the same for the MLP or MoE block.
        passes: the argument in which a layer's attention gets what that of the layer before it returned last; None if
            there is none. The layer returns it beside its output.
        multiplier: the attribute of the layer by which it multiplies every output before it is added to the stream;
            None if there is none.
        beside: for layers whose router and experts stand beside a dense MLP, as children of the layer: the norms of
            what the experts read, of the MLP's output and of the experts' output. The router reads the stream itself.
            The MLP counts as shared experts. None if the experts of every layer are inside its MLP.
        inputs: for layers that add features of each token to the stream behind the MLP: the gate, which reads the
            stream, the projection, and the norm of what it returns. None if no layer does.
        scale: the attribute of the layer by which it multiplies the stream that it passes on; None if there is none.
        cuts: whether transformers' loop may cut tokens off the stream between two layers.
        gated: the field of the config that says that attentions are gated, see ``GatedAttention``; None if the family
            has none. transformers' own class does not read it.
    """

    mlp: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    shared_beside: bool = False
    shared_gate: str | None = None
    flattens: bool = False
    router_unflattened: bool = False
    prescaled: bool = False
    shared_first: bool = False
    router_bias: str | None = None
    routed_scale: str | None = None
    dropouts: tuple[str, str] | None = None
    linear: str | None = None
    attn_norms: tuple[str | None, str | None] = ("input_layernorm", None)
    mlp_norms: tuple[str | None, str | None] = ("post_attention_layernorm", None)
    passes: str | None = None
    multiplier: str | None = None
    beside: tuple[str, str, str] | None = None
    inputs: tuple[str, str, str] | None = None
    scale: str | None = None
    cuts: bool = False
    gated: str | None = None

    @property
    def normed(self) -> bool:
        """Whether outputs are normed on arrival. Parts of an output that arrive apart cannot be added apart then."""
        return self.attn_norms[1] is not None or self.mlp_norms[1] is not None

    def read(self, layer: Any, by: Literal["attn", "mlp"], x: Any) -> Any:
        """What a sub-block of a layer computes from, if it reads the stream ``x``; tensors ``[batch, seq, hidden]``.

        It is the stream itself for experts beside an MLP: the MLP, the router and the experts read it through norms of
        their own.
        """
        if by == "mlp" and self.has_beside(layer):
            return x
        return _normed(layer, self._norms(by)[0], x)

    def has_beside(self, layer: Any) -> bool:
        """Whether a layer has experts beside its MLP."""
        return self.beside is not None and hasattr(layer, "experts")

    def sparse(self, layer: Any) -> Any:
        """The module whose children the router and the experts of a layer are: the layer itself, or its MLP."""
        return layer if self.has_beside(layer) else layer.get_submodule(self.mlp)

    def arrive(self, layer: Any, by: Literal["attn", "mlp"], output: Any) -> Any:
        """What is added to the stream for an output of a sub-block that has arrived; tensors ``[batch, seq, hidden]``.

        The output must be whole if ``normed``. Otherwise it may be any part of the output.
        """
        output = _normed(layer, self._norms(by)[1], output)
        return output if self.multiplier is None else output * getattr(layer, self.multiplier)

    def _norms(self, by: Literal["attn", "mlp"]) -> tuple[str | None, str | None]:
        return self.attn_norms if by == "attn" else self.mlp_norms

    def leave(self, layer: Any, streams: Sequence[Any], given: Any = None) -> list[Any]:
        """The streams ``[batch, seq, hidden]`` that a layer passes on, after all its outputs were added to them.

        What a layer makes of a token's own features is added to all streams at once, because it is not communicated.
        It is computed from the last stream, which the next attention reads, so it awaits no output that this read
        does not await.

        Args:
            given: the features of the tokens for this layer ``[batch, seq, width]``; None if it has none.
        """
        if self.inputs is not None and given is not None:
            gate, projection, norm = (getattr(layer, name) for name in self.inputs)
            added = norm(projection(layer.act_fn(gate(streams[-1])) * given))
            streams = [x + added for x in streams]
        return [x if self.scale is None else x * getattr(layer, self.scale) for x in streams]


def _normed(layer: Any, name: str | None, x: Any) -> Any:
    """``x`` through a norm. A name with a dot is that of a norm inside the MoE block, which a dense MLP lacks."""
    if name is None:
        return x
    inside, _, last = name.rpartition(".")
    norm = getattr(getattr(layer, inside), last, None) if inside else getattr(layer, name)
    return x if norm is None else norm(x)


def kept_reductions(layers: Sequence[int], reduce: str) -> dict[int, tuple[bool, bool]]:
    """For each converted layer, whether the reductions after its attention and its MLP are kept.

    ``reduce`` is applied to each unbroken run of converted layers, beginning at the first layer of the run. The last
    reduction of a run is always kept, so that the layer after the run, or the final norm, reads one stream.

    Args:
        layers: the 0-based indices of the converted layers, ascending.
        reduce: ``Nx`` keeps the last of every N reductions (Ladder §5 has 2x and 4x); ``last`` keeps only the last
            reduction of a run. A pattern such as ``-,m`` has one item for each layer, and is repeated when it ends:
            ``a`` keeps the reduction after the attention, ``m`` keeps the reduction after the MLP, ``am`` keeps both,
            and ``-`` keeps none.

    Raises:
        ValueError: ``reduce`` has none of these forms, or a pattern is longer than every run.
    """
    runs: list[list[int]] = []
    for i in layers:
        if not runs or runs[-1][-1] != i - 1:
            runs.append([])
        runs[-1].append(i)
    longest = max(map(len, runs), default=0)
    pattern = _pattern(reduce, longest)
    if runs and len(pattern) > longest:
        raise ValueError(f"reduce {reduce!r} has {len(pattern)} layers; the longest run of converted layers, {longest}")
    keeps = {}
    for run in runs:
        keeps |= {i: pattern[position % len(pattern)] for position, i in enumerate(run)}
        keeps[run[-1]] = (keeps[run[-1]][0], True)
    return keeps


def _pattern(reduce: str, longest: int) -> list[tuple[bool, bool]]:
    """Which reductions ``reduce`` keeps in each layer, as a list that is repeated within a run.

    Args:
        reduce: see ``kept_reductions``.
    """
    if reduce == "last":
        return [_KEEPS["-"]]
    if match := re.fullmatch(r"([1-9][0-9]{0,3})x", reduce):
        group = int(match[1])
        if group > 1:
            return [(2 * i % group == group - 1, (2 * i + 1) % group == group - 1) for i in range(max(longest, 1))]
    items = [item.strip() for item in reduce.split(",")]
    if all(item in _KEEPS for item in items):
        return [_KEEPS[item] for item in items]
    raise ValueError(
        f"reduce is 2x, 4x or another Nx, last, or a pattern of a, m, am and - such as '-,m'; not {reduce!r}"
    )
