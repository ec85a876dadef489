"""Answers side by side: the model's own generation settings and chat template, the same every time."""

import io
import json
import os
import pty
import select
import shutil
import sys
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import eval_data
import pytest
import tiny
import torch
from ranks import start
from transformers import GenerationConfig
from typer.testing import CliRunner

from fcsd.cli.main import app
from fcsd.convert import convert_checkpoint
from fcsd.errors import BadInputError, NonFiniteError
from fcsd.models.build import read_generation_config
from fcsd.serve import chat as chatting
from fcsd.serve.chat import PROMPTS, Answer, Speaker, answer, chat, load_speaker, read_prompts, side_by_side
from fcsd.serve.generation_settings import UNKNOWN_TO_THE_LOOP, WITHOUT_EFFECT

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """A teacher that samples at most eight tokens, and its untrained conversion."""
    root = tmp_path_factory.mktemp("models")
    network = tiny.model("deepseek_v2", vocab_size=400)
    network.generation_config.update(do_sample=True, temperature=0.7, top_p=0.95, max_new_tokens=8)
    network.save_pretrained(root / "teacher")
    eval_data.tokenizer().save_pretrained(root / "teacher")
    convert_checkpoint(str(root / "teacher"), root / "converted", check=False)
    return root / "teacher", root / "converted"


def test_each_model_answers_by_its_own_generation_settings(models, tmp_path):
    teacher, converted = models
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("river and stone\n\nthe lamp\n")
    found = list(chat(str(converted), baseline=str(teacher), prompts=prompts))
    assert [[(a.model, a.prompt) for a in answers] for answers in found] == [
        [(str(teacher), prompt), (str(converted), prompt)] for prompt in ("river and stone", "the lamp")
    ]
    for name, answers in zip(models, zip(*found, strict=True), strict=True):
        speaker = load_speaker(str(name))
        for given in answers:
            ids = speaker.tokenizer(given.prompt, return_tensors="pt")["input_ids"]
            torch.manual_seed(0)
            whole = speaker.model.generate(ids, do_sample=True, temperature=0.7, top_p=0.95, max_new_tokens=8)
            assert given.text == speaker.tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True).strip()
    again = list(chat(str(converted), baseline=str(teacher), prompts=prompts))
    assert again == found
    assert list(chat(str(converted), baseline=str(teacher), prompts=prompts, seed=1)) != found


def test_penalties_and_ends_of_the_models_settings_are_kept(models):
    speaker = load_speaker(str(models[0]))
    settings = {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "top_k": 9, "do_sample": True}
    speaker.model.generation_config.update(**settings, max_new_tokens=24)
    ids = speaker.tokenizer("river and stone", return_tensors="pt")["input_ids"]
    torch.manual_seed(3)
    whole = speaker.model.generate(ids)[0, ids.shape[1] :].tolist()
    turn = [{"role": "user", "content": "river and stone"}]
    assert answer(speaker, turn, seed=3) == speaker.tokenizer.decode(whole, skip_special_tokens=True).strip()
    speaker.model.generation_config.eos_token_id = [whole[5]]
    expected = speaker.tokenizer.decode(whole[: whole.index(whole[5])], skip_special_tokens=True).strip()
    assert answer(speaker, turn, seed=3) == expected


RIVER = [{"role": "user", "content": "river and stone"}]
# Settings that chat applies, each with a value that differs from its default.
APPLIED = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.002,
    "eta_cutoff": 0.002,
    "repetition_penalty": 1.7,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[5]],
    "renormalize_logits": True,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 1,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [2, 1.5],
    "suppress_tokens": [5, 6],
    "begin_suppress_tokens": [5, 6],
    "sequence_bias": [[[5], -3.0]],
    "min_length": 12,
    "min_new_tokens": 6,
    "max_length": 12,
    "max_new_tokens": 5,
    "do_sample": False,
    "eos_token_id": [5, 6, 7],
    "stop_strings": ["e"],
    "watermarking_config": None,  # a class of its own
}
NAMED = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "diversity_penalty": 0.5,
    "constraints": [[1]],
    "force_words_ids": [[5]],
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "low_memory": True,
    "guidance_scale": 1.5,
    "token_healing": True,
    "max_time": 1e-9,
    "use_mtp": True,
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "speculation_type": "x",
    "is_assistant": True,
    "cache_implementation": "static",
    "cache_config": {"nbits": 4},
    "max_cache_len": 64,
}


