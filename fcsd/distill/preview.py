"""What a recipe would do, without doing it."""

from fcsd.config import Recipe, accumulation
from fcsd.distill.data.corpus import listed, load_corpus, load_tokenizer
from fcsd.distill.data.rows import Rows
from fcsd.distill.data.shown_row import show_first_row
from fcsd.distill.expert_parallel import check
from fcsd.distill.student import meta_student, student_source
from fcsd.distill.teacher.original import needs_teacher, output_head, teacher_name


def preview(recipe: Recipe, world_size: int = 1) -> str:
    """Sizes, batch arithmetic, and the first packed row of each source with what counts in it.

    The text is tokenised in full, into the cache of ``datasets`` where the run will find it; no weight is read.

    Raises:
        ConfigError, BadInputError: whatever would stop the run before its first step, weights aside.
    """
    data, train = recipe.data, recipe.train
    micro_steps = accumulation(recipe, world_size)
    check(recipe, world_size)
    source = student_source(recipe)
    model = meta_student(recipe, source)
    tokenizer, vocab_size = load_tokenizer(source.path), len(output_head(model))
    start = "" if recipe.init.weights == "loaded" else "random "
    wiring = "" if recipe.init.wiring is None else f", rewired: {recipe.init.wiring}"
    corpora = [load_corpus(item, tokenizer, vocab_size) for item in data.sources]
    packed = [Rows(corpus, data.seq_len, [recipe.seed, n]) for n, corpus in enumerate(corpora)]
    if data.held_out:
        Rows(load_corpus(data.held_out, tokenizer, vocab_size), data.seq_len)
    teacher = teacher_name(recipe) if needs_teacher(recipe) else "none, the loss is cross-entropy"
    if cache := recipe.objective.teacher_cache:
        teacher = f"{cache.path}, the {cache.top_k} most likely words of {teacher_name(recipe)}"
    asked = f", the {train.tokens:,} asked for rounded up to whole steps" if train.tokens else ""
    lines = [
        f"student     {recipe.model}, {model.num_parameters():,} {start}parameters in {train.dtype}{wiring}",
        f"teacher     {teacher}",
        f"batch       {train.batch_tokens:,} tokens = {train.batch_tokens // data.seq_len} rows of {data.seq_len}"
        f" = {train.micro_batch_size} rows * {world_size} processes * {micro_steps} micro-batches",
        f"run         {train.steps:,} steps, {train.steps * train.batch_tokens:,} tokens{asked}",
    ]
    for item, corpus, rows in zip(data.sources, corpora, packed, strict=True):
        left_out = f"; left out: {listed(reasons)}" if (reasons := corpus.left_out(data.seq_len)) else ""
        sizes = f"{corpus.tokens:,} tokens, of which {corpus.counted():,} count, {rows.per_epoch:,} rows{left_out}"
        lines.append(f"data        {item.path}: {sizes}")
        lines.append(f"first row   {show_first_row(corpus, rows, tokenizer)}")
    return "\n".join(lines)
