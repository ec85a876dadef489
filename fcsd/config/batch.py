"""Divides a batch of tokens over processes and micro-batches."""

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
