"""The only table of recipe keys that have been renamed or moved to another section.

`fcsd.config.resolve` uses it to refuse an old key with a message that names the new one. `fcsd recipes migrate` uses it
to rewrite files. `fcsd.distill.identity` uses it to compare the checkpoints of old runs.
"""

import re
from collections.abc import Mapping
from typing import Any

NEW_NAME = {
    "train.lr": "optim.lr",
    "train.min_lr": "optim.min_lr",
    "train.horizon": "optim.horizon",
    "train.warmup_steps": "optim.warmup_steps",
    "train.schedule": "optim.schedule",
    "train.weight_decay": "optim.weight_decay",
    "train.betas": "optim.betas",
    "train.grad_clip": "optim.grad_clip",
    "train.zero_stage": "parallel.zero_stage",
    "train.expert_parallel": "parallel.ep_size",
    "train.overlap": "parallel.overlap",
    "train.transport": "parallel.transport",
    "train.fused": "parallel.fused",
    "train.teacher_placement": "parallel.teacher_placement",
    "train.save_every": "checkpoint.every_steps",
    "train.keep": "checkpoint.keep",
    "train.nonfinite.skip": "faults.nonfinite_skip",
    "train.save_failures": "faults.save_failures",
    "train.stuck_seconds": "faults.stuck_seconds",
    "train.grace_seconds": "faults.grace_seconds",
}
"""New dotted key by old dotted key."""

_STAGE = re.compile(r"sweep\.stages\.\d+\.")


def renames(raw: object, key: str = "") -> dict[str, str]:
    """Map every old dotted key of an unvalidated recipe to today's key, in the recipe's order.

    The keys of a sweep's stage are dotted keys too: `sweep.stages.0.train.lr` becomes `sweep.stages.0.optim.lr`.
    """
    stage = _STAGE.match(key)
    prefix = stage.group() if stage else ""
    new = NEW_NAME.get(key.removeprefix(prefix))
    if new is not None:
        return {key: prefix + new}
    if isinstance(raw, list):
        raw = {str(number): item for number, item in enumerate(raw)}
    items = raw.items() if isinstance(raw, dict) else ()
    return {k: v for name, item in items for k, v in renames(item, f"{key}.{name}" if key else name).items()}


def translated(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A flat mapping of dotted keys, list items included (`train.betas.0`), with every key under today's name."""
    result = {}
    for key, value in flat.items():
        old = next((old for old in NEW_NAME if key == old or key.startswith(f"{old}.")), None)
        result[NEW_NAME[old] + key.removeprefix(old) if old else key] = value
    return result