def test_every_setting_is_applied_or_named():
    known = {*APPLIED, *UNKNOWN_TO_THE_LOOP, *WITHOUT_EFFECT}
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= known
    assert NAMED.keys() == UNKNOWN_TO_THE_LOOP.keys() and not APPLIED.keys() & NAMED.keys()


@pytest.fixture(scope="module")
def loaded(models) -> Speaker:
    return load_speaker(str(models[0]))


@pytest.fixture
def speaker(loaded, monkeypatch) -> Speaker:
    """The teacher with generation settings that a test may change."""
    monkeypatch.setattr(loaded.model, "generation_config", deepcopy(loaded.model.generation_config))
    return loaded


@pytest.mark.parametrize("name", [name for name in APPLIED if name not in ("stop_strings", "watermarking_config")])
def test_a_setting_is_applied_as_transformers_does(speaker, name):
    settings = {"max_new_tokens": None if name == "max_length" else 8, name: APPLIED[name]}
    speaker.model.generation_config.update(**settings)
    ids = speaker.tokenizer("river and stone", return_tensors="pt")["input_ids"]
    torch.manual_seed(3)
    whole = speaker.model.generate(ids)[0, ids.shape[1] :]
    if name == "eos_token_id" and whole[-1] in (5, 6, 7):
        whole = whole[:-1]
    assert answer(speaker, RIVER, seed=3) == speaker.tokenizer.decode(whole, skip_special_tokens=True).strip()


@pytest.mark.parametrize("stops", ["e", ["e", "zz"]])
def test_stop_strings_of_the_settings_end_an_answer(speaker, stops):
    whole = answer(speaker, RIVER, seed=3, max_new_tokens=40)
    assert "e" in whole
    speaker.model.generation_config.stop_strings = stops
    assert answer(speaker, RIVER, seed=3, max_new_tokens=40) == whole.split("e")[0].strip()


@pytest.mark.parametrize("name", NAMED)
def test_a_setting_that_is_not_applied_is_named_once(speaker, name, caplog):
    plain = answer(speaker, RIVER)
    setattr(speaker.model.generation_config, name, NAMED[name])
    subject = replace(speaker, name=f"with {name}")
    assert [answer(subject, RIVER) for _ in range(2)] == [plain, plain]
    assert caplog.text.count(f"with {name}: not applied of its generation_config.json: {name} ") == 1


@pytest.mark.parametrize(
    "name", ["use_cache", *(name for name in WITHOUT_EFFECT if name.startswith(("output", "ret")))]
)
def test_a_setting_without_effect_changes_nothing(speaker, name, caplog):
    plain = answer(speaker, RIVER)
    setattr(speaker.model.generation_config, name, name != "use_cache")
    assert answer(speaker, RIVER) == plain and "not applied" not in caplog.text


def test_a_conversation_longer_than_max_length_is_refused(speaker):
    speaker.model.generation_config.update(max_length=2, max_new_tokens=None)
    with pytest.raises(BadInputError, match=r"max_length in its generation_config\.json is 2"):
        answer(speaker, RIVER)
    assert answer(speaker, RIVER, max_new_tokens=3)


def test_no_answer_is_given_for_logits_that_are_not_finite(models):
    speaker = load_speaker(str(models[0]))
    speaker.model.lm_head.weight.data[0] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinite"):
        answer(speaker, [{"role": "user", "content": "river"}])


def test_the_answers_of_a_conversion_are_the_rewired_ones(models):
    teacher, converted = (load_speaker(str(path)) for path in models)
    turn = [{"role": "user", "content": "river and stone"}]
    assert answer(teacher, turn, max_new_tokens=30) != answer(converted, turn, max_new_tokens=30)


def test_a_typed_conversation_keeps_its_turns(models, monkeypatch):
    seen, typed = [], iter(["river", " ", "stone"])

    def ask(_: str) -> str:
        for line in typed:
            return line
        raise EOFError

    real, original = chatting.load_speaker, chatting.answer

    def with_template(model: str, **options):
        speaker = real(model, **options)
        speaker.tokenizer.chat_template = TEMPLATE
        return speaker

    monkeypatch.setattr(chatting, "load_speaker", with_template)
    monkeypatch.setattr(
        chatting, "answer", lambda s, turns, **o: (seen.append(list(turns)), original(s, turns, **o))[1]
    )
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", ask)
    first, second = (answers[0] for answers in chat(str(models[0])))
    assert seen[0] == [{"role": "user", "content": "river"}]
    assert [turn["content"] for turn in seen[1]] == ["river", first.text, "stone"]
    assert second.prompt == "stone"


