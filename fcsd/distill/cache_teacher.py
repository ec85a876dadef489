"""``fcsd cache-teacher``: runs the teacher once over the rows of a recipe and writes its top-k probabilities."""

import logging
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from fcsd.checkpoint import resolve
from fcsd.config import Recipe, ResolvedRecipe, TeacherCache
from fcsd.distill.data.corpus import load_tokenizer
from fcsd.distill.data.rows import Mixture, batch
from fcsd.distill.dtypes import DTYPES
from fcsd.distill.experts import expert_parallel
from fcsd.distill.inputs import student_source
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.loss.top_k import TopK, top_k
from fcsd.distill.prepare import hide_progress_bars, read_data
from fcsd.distill.run import run_dir
from fcsd.distill.run.identity import run_identity
from fcsd.distill.step.engine import import_deepspeed
from fcsd.distill.teacher import cache as teacher_cache
from fcsd.distill.teacher.cache import Shard, row_digest
from fcsd.distill.teacher.original import final_hidden, identify_teacher, output_head, pack_attention, teacher_name
from fcsd.errors import ConfigError, NonFiniteError
from fcsd.launch.world import World, join_world
from fcsd.models.build import logits_cap, register
from fcsd.progress import progress

log = logging.getLogger(__name__)

_SHARD_BYTES = 256 << 20


def cache_teacher(resolved: ResolvedRecipe, *, shard_bytes: int = _SHARD_BYTES) -> Path:
    """Writes the cache that ``objective.teacher_cache`` names. Every process calls this.

    If an earlier call was interrupted, only the missing shards are written.

    Args:
        shard_bytes: the approximate size of a shard in bytes.

    Returns: the directory of the cache.

    Raises:
        ConfigError: the recipe names no cache, or ``top_k`` is larger than the vocabulary; see also
            ``fcsd.distill.experts.expert_parallel.check``.
        BadInputError: the directory holds the cache of another teacher or text.
        NonFiniteError: the teacher's log-probabilities for a row are NaN, as they are if a logit is NaN or infinity.
    """
    recipe = resolved.recipe
    settings = recipe.objective.teacher_cache
    if settings is None:
        raise ConfigError(
            "the recipe names no teacher cache", hint="Set objective.teacher_cache.path to the directory to write."
        )
    folder = Path(settings.path)
    world = join_world()
    with ExitStack() as held:
        hide_progress_bars(world)
        world.on_first(lambda: held.enter_context(run_dir.claim(folder)))
        _write(recipe, settings, folder, world, shard_bytes)
    return folder


def _write(recipe: Recipe, settings: TeacherCache, folder: Path, world: World, shard_bytes: int) -> None:
    hashes = world.on_first(lambda: identify_teacher(recipe))
    live = recipe.objective.model_copy(update={"teacher_cache": None})
    expert_parallel.check(recipe.model_copy(update={"objective": live}), world.size)
    import_deepspeed()
    path, ep_size = resolve(teacher_name(recipe)).path, recipe.parallel.teacher_ep_size
    register()
    vocab_size = AutoConfig.from_pretrained(path, trust_remote_code=False).get_text_config().vocab_size
    if settings.top_k > vocab_size:
        raise ConfigError(
            f"objective.teacher_cache.top_k is {settings.top_k}, the vocabulary has {vocab_size} token ids"
        )
    student = student_source(recipe).path
    corpora, rows, _ = read_data(recipe, student, load_tokenizer(student), vocab_size, world)
    key = teacher_cache.key_of(recipe, settings, run_identity(recipe, corpora, world), hashes, vocab_size)
    shards = teacher_cache.plan(teacher_cache.rows_needed(recipe), recipe.data.seq_len, settings.top_k, shard_bytes)
    model = expert_parallel.load(path, ep_size, dtype=DTYPES[recipe.train.dtype], device=world.device)
    model.requires_grad_(False)
    pack_attention(model, recipe)
    expert_parallel.wire_sharded(model, ep_size, recipe.parallel)
    missing = world.on_first(lambda: teacher_cache.begin(folder, key, shards))
    if world.rank == 0:
        log.info("%s: %d of %d shards to write", folder, len(missing), len(shards))
    with progress("writing shards", len(missing), quiet=world.rank != 0) as advance:
        for first in range(0, len(missing), world.size):
            # All ranks must run the model equally often, because its experts may be divided among them.
            together = missing[first : first + world.size]
            longest = max(len(shard.rows) for shard in together)
            own = together[world.rank] if world.rank < len(together) else None
            _write_shard(model, rows, recipe, settings, folder, own, longest, world)
            advance(len(together))
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
    """Runs the model over ``longest`` rows and writes the results for the rows of ``shard``.

    A rank whose shard is None or shorter than ``longest`` repeats row 0 and drops the result, so that all ranks run the
    model equally often.
    """
    numbers = [] if shard is None else list(shard.rows)
    digests: list[bytes] = []
    counts: list[int] = []
    kept: list[TopK] = []
    for first in range(0, longest, recipe.train.micro_batch_size):
        own = numbers[first : first + recipe.train.micro_batch_size]
        micro = {name: tensor.to(world.device) for name, tensor in batch(rows, own or [0]).items()}
        found = _top_k_of(model, micro, recipe, settings)
        if own:
            digests += [row_digest(micro, at) for at in range(len(own))]
            counts += (micro["labels"] != IGNORE).sum(1).tolist()
            kept.append(TopK(*(column.cpu() for column in found)))

    def commit() -> None:
        if shard is None:
            return
        whole = TopK(*(torch.cat(column) for column in zip(*kept, strict=True)))
        if whole.log_probs.isnan().any():
            raise NonFiniteError(f"the teacher gives NaN for rows {shard.rows.start} to {shard.rows.stop}")
        teacher_cache.write_shard(folder, shard, digests, counts, whole)

    world.everywhere(commit)


@torch.no_grad()
def _top_k_of(model: PreTrainedModel, micro: dict[str, Tensor], recipe: Recipe, settings: TeacherCache) -> TopK:
    """The k most likely token ids at the positions of a micro-batch that count in the loss."""
    hidden = final_hidden(model, micro)[micro["labels"] != IGNORE]
    objective = recipe.objective
    return top_k(
        hidden,
        output_head(model),
        settings.top_k,
        temperature=objective.temperature,
        chunk_tokens=objective.chunk(len(output_head(model))),
        cap=logits_cap(model.config),
    )
