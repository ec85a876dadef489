"""Lets models answer the same prompts side by side (FarSkip App. B), each with its own generation settings."""

import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd.checkpoint.location import short_names
from fcsd.disk import read_input_text
from fcsd.errors import BadInputError, ConfigError
from fcsd.foreign_errors import reason_of
from fcsd.input_lines import LONGEST_TEXT
from fcsd.load_options import check_device, check_dtype, default_dtype
from fcsd.models.config_keys import cache_keyword
from fcsd.serve.generation_settings import UNKNOWN_TO_THE_LOOP, name_unapplied
from fcsd.strict_json import parse
from fcsd.terminal import printable

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fcsd.launch.shared_work import Team
    from fcsd.launch.world import World

# The first one is the paper's (Figure 7).
PROMPTS = (
    "What are the main topics of Linear Algebra?",
    "Write a Python function that tells whether a number is prime.",
    "Tom has 3 boxes of 12 pencils and gives 7 pencils away. How many are left?",
    "Why does ice float on water?",
)
MAX_NEW_TOKENS = 256
PATIENCE = timedelta(days=1)  # how long the other ranks wait for a prompt that the user types

Turn = dict[str, str]  # role and content, as chat templates read them


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer and the name that the output shows."""

    name: str
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


@dataclass(frozen=True)
class Answer:
    """The answer of one model to one prompt."""

    model: str
    prompt: str
    text: str


def chat(
    model: str,
    *,
    baseline: str | None = None,
    prompts: str | Path | None = None,
    seed: int = 0,
    max_new_tokens: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    divided: bool = False,
    reduce: str = "nccl",
) -> Iterator[list[Answer]]:
    """Answer one prompt after the other. The answer of the baseline comes first.

    Without a file of prompts, the user types them if stdin is a terminal; they form one conversation if the tokenizer
    has a chat template. If stdin is not a terminal, the fixed ``PROMPTS`` are used. Prompts of a file and fixed prompts
    are independent of each other.

    Args:
        model: directory or hub id of a model, converted or not.
        baseline: directory or hub id of a second model, whose answers come first; None for no second model.
        prompts: a file with one prompt per line, or ``.jsonl`` with a ``prompt`` each.
        seed: the seed of the sampling, the same for every prompt and model.
        max_new_tokens: the longest answer; None for the limit in the model's generation settings, or else
            ``MAX_NEW_TOKENS``.
        device: ``cpu``, or ``cuda`` to let accelerate spread each model over GPUs and memory; None for ``cuda`` if
            there is a GPU.
        dtype: the data type of the weights, one of ``fcsd.load_options.DTYPES``; None for float32 on the CPU and
            bfloat16 on a GPU.
        divided: whether the models are divided over the processes that torchrun started, in fcsd's own engine. Every
            process makes this call and gets the same answers; rank 0 reads what the user types.
        reduce: how the ranks of a divided model reduce; see ``engine.open_engine``.

    Yields:
        For each prompt, a list with one answer per model.

    Raises:
        BadInputError: a model or the prompts cannot be used, or a prompt leaves no room for an answer.
        ConfigError: ``dtype`` or ``device`` is unknown, a model cannot be divided over this number of processes, or
            ``reduce`` gives wrong results.
    """
    check_dtype(dtype)
    check_device(device)
    if divided:
        from fcsd.parallel.all_reduce.backends import require_right

        require_right(reduce)
    elif reduce != "nccl":
        raise ConfigError("an all-reduce backend is for a divided model", "add --gpus, or leave --all-reduce out")
    interactive = prompts is None and sys.stdin.isatty()
    asked = _typed() if interactive else PROMPTS if prompts is None else read_prompts(Path(prompts))
    names = [name for name in (baseline, model) if name is not None]
    if divided:
        from fcsd.launch.world import join_world

        world = join_world().patient(PATIENCE)
        interactive = world.on_first(lambda: interactive)
        asked = _same_everywhere(asked, world)
        speakers = [load_divided_speaker(name, world, reduce, dtype) for name in names]
    else:
        speakers = [load_speaker(name, device=device, dtype=dtype) for name in names]
    histories: list[list[Turn]] = [[] for _ in speakers]
    for prompt in asked:
        answers = []
        for speaker, history in zip(speakers, histories, strict=True):
            if not interactive:
                history.clear()
            history.append({"role": "user", "content": prompt})
            text = answer(speaker, history, seed=seed, max_new_tokens=max_new_tokens)
            history.append({"role": "assistant", "content": text})
            answers.append(Answer(speaker.name, prompt, text))
        yield answers


def load_speaker(model: str, *, device: str | None = None, dtype: str | None = None) -> Speaker:
    """Loads a model and its tokenizer; accelerate spreads the model over the GPUs. See ``chat`` for the arguments."""
    from fcsd.checkpoint import open_checkpoint
    from fcsd.checkpoint.tokenizer import load_tokenizer
    from fcsd.models.build import load_on_device

    source = open_checkpoint(model, trust_remote_code=True)  # no code is run
    source.require_usable()
    network = load_on_device(source.path, device=device, dtype=dtype)
    return Speaker(model, network, load_tokenizer(source.path))


def load_divided_speaker(model: str, world: "World", reduce: str, dtype: str | None) -> Speaker:
    """Loads a model into fcsd's own engine, and its tokenizer. See ``chat`` for the arguments.

    Raises:
        ConfigError: the model cannot be divided over this number of processes, or the reductions give wrong results.
    """
    import torch

    from fcsd.checkpoint import open_checkpoint
    from fcsd.checkpoint.tokenizer import load_tokenizer
    from fcsd.engine.open import open_engine

    source = open_checkpoint(model, trust_remote_code=True)  # no code is run
    source.require_usable(headers=False)
    kind = getattr(torch, dtype or default_dtype(world.device.type == "cpu"))
    network = open_engine(source.path, world, dtype=kind, reduce=reduce)
    return Speaker(model, network, load_tokenizer(source.path))


def _same_everywhere(prompts: Iterable[str], world: "World") -> Iterator[str]:
    """The prompts of rank 0, on every rank."""
    own = iter(prompts)
    while (prompt := world.on_first(lambda: next(own, None))) is not None:
        yield prompt


def answer(
    speaker: Speaker,
    history: Sequence[Turn],
    *,
    seed: int | None = 0,
    max_new_tokens: int | None = None,
    team: "Team | None" = None,
) -> str:
    """The model's answer to a conversation whose last turn is the user's.

    Without a chat template the model continues the text of the last turn alone. transformers reads the model's
    generation settings, and fcsd's loop applies them. Those that it does not know, such as beams, are named once.

    Args:
        seed: the seed of the sampling; None for greedy decoding, which uses no random numbers.
        max_new_tokens: see ``chat``.
        team: the processes that ask for the same answer, if the model is spread over several; None for this one alone.

    Raises:
        BadInputError: the conversation is longer than the model takes, or its chat template refuses it or exceeds its
            limits.
        NonFiniteError: the model gives NaN or infinite logits.
    """
    import torch
    from transformers import BatchEncoding

    from fcsd.checkpoint.tokenizer import chat_text, limited_template, text_ids
    from fcsd.engine.batches import generate_in_batch
    from fcsd.engine.generate import ending
    from fcsd.launch.shared_work import ALONE

    model: Any = speaker.model
    tokenizer: Any = speaker.tokenizer
    if tokenizer.chat_template is None:
        [ids] = text_ids([history[-1]["content"]], tokenizer)
        inputs = BatchEncoding({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()})
    else:
        with limited_template(tokenizer) as template:
            text = chat_text(template, history, speaker.name, add_generation_prompt=True)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    room = model.config.get_text_config().max_position_embeddings - length
    if length == 0 or room < 1:
        raise BadInputError(f"{speaker.name}: the conversation has {length} tokens, which leaves no room for an answer")
    settings: Any = model.generation_config
    most = min(max_new_tokens or _longest_answer(speaker.name, settings, length), room)
    name_unapplied(speaker.name, settings, UNKNOWN_TO_THE_LOOP)
    stops = settings.stop_strings or ()
    end = ending(model, tokenizer, (stops,) if isinstance(stops, str) else tuple(stops))

    def run(model: Any, input_ids: Any, logits_processor: Any, generation_config: Any, **state: Any) -> list[int]:
        """What transformers calls with the model's settings."""

        def choose(rows: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            scores = logits_processor(tokens, logits.float())
            drawn = generation_config.do_sample
            return scores.softmax(-1).multinomial(1) if drawn else scores.argmax(-1, keepdim=True)

        options: dict[str, Any] = {"choose": choose, "cache": state.get(cache_keyword()), "team": team or ALONE}
        [ids] = generate_in_batch(model, input_ids.tolist(), max_new_tokens=most, ended=end.of, **options)
        return ids

    # Lengths and stop strings are the loop's; transformers would need the tokenizer for the latter.
    options: dict[str, Any] = {**UNKNOWN_TO_THE_LOOP, "max_new_tokens": most, "max_length": None, "stop_strings": None}
    if seed is None:
        options["do_sample"] = False
    else:
        torch.manual_seed(seed)
    try:
        ids = model.generate(**inputs.to(model.device), custom_generate=run, **options)
    except (ValueError, TypeError) as error:
        hint = "Its generation_config.json may hold values that cannot be; -v shows the traceback."
        raise BadInputError(f"{speaker.name}: cannot generate: {reason_of(error)}", hint) from error
    return end.text(ids).strip()


def _longest_answer(model: str, settings: Any, length: int) -> int:
    """The most tokens that a model's generation settings allow after a conversation of ``length`` tokens.

    Raises:
        BadInputError: its ``max_length``, which counts the conversation, leaves no room.
    """
    if settings.max_new_tokens or not settings.max_length:
        return settings.max_new_tokens or MAX_NEW_TOKENS
    if settings.max_length <= length:
        raise BadInputError(
            f"{model}: the conversation has {length} tokens, and max_length in its generation_config.json is "
            f"{settings.max_length}",
            "Give --max-new-tokens.",
        )
    return settings.max_length - length


def read_prompts(path: Path) -> list[str]:
    """Prompts from a file: lines of text, or JSON lines with a ``prompt``.

    Raises:
        BadInputError: the file does not exist, has a line of another form, or has no prompt.
    """
    hint = 'Give a file with a prompt per line, or .jsonl with a "prompt" per line.'
    try:
        text = read_input_text(path, encoding="utf-8-sig")  # a BOM is no part of the first prompt
        lines = [line for line in text.split("\n") if line.strip()]  # U+2028 and U+0085 may stand in a prompt
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file", hint) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: this file cannot be read: {reason_of(error)}", hint) from error
    if any(len(line) > LONGEST_TEXT for line in lines):
        raise BadInputError(f"{path}: a line has over {LONGEST_TEXT:,} characters", hint)
    try:
        prompts = [parse(line, measured=True)["prompt"] for line in lines] if path.suffix == ".jsonl" else lines
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path}: not every line is a JSON object with a prompt", hint) from error
    if not prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
        raise BadInputError(f"{path}: has no prompts, or empty ones")
    return prompts


