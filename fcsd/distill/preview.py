"""What a recipe would do, without doing it."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fcsd.checkpoint import resolve
from fcsd.config import Recipe
from fcsd.distill.corpus import load_corpus, load_tokenizer
from fcsd.distill.data import Rows, batch
from fcsd.distill.engine import accumulation
from fcsd.distill.expert_parallel import check
from fcsd.distill.losses import IGNORE
from fcsd.distill.teacher import needs_teacher, teacher_name
from fcsd.models.build import register


def preview(recipe: Recipe, world_size: int = 1) -> str:
    """Sizes, batch arithmetic, and the first packed row with what is predicted in it.

    The text is tokenised in full, into the cache of ``datasets`` where the run will find it; no weight is read.

    Raises:
        ConfigError, BadInputError: whatever would stop the run before its first step, weights aside.
    """
    data, train = recipe.data, recipe.train
    micro_steps = accumulation(recipe, world_size)
    check(recipe, world_size)
    source = resolve(recipe.model).path
    tokenizer, parameters, vocab_size = load_tokenizer(source), *_size(source)
    corpora = [load_corpus(item, tokenizer, vocab_size) for item in data.sources]
    packed = [Rows(corpus, data.seq_len, [recipe.seed, n]) for n, corpus in enumerate(corpora)]
    if data.held_out:
        Rows(load_corpus(data.held_out, tokenizer, vocab_size), data.seq_len)
    teacher = teacher_name(recipe) if needs_teacher(recipe) else "none, the loss is cross-entropy"
    lines = [
        f"student     {recipe.model}, {parameters:,} parameters in {train.dtype}",
        f"teacher     {teacher}",
        f"batch       {train.batch_tokens:,} tokens = {train.batch_tokens // data.seq_len} rows of {data.seq_len}"
        f" = {train.micro_batch_size} rows * {world_size} processes * {micro_steps} micro-batches",
        f"run         {train.steps:,} steps, {train.steps * train.batch_tokens:,} tokens",
    ]
    for item, corpus, rows in zip(data.sources, corpora, packed, strict=True):
        left_out = "".join(f", {count} rows {reason}" for reason, count in corpus.skipped.items())
        lines.append(f"data        {item.path}: {corpus.tokens:,} tokens, {rows.per_epoch:,} rows{left_out}")
    first = batch(packed[0], [0])
    counted = int((first["labels"] != IGNORE).sum())
    lines.append(f"first row   {counted} of {data.seq_len} positions count; | ends a document")
    documents = torch.tensor_split(first["input_ids"][0], (first["position_ids"][0] == 0).nonzero()[1:, 0].cpu())
    lines.append("|".join(str(tokenizer.decode(document)) for document in documents))
    return "\n".join(lines)


def _size(source: object) -> tuple[int, int]:
    """Parameters and vocabulary of a model, from its config alone."""
    register()
    config = AutoConfig.from_pretrained(str(source), trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model.num_parameters(), len(model.get_output_embeddings().weight)
