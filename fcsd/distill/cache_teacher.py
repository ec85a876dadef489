"""``fcsd cache-teacher``: run the teacher once over the rows of a recipe, and keep what it says of them."""

import logging
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from fcsd.config import Recipe, ResolvedRecipe, TeacherCache
from fcsd.distill import run_dir, teacher_cache
from fcsd.distill.corpus import load_tokenizer
from fcsd.distill.data import Mixture, batch
from fcsd.distill.engine import DTYPES
from fcsd.distill.losses import IGNORE
from fcsd.distill.student import student_source
from fcsd.distill.targets import Teacher
from fcsd.distill.teacher import (
    expect_fingerprint,
    final_hidden,
    identify_teacher,
    load_teacher,
    output_head,
    teacher_name,
)
from fcsd.distill.teacher_cache import Shard, cached_teacher, row_digest
from fcsd.distill.top_k import TopK, top_k
from fcsd.errors import ConfigError, NonFiniteError
from fcsd.launch import World, join_world

log = logging.getLogger(__name__)

_SHARD_BYTES = 256 << 20


def cache_teacher(resolved: ResolvedRecipe, *, shard_bytes: int = _SHARD_BYTES) -> Path:
    """Writes the cache that ``objective.teacher_cache`` names, or the rest of one; every process calls it.

    Returns: its directory.

    Raises:
        ConfigError: the recipe names no cache, or more words than the vocabulary has.
        BadInputError: the directory holds the cache of another teacher or text.
        NonFiniteError: the teacher gives NaN or infinity for a row.
    """
    recipe = resolved.recipe
    settings = recipe.objective.teacher_cache
    if settings is None:
        raise ConfigError("the recipe names no teacher cache", hint="set objective.teacher_cache.path")
    folder = Path(settings.path)
    world = join_world()
    with ExitStack() as held:
        if world.rank or not sys.stderr.isatty():
            datasets.disable_progress_bars()
            transformers.utils.logging.disable_progress_bar()
        world.on_first(lambda: held.enter_context(run_dir.claim(folder)))
        _write(recipe, settings, folder, world, shard_bytes)
    return folder


def read_teacher_cache(
    recipe: Recipe, settings: TeacherCache, identity: dict[str, object], vocab_size: int, world: World
) -> tuple[Teacher, dict[str, Any]]:
    """The targets of a run from its cache, and the hashes of the teacher that wrote it.

    Args:
        identity: what the run depends on; the data's part must be the cache's.

    Raises:
        BadInputError: there is none, or it is of another teacher or text; the message names what differs.
    """
    folder = Path(settings.path)
    recorded = teacher_cache.read_key(folder)
    teacher = {name: sha for name, sha in recorded.items() if name.startswith("teacher.")}
    if Path(teacher_name(recipe)).is_dir():
        teacher = identify_teacher(recipe)
    else:
        expect_fingerprint(recipe, teacher["teacher.fingerprint"], f"the teacher of {folder}")
    teacher_cache.expect_key(folder, cache_key(recipe, settings, identity, teacher, vocab_size))
    return cached_teacher(folder, _rows_needed(recipe), world.device), teacher


def cache_key(
    recipe: Recipe, settings: TeacherCache, identity: dict[str, object], teacher: dict[str, str], vocab_size: int
) -> dict[str, Any]:
    """What the teacher's words about the rows depend on, flat."""
    data = {key: value for key, value in identity.items() if key.startswith("data.") or key == "seed"}
    own = {
        "objective.temperature": recipe.objective.temperature,
        "objective.teacher_cache.top_k": settings.top_k,
        "train.dtype": recipe.train.dtype,
        "vocabulary": vocab_size,
    }
    return {**data, **own, **teacher}


def _rows_needed(recipe: Recipe) -> int:
    return recipe.train.steps * (recipe.train.batch_tokens // recipe.data.seq_len)


def _write(recipe: Recipe, settings: TeacherCache, folder: Path, world: World, shard_bytes: int) -> None:
    from fcsd.distill.loop import read_data, run_identity

    hashes = world.on_first(lambda: identify_teacher(recipe))
    model = load_teacher(teacher_name(recipe), dtype=DTYPES[recipe.train.dtype], device=world.device)
    vocab_size = len(output_head(model))
    if settings.top_k > vocab_size:
        raise ConfigError(f"objective.teacher_cache.top_k is {settings.top_k}, the vocabulary has {vocab_size} words")
    corpora, rows, _ = read_data(recipe, load_tokenizer(student_source(recipe).path), vocab_size, world)
    key = cache_key(recipe, settings, run_identity(recipe, corpora, world), hashes, vocab_size)
    shards = teacher_cache.plan(_rows_needed(recipe), recipe.data.seq_len, settings.top_k, shard_bytes)
    missing = world.on_first(lambda: teacher_cache.begin(folder, key, shards))
    if world.rank == 0:
        log.info("%s: %d of %d shards to write", folder, len(missing), len(shards))
    for first in range(0, len(missing), world.size):
        # All ranks run the model equally often, as an expert-parallel one must be.
        together = missing[first : first + world.size]
        longest = max(len(shard.rows) for shard in together)
        own = together[world.rank] if world.rank < len(together) else None
        _write_shard(model, rows, recipe, settings, folder, own, longest, world)
    world.on_first(lambda: teacher_cache.finish(folder, shards))


def _write_shard(
    model: PreTrainedModel,
    rows: Mixture,
    recipe: Recipe,
    settings: TeacherCache,
    folder: Path,
    shard: Shard | None,
    longest: int,
    world: World,
) -> None:
    """Runs the model over ``longest`` rows; those of ``shard`` are kept."""
    numbers = [] if shard is None else list(shard.rows)
    digests: list[bytes] = []
    counts: list[int] = []
    kept: list[TopK] = []
    for first in range(0, longest, recipe.train.micro_batch_size):
        own = numbers[first : first + recipe.train.micro_batch_size]
        micro = {name: tensor.to(world.device) for name, tensor in batch(rows, own or [0]).items()}
        told = _told(model, micro, recipe, settings)
        if own:
            digests += [row_digest(micro, at) for at in range(len(own))]
            counts += (micro["labels"] != IGNORE).sum(1).tolist()
            kept.append(TopK(*(column.cpu() for column in told)))

    def commit() -> None:
        if shard is None:
            return
        whole = TopK(*(torch.cat(column) for column in zip(*kept, strict=True)))
        if whole.log_probs.isnan().any():
            raise NonFiniteError(f"the teacher gives NaN for rows {shard.rows.start} to {shard.rows.stop}")
        teacher_cache.write_shard(folder, shard, digests, counts, whole)

    world.everywhere(commit)


@torch.no_grad()
def _told(model: PreTrainedModel, micro: dict[str, Tensor], recipe: Recipe, settings: TeacherCache) -> TopK:
    """What the model says of the positions that count."""
    hidden = final_hidden(model, micro)[micro["labels"] != IGNORE]
    objective = recipe.objective
    return top_k(
        hidden,
        output_head(model),
        settings.top_k,
        temperature=objective.temperature,
        chunk_tokens=objective.chunk_tokens,
    )
