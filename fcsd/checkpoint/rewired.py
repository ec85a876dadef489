"""Reads the rewiring that a checkpoint already has: fcsd writes an ``fcsd`` block, AMD's models ``farskip*`` keys."""

from pathlib import Path
from typing import Any

from fcsd.checkpoint.files import quoted, shown
from fcsd.checkpoint.location import recorded_original
from fcsd.errors import BadInputError
from fcsd.models.config_keys import PREFIX
from fcsd.models.selection import layers_text
from fcsd.models.wiring_block import Wiring

_AMD_FLAGS = ("farskip", "attn_only_farskip", "mlp_only_farskip")
AMD_CLASS = "InstellaMoEForCausalLM"  # whose file was read: what it computes, fcsd's class computes
AMD_KEYS = (*_AMD_FLAGS, "farskip_start_idx", "farskip_end_idx")
GATED_ATTENTION = (
    "its attention is gated (self_attn.gate_proj), which no class of transformers that fcsd uses has; nearest is "
    "deepseek_v3, whose layers are the same otherwise"
)


def read_rewiring(raw: dict[str, Any], model_type: str, where: str | Path) -> dict[str, Any] | None:
    """The model's rewiring; None if the model has the standard wiring.

    In AMD's code the two ``*_only`` flags have no effect without ``farskip``, and both together cancel it. In both
    cases the model has the standard wiring.

    Returns:
        ``{"by": "fcsd", **block}``, or ``{"by": "amd", "wiring": "farskip", "variant", "start", "end"}``, with the
        first layer and the end of the range as AMD's keys give them (the end may be past the last layer).

    Raises:
        BadInputError: a block or key that is unknown, malformed, or does not belong to the model type.
    """
    block = raw.get("fcsd")
    if block is None and not model_type.startswith(PREFIX):
        return _amd(raw, where)
    if not isinstance(block, dict) or not model_type.startswith(PREFIX):
        raise BadInputError(f"{where}: model_type {quoted(model_type)} and its fcsd block do not belong together")
    try:
        Wiring.from_block(block)
    except (ValueError, TypeError, KeyError) as error:
        raise BadInputError(f"{where}: {error}", "Update fcsd, or convert the base model again.") from None
    return {"by": "fcsd", **block}


def describe(rewiring: dict[str, Any]) -> str:
    """The rewiring in a few words, for example ``farskip (attn-only), layers 0-26, by AMD``."""
    variant = f" ({rewiring['variant']})" if rewiring["variant"] != "full" else ""
    if rewiring["by"] == "amd":
        return f"farskip{variant}, layers from {rewiring['start']} up to {rewiring['end']}, by AMD"
    kept = f" (reduce {rewiring['reduce']})" if "reduce" in rewiring else ""
    return f"{rewiring['wiring']}{variant}{kept}, layers {layers_text(rewiring['layers'])}, by fcsd"


def refuse_rewired(path: Path, rewiring: dict[str, Any] | None) -> None:
    """Check that a checkpoint is an original.

    Args:
        rewiring: see :func:`read_rewiring`.

    Raises:
        BadInputError: the checkpoint is rewired already.
    """
    if rewiring is None:
        return
    if rewiring["by"] != "fcsd":
        raise BadInputError(
            f"{path}: is rewired already, by AMD's farskip keys",
            "Only an original can be rewired, and this model has none; `fcsd convert` takes Instella-MoE as it is.",
        )
    original = shown(recorded_original(path, rewiring) or "it is not recorded")
    raise BadInputError(f"{path}: is converted already", f"Convert its original instead: {original}")


def has_gated_attention(raw: dict[str, Any]) -> bool:
    """Whether config.json describes AMD's Instella-MoE with gated attention; see ``GATED_ATTENTION``."""
    return raw.get("model_type") == "instella_moe" or raw.get("gated_attention") is True


def _amd(raw: dict[str, Any], where: str | Path) -> dict[str, Any] | None:
    flags = {key: raw.get(key) or False for key in _AMD_FLAGS}
    start, end = raw.get("farskip_start_idx", 0), raw.get("farskip_end_idx", 10_000)
    if not all(type(flag) is bool for flag in flags.values()) or {type(start), type(end)} - {int, float}:
        raise BadInputError(f"{where}: the farskip keys do not hold flags and layer numbers")
    attn_only, mlp_only = flags["attn_only_farskip"], flags["mlp_only_farskip"]
    if not flags["farskip"] or (attn_only and mlp_only):
        return None
    variant = "attn-only" if attn_only else "mlp-only" if mlp_only else "full"
    return {"by": "amd", "wiring": "farskip", "variant": variant, "start": int(start), "end": int(end)}
