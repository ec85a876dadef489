"""The only table of recipe keys that were renamed or moved: a recipe with an old key is refused with the new name."""

import re
from collections.abc import Mapping

NEW_NAME: Mapping[str, str] = {"parallel.wire": "parallel.quantised"}
"""The new dotted key by the old one. A row for a section stands for all keys in it."""

_STAGE = re.compile(r"sweep\.stages\.\d+\.")


def renames(raw: object, key: str = "") -> dict[str, str]:
    """Map every old dotted key of an unvalidated recipe to today's key, in the recipe's order.

    The keys of a sweep's stage are dotted keys too: with the row `train.lr` → `optim.lr`, `sweep.stages.0.train.lr`
    becomes `sweep.stages.0.optim.lr`.
    """
    stage = _STAGE.match(key)
    prefix = stage.group() if stage else ""
    own = key.removeprefix(prefix)
    old = next((old for old in NEW_NAME if own == old or own.startswith(f"{old}.")), None)
    if old is not None:
        return {key: prefix + NEW_NAME[old] + own.removeprefix(old)}
    if isinstance(raw, list):
        raw = {str(number): item for number, item in enumerate(raw)}
    items = raw.items() if isinstance(raw, dict) else ()
    return {k: v for name, item in items for k, v in renames(item, f"{key}.{name}" if key else name).items()}
