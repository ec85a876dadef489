"""Says of a config whether the rotary factors of a pass depend on its length, which its sequences then share.

transformers chooses one set of factors for a whole pass, by its largest position: longrope has a set for passes up to
its border and another one beyond it, and dynamic NTK has factors of their own for every length beyond its border, which
also depend on the passes before. So no pass may hold sequences of both sides of a border.
"""

from dataclasses import dataclass
from typing import Any

from fcsd.errors import ConfigError


@dataclass(frozen=True)
class RopeBorder:
    """Where the rotary factors of a model change.

    Attributes:
        kind: the rope type, as config.json has it.
        positions: the most tokens of a sequence with the factors of short ones.
        exact: whether the factors beyond the border differ from length to length, so that tokens in a cache have others
            than those which follow them.
    """

    kind: str
    positions: int
    exact: bool

    def beyond(self, tokens: int) -> bool:
        """Whether a sequence of so many tokens is beyond the border."""
        return tokens > self.positions

    def require_computable(self, tokens: int) -> None:
        """Refuse sequences with which a pass would not compute what each of them gives alone.

        Raises:
            ConfigError: the factors differ from length to length, and a sequence of ``tokens`` is beyond the border.
        """
        if self.exact and self.beyond(tokens):
            raise ConfigError(
                f"rope type {self.kind}: its rotary factors change with every token beyond {self.positions}, "
                f"and {tokens} are needed",
                f"Use at most {self.positions} tokens, of the prompt and the answer together.",
            )


def rope_border(config: Any) -> RopeBorder | None:
    """The border of a model by its config; None if its rotary factors do not depend on the length of a pass.

    Several types of layers may have factors of their own: the first border is that of the model, and if there are
    several, what is beyond the first counts as ``exact``.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    ropes = getattr(text, "rope_parameters", None) or {}
    if "rope_type" not in ropes:
        ropes = {name: rope for name, rope in ropes.items() if isinstance(rope, dict)}
    found = [_border(text, rope) for rope in (ropes.values() if "rope_type" not in ropes else [ropes])]
    borders = {border for border in found if border is not None}
    if not borders:
        return None
    first = min(borders, key=lambda border: border.positions)
    return RopeBorder(first.kind, first.positions, len(borders) > 1 or first.exact)


def _border(text: Any, rope: dict[str, Any]) -> RopeBorder | None:
    kind = str(rope.get("rope_type") or "default")
    if "dynamic" in kind:
        # HunYuan calls factors dynamic that its alpha fixes.
        return None if rope.get("alpha") else RopeBorder(kind, text.max_position_embeddings, exact=True)
    # Phi-3.5-MoE scales by the length of a pass whatever its type is, if it is not the default one.
    if kind == "longrope" or (kind != "default" and "long_mscale" in rope):
        first = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
        return RopeBorder(kind, first or text.max_position_embeddings, exact=False)
    return None


def require_short_rows(config: Any, seq_len: int, model: str) -> None:
    """Refuse packed rows that are longer than the model's positions, or give short documents the factors of long ones.

    Args:
        model: names the model in the message.

    Raises:
        ConfigError: ``seq_len`` is beyond the positions or the border of the model.
    """
    border = rope_border(config)
    if border is not None and border.beyond(seq_len):
        raise ConfigError(
            f"{model}: its rotary factors (rope type {border.kind}) change beyond {border.positions} tokens, and "
            f"data.seq_len is {seq_len}: the short documents of a row would get those of long ones",
            f"Set data.seq_len to at most {border.positions}.",
        )
    most = getattr(config.get_text_config(), "max_position_embeddings", None)
    if most is not None and seq_len > most:
        raise ConfigError(
            f"{model}: it has {most} positions (max_position_embeddings), and data.seq_len is {seq_len}",
            f"Set data.seq_len to at most {most}.",
        )
