"""Is a checkpoint rewired already? fcsd says so in its ``fcsd`` block, AMD in its ``farskip*`` keys."""

from pathlib import Path
from typing import Any

from fcsd.checkpoint.files import quoted
from fcsd.errors import BadInputError

PREFIX = "fcsd_"  # of a converted checkpoint's model_type
VERSION = 1
_BLOCK_KEYS = {"version", "wiring", "variant", "layers", "border", "tp_degree", "distance"}
_BLOCK_KEYS |= {"base_model", "base_revision", "base_sha256"}
_AMD_FLAGS = ("farskip", "attn_only_farskip", "mlp_only_farskip")


def read_rewiring(raw: dict[str, Any], model_type: str, where: str | Path) -> dict[str, Any] | None:
    """How the model is rewired, None if it is not.

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
    if block.get("version") != VERSION:
        found = quoted(str(block.get("version")))
        raise BadInputError(f"{where}: fcsd block of version {found}, not {VERSION}", "Update fcsd.")
    if unknown := sorted(block.keys() - _BLOCK_KEYS):
        raise BadInputError(f"{where}: unknown key {quoted(unknown[0])} in the fcsd block", "Update fcsd.")
    return {"by": "fcsd", **block}


def describe(rewiring: dict[str, Any]) -> str:
    """The rewiring in a few words: ``farskip (attn-only), layers 0-26, by AMD``."""
    variant = f" ({rewiring['variant']})" if rewiring.get("variant") else ""
    if rewiring["by"] == "amd":
        return f"farskip{variant}, layers from {rewiring['start']} up to {rewiring['end']}, by AMD"
    return f"{rewiring.get('wiring')}{variant}, layers {_ranges(rewiring.get('layers') or [])}, by fcsd"


def _amd(raw: dict[str, Any], where: str | Path) -> dict[str, Any] | None:
    flags = {key: raw.get(key) or False for key in _AMD_FLAGS}
    start, end = raw.get("farskip_start_idx", 0), raw.get("farskip_end_idx", 10_000)
    if not all(type(flag) is bool for flag in flags.values()) or {type(start), type(end)} - {int, float}:
        raise BadInputError(f"{where}: the farskip keys do not hold flags and layer numbers")
    if not any(flags.values()):
        return None
    variant = "attn-only" if flags["attn_only_farskip"] else "mlp-only" if flags["mlp_only_farskip"] else None
    return {"by": "amd", "wiring": "farskip", "variant": variant, "start": int(start), "end": int(end)}


def _ranges(layers: list[int]) -> str:
    """``0-3,7`` for ``[0, 1, 2, 3, 7]``."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "none"
