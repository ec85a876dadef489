"""``fcsd write``: a model writes the text on which its own conversion is healed, into files.

A conversion heals best on text of the kind that its teacher was trained on, which few people have. The teacher can
write it (``writer.py``). Documents are token ids, so training reads exactly what was written. Those that repeat
themselves or nearly another document of their file are dropped.
"""

import hashlib
import json
import logging
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fcsd.checkpoint import content_sha256, open_checkpoint
from fcsd.checkpoint.config_json import describe
from fcsd.checkpoint.tokenizer import load_tokenizer
from fcsd.disk import json_sha256, write_text
from fcsd.distill.own_text_files import (
    HELD_OUT,
    RECORD,
    TRAIN,
    Writing,
    count_files,
    files_to_write,
    hold,
    make_folders,
    plan_files,
    text_of,
    write_file,
)
from fcsd.distill.writer import CPU_BATCH, GPU_BATCH, Writer
from fcsd.errors import BadInputError, ConfigError
from fcsd.launch.world import World, join_world
from fcsd.progress import progress
from fcsd.serve.generation_settings import NOT_IN_WRITING, name_unapplied

log = logging.getLogger(__name__)

_HELD_OUT_EACH = 50  # one document of so many is for the held-out loss
# The most tokens of a file. A call that was killed writes its last file again, which should take minutes at most.
GPU_FILE, CPU_FILE = 2_000_000, 8_192
_PATIENCE = timedelta(days=1)  # processes that are ready wait for one that writes another file
_SHINGLE = 8  # tokens
_HASHES, _BANDS = 8, 4
_LOOP = 0.5  # the least share of distinct shingles
_LOOP_TOKENS = 64  # shorter documents cannot loop


