"""Makes recipes and identities as earlier versions wrote them, with the old names of their keys."""

import copy
from typing import Any

from fcsd.config.renamed import NEW_NAME


def recipe_before(recipe: dict[str, Any]) -> dict[str, Any]:
    """A recipe's values, as nested mappings, under the old keys. The keys of sweep stages are the old ones, too."""
    old = copy.deepcopy(recipe)
    for before, after in NEW_NAME.items():
        section, key = after.split(".")
        if key not in old.get(section, {}):
            continue
        *parents, last = before.split(".")
        inner = old
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = old[section].pop(key)
        if not old[section]:
            del old[section]
    if old.get("sweep"):
        old["sweep"]["stages"] = [flat_before(stage) for stage in old["sweep"]["stages"]]
    return old


def flat_before(flat: dict[str, Any]) -> dict[str, Any]:
    """A flat mapping of dotted keys, list items included, under the old keys."""
    names = {after: before for before, after in NEW_NAME.items()}
    result = {}
    for key, value in flat.items():
        after = next((name for name in names if f"{key}.".startswith(f"{name}.")), None)
        result[names[after] + key.removeprefix(after) if after else key] = value
    return result
