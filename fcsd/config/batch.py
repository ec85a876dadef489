"""The arithmetic of a run's steps: how a batch of tokens is divided, and how often there is a pause."""

import math

from fcsd.config.recipe import Recipe
from fcsd.errors import ConfigError


def accumulation(recipe: Recipe, world_size: int) -> int:
    """The number of micro-batches per process and optimizer step. Processes that shard a model have the same rows.

    Raises:
        ConfigError: the batch cannot be split evenly.
    """
    degree = recipe.parallel.tp_size
    together = recipe.train.micro_batch_size * recipe.data.seq_len * (world_size // degree or 1)
    if recipe.train.batch_tokens % together:
        raise ConfigError(
            f"train.batch_tokens {recipe.train.batch_tokens} is no multiple of train.micro_batch_size * "
            f"data.seq_len * processes{' / parallel.tp_size' if degree > 1 else ''} = {together}",
            hint=f"Set it to a multiple, such as {max(together, recipe.train.batch_tokens // together * together)}.",
        )
    return recipe.train.batch_tokens // together


def pauses(after: int, last: int, *every: int) -> int:
    """How many steps from ``after + 1`` to ``last`` one of ``every`` divides (0 divides none), or are the last.

    Args:
        every: at most two numbers.
    """
    some = [each for each in every if each]
    count = sum(last // each - after // each for each in some)
    if len(some) > 1:
        count -= last // math.lcm(*some) - after // math.lcm(*some)
    return count + all(last % each for each in some)