def side_by_side(answers: Sequence[Answer], width: int) -> str:
    """A prompt and its answers as text for a terminal, in columns that share ``width`` characters.

    The columns are headed by the models' short names.
    """
    gap = " | "
    column = max(20, (width - len(gap) * (len(answers) - 1)) // len(answers))

    def wrapped(text: str) -> Iterable[str]:
        for line in printable(text).splitlines() or [""]:
            # Whitespace is kept, because code would lose its indentation otherwise.
            yield from textwrap.wrap(line, column, drop_whitespace=False, replace_whitespace=False) or [""]

    names = [printable(name) for name in short_names([found.model for found in answers])]
    heads = [[name[-column:], "-" * column] for name in names]
    blocks = [[*head, *wrapped(found.text)] for head, found in zip(heads, answers, strict=True)]
    height = max(map(len, blocks))
    rows = zip(*(block + [""] * (height - len(block)) for block in blocks), strict=True)
    lines = [gap.join(cell.ljust(column) for cell in row).rstrip() for row in rows]
    return "\n".join([f"Prompt: {printable(answers[0].prompt)}", *lines, ""])


def _typed() -> Iterator[str]:
    """Prompts typed at the terminal, until end of file. Bytes that are no characters do not end the chat."""
    for stream, errors in ((sys.stdin, "replace"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)
    print("End with Ctrl-D.", file=sys.stderr)
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            return
        if prompt.strip():
            yield prompt