def write_own_text(
    model: str,
    out: Path,
    *,
    tokens: int,
    prompts: Path | None = None,
    form: str | None = None,
    temperature: float = 1.0,
    greedy: float = 0.0,
    max_tokens: int = 512,
    batch_size: int | None = None,
    shard_tokens: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Let a model write text, in files from which a call that was killed goes on. Every process calls this.

    Args:
        model: directory or hub id of an original or converted model.
        out: receives ``train/part-N.parquet`` and ``held_out/part-N.parquet``, whose column ``input_ids`` a recipe
            reads with ``token_ids: input_ids``, and ``write.json``.
        tokens: how many tokens to write, over all processes. A text grows if a later call asks for more.
        prompts: a text file (``.jsonl`` or ``.parquet``, column ``text``) of users' turns, instead of invented ones;
            they are answered in turn, several times if they are few.
        form: ``chat`` or ``document``; None is ``chat`` if the tokenizer has a chat template.
        temperature, greedy, max_tokens, seed: see ``Writing``.
        shard_tokens: the most tokens of a file; None for ``GPU_FILE`` or ``CPU_FILE``. There are as many files for
            each process, of one size, and a text that grows gets such files for what it lacks.
        batch_size: how many documents are written at a time; None for ``GPU_BATCH`` or ``CPU_BATCH``. Their keys and
            values are in memory. Another number of them gives another text.

    Returns:
        The content of ``write.json``: the model, its rewiring in words (null for an original), the settings, the
        files in their order as pairs of a number of files and about how many tokens each holds, and for all files the
        documents and tokens that were written, and how many documents were dropped because they loop or nearly repeat
        another one of their file.

    Raises:
        BadInputError: the checkpoint, its tokenizer or the prompts cannot be used, or a file in ``out`` is damaged.
        ConfigError: a setting has no meaning, ``out`` holds text that was written with other settings, or another call
            is writing to it.
    """
    world = join_world()
    if world.size > 1:
        world = world.patient(_PATIENCE)
    source = open_checkpoint(model, trust_remote_code=True)  # no code is run
    source.require_usable()
    path = source.path
    tokenizer = load_tokenizer(path)
    form = form or ("chat" if tokenizer.chat_template else "document")
    on_gpu = world.device.type == "cuda"
    writing = Writing(temperature, greedy, form, max_tokens, seed)
    _check(writing, tokens, tokenizer, prompts)
    questions = None if prompts is None else _read_prompts(prompts, tokenizer, max_tokens)
    identity = {
        "tokenizer_sha256": _tokenizer_sha256(tokenizer),
        "chat_template_sha256": json_sha256(tokenizer.chat_template) if form == "chat" else None,
        "model_sha256": content_sha256(source.layout, "generation_config.json"),
        "batch_size": batch_size or (GPU_BATCH if on_gpu else CPU_BATCH),
        **asdict(writing),
        "prompts_sha256": None if questions is None else hashlib.sha256(json.dumps(questions).encode()).hexdigest(),
    }
    rewired = source.config.rewired
    if rewired is not None and world.rank == 0:
        log.warning(
            "%s is rewired (%s): a conversion heals nearer to its original on text that the original writes (%s); this "
            "text is the rewired model's, and write.json says so",
            model,
            describe(rewired),
            source.original or "it is not recorded",
        )
    most = shard_tokens or (GPU_FILE if on_gpu else CPU_FILE)
    with ExitStack() as held:
        world.on_first(lambda: held.enter_context(hold(out)))
        files = world.on_first(lambda: plan_files(out, identity, tokens, most, world.size))
        sizes = [size for count, size in files for _ in range(count)]
        count = next(number for number, total in enumerate(accumulate(sizes), 1) if total >= tokens)
        texts = [text_of(identity, number, size) for number, size in enumerate(sizes)]
        world.on_first(lambda: make_folders(out))
        # One process looks, before any of them writes a file.
        missing = world.on_first(lambda: files_to_write(out, texts, count))
        mine = missing[world.rank :: world.size]
        if mine:
            network = _load(path, world)
            if world.rank == 0:
                name_unapplied(model, network.generation_config, NOT_IN_WRITING)
            writer = Writer(network, tokenizer, writing, questions, identity["batch_size"])
            quiet = world.rank > 0
            with progress("writing tokens", sum(sizes[number] for number in mine), quiet=quiet) as advance:
                for number in mine:
                    _write_shard(out, number, sizes[number], texts[number], writer, advance)
        world.everywhere(lambda: None)  # waits until all files are there

        def record() -> dict[str, Any]:
            written, first = count_files(out, texts)
            who = {"model": model, "rewired": None if rewired is None else describe(rewired)}
            about = {"settings": identity, "files": files, "written": written, "example": tokenizer.decode(first)}
            write_text(out / RECORD, json.dumps(who | about, indent=1) + "\n")
            return who | about

        return world.on_first(record)


def _tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    backend: Any = tokenizer
    words = backend.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab()
    return json_sha256([words, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}])


def _check(writing: Writing, tokens: int, tokenizer: PreTrainedTokenizerBase, prompts: Path | None) -> None:
    if writing.form == "chat" and not tokenizer.chat_template:
        raise ConfigError("--form chat needs a chat template, and the tokenizer has none", "--form document")
    if writing.form == "document" and prompts is not None:
        if not tokenizer.chat_template:
            what = "--prompts are users' turns, and the tokenizer has no chat template to put them in"
            hint = "leave --prompts out, or put the chat_template.jinja of the model's chat version into its directory"
            raise ConfigError(what, hint)
        raise ConfigError("--prompts are users' turns, which --form document does not have", "write --form chat")
    if tokens < 1:
        raise ConfigError(f"--tokens must be at least 1, not {tokens:g}")


def _read_prompts(file: Path, tokenizer: PreTrainedTokenizerBase, most: int) -> list[list[int]]:
    from fcsd.eval.perplexity import read_texts

    read = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in read_texts(file)]
    fitting = [ids for ids in read if 0 < len(ids) <= most]
    if not fitting:
        raise BadInputError(f"{file}: no prompt has at most {most} tokens", "raise --max-tokens")
    return fitting


def _load(path: Path, world: World) -> PreTrainedModel:
    from fcsd.engine.fused import fuse
    from fcsd.models.build import load_model

    on_gpu = world.device.type == "cuda"
    network = load_model(path, dtype="bfloat16" if on_gpu else "float32", device=world.device)
    fuse(network, on_gpu)
    return network


def _write_shard(out: Path, number: int, size: int, text: str, writer: Writer, advance: Any) -> None:
    """Write documents until the shard has ``size`` tokens; ``text`` is its ``text_of``."""
    kept, dropped = [], {"loops": 0, "repeats": 0}
    seen: set[tuple[int, ...]] = set()
    total, written, asked, in_vain = 0, 0, 0, 0
    while total < size or len(kept) < 2:  # the first is held out, and one has to be trained on
        mean = written / asked if asked else writer.writing.max_tokens
        count = max(16, int((size - total) / max(mean, 1.0)))
        before = len(kept)
        for ids in writer.documents(number, asked, count):
            written += len(ids)
            if loops(ids):
                dropped["loops"] += 1
            elif repeats(ids, seen):
                dropped["repeats"] += 1
            else:
                kept.append(ids)
                total += len(ids)
                advance(len(ids))
        asked += count
        in_vain = in_vain + count if len(kept) == before else 0
        if in_vain >= 1000:
            what = f"the last {in_vain} documents of a file all loop or nearly repeat others of it"
            raise BadInputError(what, "raise --temperature, or leave --greedy and --prompts out")
    held_out, train = kept[::_HELD_OUT_EACH], [ids for i, ids in enumerate(kept) if i % _HELD_OUT_EACH]
    write_file(out, number, text, {HELD_OUT: held_out, TRAIN: train}, dropped)


def loops(ids: Sequence[int]) -> bool:
    """Whether a document repeats itself: fewer than half of its sequences of eight tokens are distinct."""
    count = len(ids) - _SHINGLE + 1
    return len(ids) >= _LOOP_TOKENS and len(_shingles(ids)) < _LOOP * count


def repeats(ids: Sequence[int], seen: set[tuple[int, ...]]) -> bool:
    """Whether a document is nearly one that was seen, by the smallest hashes of its sequences of eight tokens.

    Two documents that share three quarters of these sequences are found in about 95 % of cases, and two that share a
    quarter in about 20 %.
    """
    shingles = _shingles(ids)
    least = [min(zlib.crc32(shingle, seed) for shingle in shingles) for seed in range(_HASHES)]
    width = _HASHES // _BANDS
    bands = {(band, *least[band * width : (band + 1) * width]) for band in range(_BANDS)}
    found = not seen.isdisjoint(bands)
    seen |= bands
    return found


def _shingles(ids: Sequence[int]) -> set[bytes]:
    texts = [token.to_bytes(4) for token in ids]
    return {b"".join(texts[n : n + _SHINGLE]) for n in range(max(1, len(ids) - _SHINGLE + 1))}


def to_text(record: dict[str, Any], out: Path) -> str:
    """What was written, and the lines of a recipe that read it."""
    written, settings = record["written"], record["settings"]
    return "\n".join(
        [
            f"written  {written['tokens']} tokens in {written['documents']} documents, "
            f"and {written['held_out_documents']} for the held-out loss",
            f"dropped  {written['loops']} that loop, {written['repeats']} that nearly repeat another",
            f"drawn    at temperature {settings['temperature']:g}, {settings['greedy']:.0%} of the answers greedily",
            "recipe   data:",
            f"           sources: [{{path: '{out}/{TRAIN}/*.parquet', token_ids: input_ids}}]",
            f"           held_out: {{path: '{out}/{HELD_OUT}/*.parquet', token_ids: input_ids}}",
        ]
    )