def test_a_model_reads_what_its_template_makes_of_a_conversation(models, monkeypatch):
    speaker = load_speaker(str(models[0]))
    monkeypatch.setattr(speaker.tokenizer, "chat_template", "{{ bos_token }}" + TEMPLATE)
    read: list[list[int]] = []
    generate = speaker.model.generate

    def record(**inputs):
        read.append(inputs["input_ids"][0].tolist())
        assert inputs["attention_mask"].all()
        return generate(**inputs)

    monkeypatch.setattr(speaker.model, "generate", record)
    turns = [{"role": role, "content": "river"} for role in ("user", "assistant", "user")]
    answer(speaker, turns)
    wanted = speaker.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)
    assert read == [wanted["input_ids"]]


def test_a_chat_template_has_limits(models, monkeypatch):
    speaker = load_speaker(str(models[0]))
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    for template, reason in {
        "{{ 'x' * 3 * 10 ** 9 }}": "refuses the conversation: MemoryError",
        "{{ 'x' * 11 * 10 ** 6 }}": "refuses the conversation: over 10,000,000 characters",
        "{{ raise_exception('\x1b[2Jno') }}": r"refuses the conversation: \\u001b\[2Jno$",
        endless: "ran for more than 0.3 s",
    }.items():
        monkeypatch.setattr(speaker.tokenizer, "chat_template", template)
        if template == endless:  # the others end by themselves, however slow the machine is
            monkeypatch.setattr("fcsd.checkpoint.tokenizer.CPU_SECONDS", 0.3)
        with pytest.raises(BadInputError, match=reason):
            answer(speaker, [{"role": "user", "content": "river"}])


DAMAGED = [
    b"5",
    b"[1]",
    b"null",
    b'{"eos_token_id": "x"}',
    b'{"do_sample": true, "top_k": -5}',
    b'{"max_new_tokens": "x"}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_generation_settings_end_in_one_line(content, models, tmp_path):
    shutil.copytree(models[0], tmp_path / "model")
    (tmp_path / "model/generation_config.json").write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        answer(load_speaker(str(tmp_path / "model"), device="cpu"), [{"role": "user", "content": "river"}])
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)
    if not content.startswith(b"{"):
        with pytest.raises(BadInputError, match=r"generation_config\.json: cannot be used"):
            read_generation_config(tmp_path / "model")


def test_truncated_weights_are_named(models, tmp_path):
    folder = Path(shutil.copytree(models[0], tmp_path / "cut"))
    os.truncate(folder / "model.safetensors", 1000)
    with pytest.raises(BadInputError, match=r"cut/model\.safetensors: is truncated"):
        next(chat(str(folder)))


def test_control_characters_of_models_are_never_printed_raw(models, monkeypatch):
    hostile = "a\tb\n\x1b]0;owned\x07\x9b2J\r\x7f\r\nend"
    given = [Answer("m\x1b[1m", hostile, hostile)]
    text = side_by_side(given, 80)
    assert "\n".join(text.splitlines()) + "\n" == text and text.replace("\n", "").replace("\t", "").isprintable()
    assert "a\tb" in text and r"\u001b]0;owned\u0007\u009b2J\u000d\u007f" in text and "\nend" in text
    monkeypatch.setattr(chatting, "chat", lambda *args, **options: iter([given]))
    shown = CliRunner().invoke(app, ["chat", str(models[0]), "--json"]).stdout
    assert shown.rstrip("\n").isprintable() and json.loads(shown)[0]["text"] == hostile
    refusal = BadInputError(hostile, hostile)
    monkeypatch.setattr(chatting, "chat", lambda *args, **options: (_ for _ in ()).throw(refusal))
    assert "\x1b" not in (said := CliRunner().invoke(app, ["chat", str(models[0])]).stderr) and "owned" in said


def test_only_a_newline_ends_a_prompt(tmp_path):
    prompts = ["one\u2028two", "three\u0085four"]
    (tmp_path / "p.txt").write_text("\n".join(prompts), encoding="utf-8-sig")
    (tmp_path / "p.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts), encoding="utf-8"
    )
    assert read_prompts(tmp_path / "p.txt") == read_prompts(tmp_path / "p.jsonl") == prompts


