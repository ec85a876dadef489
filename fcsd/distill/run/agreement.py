"""Ranks that were started with different recipes, data or checkpoints end before the first step instead of hanging."""

from typing import Any

from fcsd.errors import ConfigError
from fcsd.launch.world import World


def require_agreement(world: World, facts: dict[str, Any]) -> None:
    """Compares ``facts`` over all ranks.

    Raises:
        ConfigError: they differ; the message names the first difference and the rank.
    """
    everyone = world.everywhere(lambda: facts)
    for rank, others in enumerate(everyone):
        for key in sorted(others.keys() | everyone[0].keys()):
            here, there = everyone[0].get(key, "nothing"), others.get(key, "nothing")
            if here != there:
                raise ConfigError(
                    f"the processes disagree: {key} is {here!r} on rank 0 and {there!r} on rank {rank}",
                    hint="every node needs the same command, recipe, model and data",
                )
