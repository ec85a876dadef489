"""The dry run: prints what a recipe would do and its first rows, and takes no step."""

import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from fcsd.config import Recipe, accumulation
from fcsd.distill.data.corpus import Corpus, listed, load_corpus, load_tokenizer, require_other_text
from fcsd.distill.data.of_run import document_end
from fcsd.distill.data.rows import Rows, batch
from fcsd.distill.inputs import student_source, teacher_name
from fcsd.distill.loss.losses import IGNORE
from fcsd.distill.run import run_dir
from fcsd.distill.run.saver import require_room
from fcsd.distill.student import check, chosen_parts, meta_student
from fcsd.distill.teacher.targets import output_head
from fcsd.parallel.quantised import formats_of
from fcsd.plan import plan_run
from fcsd.plan.memory import least_disk_bytes
from fcsd.plan.report import to_text
from fcsd.plan.setup import present
from fcsd.terminal import printable

_SHOWN = 1024  # the number of tokens of the first row that are printed


def print_dry_run(recipe: Recipe, processes: int) -> None:
    """Prints to stderr what the recipe would do on ``processes`` GPUs, and its plan.

    Raises:
        ConfigError, BadInputError: see ``preview``.
        DoesNotFitError: by the plan, the run needs more memory than a GPU has.
        DiskError: not even one checkpoint could be saved.
    """
    run_dir.require_usable(Path(recipe.output_dir), filter(None, (recipe.model, recipe.teacher)))
    print(printable(preview(recipe, processes)), file=sys.stderr)
    planned = plan_run(recipe, present(processes))
    print(to_text(planned), file=sys.stderr)
    planned.check()
    require_room(Path(recipe.output_dir), least_disk_bytes(planned.numbers, planned.setup))


def preview(recipe: Recipe, world_size: int = 1) -> str:
    """The text of the dry run: sizes, batch arithmetic, and the first packed row of each source.

    The data are tokenised in full into the cache of ``datasets``, where the run will find them. No weight is read.

    Raises:
        ConfigError, BadInputError: for any problem that would stop the run before its first step, except for problems
            with the weights.
    """
    data, train = recipe.data, recipe.train
    micro_steps = accumulation(recipe, world_size)
    check(recipe, world_size)
    source = student_source(recipe)
    model = meta_student(recipe, source)
    tokenizer, vocab_size = load_tokenizer(source.path), len(output_head(model))
    start = "" if recipe.init.weights == "loaded" else "random "
    wiring = "" if recipe.init.wiring is None else f", rewired: {recipe.init.wiring}"
    end = document_end(data.document_end, source.path, tokenizer, vocab_size)
    corpora = [load_corpus(item, tokenizer, vocab_size, end.id) for item in data.sources]
    packed = [Rows(corpus, data.seq_len, [recipe.seed, n]) for n, corpus in enumerate(corpora)]
    measured = {name: load_corpus(item, tokenizer, vocab_size, end.id) for name, item in data.measured.items()}
    for corpus in measured.values():
        Rows(corpus, data.seq_len)
    require_other_text(corpora, measured)
    teacher = teacher_name(recipe) if recipe.needs_original else "none, the loss is cross-entropy"
    teacher = "the model itself, one token later" if train.draft_head else teacher
    asked = f", the {train.tokens:,} asked for, in whole steps" if train.tokens else ""
    degree = recipe.parallel.tp_size
    shared = f" / {degree} that shard each model" if degree > 1 else ""
    lines = [
        f"student     {recipe.model}, {model.num_parameters():,} {start}parameters in {train.dtype}{wiring}",
        f"teacher     {teacher}",
        f"batch       {train.batch_tokens:,} tokens = {recipe.rows_per_step} rows of {data.seq_len}"
        f" = {train.micro_batch_size} rows * {world_size} processes{shared} * {micro_steps} micro-batches",
        f"run         {train.steps:,} steps, {train.steps * train.batch_tokens:,} tokens{asked}",
    ]
    if (chosen := chosen_parts(recipe, source)) is not None:
        where = "a draft head" if train.draft_head else "the model itself"
        adapter, own = train.adapter, f"{len(chosen.trained)} tensors of {where}"
        found = [f"adapters of rank {adapter.rank} at {len(chosen.adapted)} layers"] if adapter else []
        found += [own] if chosen.trained else []
        first = "adapters off" if adapter else "first weights"
        shared = f"; the teacher is the student with its {first}" if recipe.needs_original else ""
        lines.append(f"trained     {', and '.join(found)}{shared}")
    if recipe.parallel.quantised.any:
        lines.append(f"formats     {formats_of(recipe.parallel.quantised)}")
    if any(item.plain for item in (*data.sources, *data.measured.values())):
        lines.append(
            f"documents   of plain text end with {end.text} ({end.why}); data.document_end names another token"
        )
    for item, corpus, rows in zip(data.sources, corpora, packed, strict=True):
        left_out = f"; left out: {listed(reasons)}" if (reasons := corpus.left_out(data.seq_len)) else ""
        left_out += f"; fields that nothing reads: {listed(corpus.unread)}" if corpus.unread else ""
        counted = round(rows.counted * rows.per_epoch * data.seq_len)
        sizes = f"{corpus.tokens:,} tokens in {rows.per_epoch:,} rows, {rows.filled:.1%} full"
        lines.append(f"data        {item.path}: {sizes}; {counted:,} tokens ({rows.counted:.1%}) count{left_out}")
        lines.append(f"read        {corpus.read}")
        lines.append(f"first row   {show_first_row(corpus, rows, tokenizer, train.draft_head)}")
    return "\n".join(lines)


def show_first_row(corpus: Corpus, rows: Rows, tokenizer: PreTrainedTokenizerBase, drafts: bool = False) -> str:
    """The number of positions in the first row that count in the loss, and the text of the row.

    Tokens that count stand between ``⟦`` and ``⟧``, and ``|`` separates documents.
    """
    data = {name: column[0] for name, column in batch(rows, [0], drafts).items()}
    counts = torch.zeros_like(data["labels"], dtype=torch.bool)
    counts[1:] = data["labels"][:-1] != IGNORE  # a token counts where it is predicted
    ids, shown = data["input_ids"][:_SHOWN], counts[:_SHOWN]
    begins = (data["position_ids"][:_SHOWN] == 0).nonzero()[1:, 0]
    documents = zip(ids.tensor_split(begins), shown.tensor_split(begins), strict=True)
    text = "|".join(_text(*document, corpus, tokenizer) for document in documents)
    more = "" if len(counts) <= _SHOWN else " ..."
    return f"{int(counts.sum())} of {len(counts)} positions count, ⟦marked⟧; | ends a document\n{text}{more}"


def _text(ids: torch.Tensor, counts: torch.Tensor, corpus: Corpus, tokenizer: PreTrainedTokenizerBase) -> str:
    if len(ids) > 1 and not counts.any() and bool((ids == corpus.padding).all()):
        return f"({len(ids)} of padding)"
    changes = counts.diff().nonzero()[:, 0] + 1
    runs = zip(ids.tensor_split(changes), counts.tensor_split(changes), strict=True)
    return "".join(f"⟦{tokenizer.decode(run)}⟧" if marks.any() else str(tokenizer.decode(run)) for run, marks in runs)