def test_bad_prompts_are_refused(models, tmp_path):
    for name, content in (
        ("a.txt", ""),
        ("b.jsonl", '{"text": "x"}'),
        ("c.jsonl", '{"prompt": 3}'),
        ("d.jsonl", "x"),
        ("f.txt", "x" * 10_000_001),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(BadInputError):
            read_prompts(tmp_path / name)
    with pytest.raises(BadInputError):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "e.jsonl").write_text('{"prompt": "two\\nlines"}\n')
    assert read_prompts(tmp_path / "e.jsonl") == ["two\nlines"]
    with pytest.raises(BadInputError, match="no room"):
        answer(load_speaker(str(models[0])), [{"role": "user", "content": "river " * 300}])


def test_columns_keep_lines_and_indentation():
    answers = [
        Answer("teacher", "?", "def f():\n    return 1"),
        Answer("/a/very/long/name/of/a/model", "?", "word " * 9),
    ]
    lines = side_by_side(answers, 43).splitlines()
    assert lines[0] == "Prompt: ?" and max(map(len, lines)) <= 43
    assert lines[1] == "teacher              | model"
    assert lines[3].startswith("def f():") and lines[4].startswith("    return 1")
    assert " ".join(line.split("|")[1].strip() for line in lines[3:] if "|" in line).split() == ["word"] * 9


def test_command_line_answers_the_fixed_prompts(models, monkeypatch):
    typo = CliRunner().invoke(app, ["chat", str(models[1]), "--dtype", "bf17"])
    assert typo.exit_code == 2 and "unknown dtype 'bf17'" in typo.stderr and "bfloat16" in typo.stderr
    typo = CliRunner().invoke(app, ["chat", str(models[1]), "--device", "gpu"])
    assert typo.exit_code == 2 and "unknown device 'gpu'" in typo.stderr
    for device, there in (("cuda:2", "1 GPU"), ("cuda", "no GPU")):
        monkeypatch.setattr("torch.cuda.device_count", lambda there=there: int(there[0] == "1"))
        absent = CliRunner().invoke(app, ["chat", str(models[1]), "--device", device])
        assert absent.exit_code == 2 and f"--device {device}: torch finds {there} here" in absent.stderr
    rounded = load_speaker(str(models[1]), dtype="bfloat16")
    kept = rounded.model._keep_in_fp32_modules_strict  # routers, since transformers 5.24
    parameters = rounded.model.named_parameters()
    assert {p.dtype for name, p in parameters if not any(key in name for key in kept)} == {torch.bfloat16}
    result = CliRunner().invoke(app, ["chat", str(models[1]), "--baseline", str(models[0]), "--json"])
    assert result.exit_code == 0, result.stderr
    pairs = [json.loads(line) for line in result.stdout.splitlines()]
    assert [[a["prompt"] for a in pair] for pair in pairs] == [[prompt] * 2 for prompt in PROMPTS]


def test_typed_bytes_that_are_no_characters_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\nmore\n"), encoding="utf-8"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert list(chatting._typed()) == ["caf\ufffd", "more"]
    print("\u2713")  # a terminal that cannot show it gets its number


def _at_terminal(terminal: str, encoding: str, errors: str, words: list[str]) -> None:
    """Run ``fcsd WORDS`` at a terminal, with the streams that Python makes for this encoding."""
    from fcsd.cli.main import main

    for number in range(3):
        os.dup2(os.open(terminal, os.O_RDWR | os.O_NOCTTY), number)
    sys.stdin = os.fdopen(0, encoding=encoding, errors=errors, closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding=encoding, errors=errors, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False)
    sys.argv = ["fcsd", *words]
    main()


@pytest.mark.parametrize(("encoding", "errors"), [("ascii", "surrogateescape"), ("utf-8", "strict")])
def test_a_chat_at_a_terminal_takes_and_shows_any_bytes(models, encoding: str, errors: str) -> None:
    """Under LC_ALL=C without Python's UTF-8 mode, the streams are ASCII."""
    ours, terminal = pty.openpty()
    os.write(ours, "café\n".encode() + b"\xff\xfe river\n\x04")  # two prompts, and Ctrl-D
    chats = start(_at_terminal, os.ttyname(terminal), encoding, errors, ["chat", str(models[0]), "--device", "cpu"])
    said = b""
    while chats.is_alive():
        if select.select([ours], [], [], 0.1)[0]:
            said += os.read(ours, 1 << 16)
    os.close(terminal)
    with suppress(OSError):  # what is left; then nobody holds the terminal
        while block := os.read(ours, 1 << 16):
            said += block
    os.close(ours)
    assert chats.exitcode == 0 and b"Traceback" not in said
    assert said.count(b"Prompt: ") == 2, said.decode(errors="replace")
    assert f"Prompt: {'café' if encoding == 'utf-8' else 'caf'}" in said.decode(errors="replace")
