"""Files that commands read may be cut off, of other types or special: each ends in one line with its exit code."""

import json
import math
import os
from pathlib import Path

import pytest
import tiny
from studies.real.predictions import read_costs

from fcsd.distill.own_text_files import RECORD as WRITTEN
from fcsd.distill.own_text_files import plan_files
from fcsd.distill.run.manifest import read_manifest
from fcsd.distill.run.report import read_metrics
from fcsd.distill.run.trackers import _id
from fcsd.distill.samples import Samples
from fcsd.distill.sweep.search import _known_trials
from fcsd.errors import BadInputError, ConfigError, FcsdError
from fcsd.eval.code.problems import load_evalplus
from fcsd.eval.engines.answer_cache import AnswerCache
from fcsd.eval.perplexity import read_texts
from fcsd.eval.results import read_results
from fcsd.foreign_errors import translate
from fcsd.models.build import load_model
from fcsd.parallel.all_reduce.ways import read_ways
from fcsd.parallel.machine import read_machine
from fcsd.parallel.trace import read_content
from fcsd.recipes.strict_yaml import parse_file
from fcsd.serve.chat import read_prompts
from fcsd.strict_json import MAX_BYTES, StrictJsonError, parse

CONTENTS = {
    "nothing": b"",
    "cut off": b'{"step": 1, "los',
    "a cut line": b'{"step": 1, "los\n{"step": 2}\n',
    "a number": b"5",
    "null": b"null",
    "an empty list": b"[]",
    "an empty object": b"{}",
    "a list of numbers": b"[1, 2]",
    "an object of numbers": b'{"a": 1}',
    "an object of lists": b'{"a": [], "settings": [], "trials": [], "experts of each rank": []}',
    "an object of objects": b'{"a": {}, "settings": {}, "trials": {"a": {}}, "experts of each rank": {"a": {}}}',
    "objects in a list": b'[{"model": 1, "column": 2, "items": 3}]',
    "not a number": b'{"step": NaN}\n',
    "huge": b'{"step": 1e400, "a": ' + b"9" * 400 + b"}\n",
    "very huge": b'{"step": ' + b"9" * 5000 + b"}\n",
    "binary": bytes(range(256)) * 8,
    "UTF-16": '{"step": 1}'.encode("utf-16"),
    "nested": b"[" * 100_000,
    "nested objects": b'{"a":' * 100_000,
    "null bytes": b"\0" * 4096,
    "a key twice": b'{"a": 1, "a": 2}',
    "an endless number": b'{"a": 1e400}',
}


def keep_samples(path: Path, start: int) -> None:
    """What a run does with the samples of its earlier attempts when it continues after step ``start``."""
    samples = Samples.__new__(Samples)
    samples._path = path
    samples._keep(start)


_CUT = {"nothing", "cut off", "UTF-16", "null bytes", "very huge"}  # a crash may cut off the last line
_ALL = set(CONTENTS)
_OBJECTS = {text for text in CONTENTS if text.startswith("an object of")} | {
    "an empty object",
    "huge",
    "not a number",
    "UTF-16",
    "a key twice",
    "an endless number",
}
_YAML = _ALL - {
    "cut off",
    "a cut line",
    "huge",
    "very huge",
    "binary",
    "UTF-16",
    "nested",
    "nested objects",
    "null bytes",
    "a key twice",
    "an endless number",
}

# The file -> its reader, the exit code of damage, and the contents that may be right.
READERS = {
    "machine.json": (read_machine, 2, ()),
    "results.json": (read_results, 3, {"an empty list"}),
    "MANIFEST.json": (lambda path: read_manifest(path.parent), 4, ()),
    "sweep.json": (_known_trials, 3, ()),
    "table.json": (lambda path: read_ways(str(path)), 3, ()),
    "costs.json": (lambda path: read_costs(path, 2), 2, ()),
    WRITTEN: (lambda path: plan_files(path.parent, {}, 1, 1, 1), 3, set()),
    "metrics.jsonl": (lambda path: read_metrics(path.parent), 3, _CUT),
    "answers.jsonl": (lambda path: AnswerCache(path).close(), 3, {"nothing", "cut off", "null bytes"}),
    "texts.jsonl": (read_texts, 3, ()),
    "problems.jsonl": (load_evalplus, 3, ()),
    "prompts.jsonl": (read_prompts, 3, ()),
    "trace.json": (read_content, 3, ()),
    "tracker_id": (lambda path: _id(path.parent), 3, {"a number", "null"}),
    "recipe.yaml": (parse_file, 2, _YAML),
}


@pytest.mark.parametrize("name", READERS)
def test_damaged_files_end_in_one_line_with_their_exit_code(name: str, tmp_path: Path) -> None:
    read, code, taken = READERS[name]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    for what, content in CONTENTS.items():
        path.write_bytes(content)
        if what in taken:
            read(path)
            continue
        with pytest.raises(FcsdError) as caught:
            read(path)
        assert caught.value.exit_code == code, what
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600 and str(path.parent) in str(caught.value)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(FcsdError) as caught:
        read(path)
    assert caught.value.exit_code == code


@pytest.mark.parametrize("content", [*CONTENTS, "fifo"])
def test_damaged_samples_end_in_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    if content == "fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(b'{"step": 0}\n' + CONTENTS[content] + b"\n")
    with pytest.raises(BadInputError, match=r"samples\.jsonl: cannot be read"):
        keep_samples(path, 3)


def test_samples_may_hold_characters_that_end_lines_elsewhere(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "student": "a\u2028b\x85c\r"}, ensure_ascii=False) + "\n" for step in (1, 2, 3)]
    (tmp_path / "samples.jsonl").write_text("".join(lines) + '{"step": 2', newline="")
    keep_samples(tmp_path / "samples.jsonl", 2)
    assert (tmp_path / "samples.jsonl").read_bytes().decode() == "".join(lines[:2])


def test_a_cut_record_of_metrics_is_left_out_and_one_in_the_middle_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": null}\n{"step": 3, "lo')
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": None}]
    for record in (
        '{"step": 1, "lo',
        '{"step": -1}',
        '{"step": 1.5}',
        '{"loss": 1.0}',
        '{"step": 1, "loss": NaN}',
        "[]",
    ):
        path.write_text(f'{record}\n{{"step": 3, "loss": 1.0}}\n')
        with pytest.raises(BadInputError, match=r"metrics\.jsonl: cannot be read"):
            read_metrics(tmp_path)


def test_trials_of_a_sweep_are_checked(tmp_path: Path) -> None:
    right = {"values": {"lr": 1.0}, "recipe": "a", "run": "b", "status": "done", "step": 1, "tokens": 2, "value": 0.5}
    (tmp_path / "sweep.json").write_text(json.dumps({"trials": {"a": right}}))
    assert _known_trials(tmp_path / "sweep.json") == {"a": right}
    for change in (
        *({"value": value} for value in (math.nan, math.inf, None, [], True, "nan")),
        *({"values": []}, {"status": 3}, {"tokens": "2"}, {"tokens": True}, {"step": 1.5}),
    ):
        (tmp_path / "sweep.json").write_text(json.dumps({"trials": {"a": right | change}}))
        with pytest.raises(BadInputError, match=r"sweep\.json: is damaged"):
            _known_trials(tmp_path / "sweep.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("attention_bias", "x"), ("hidden_size", None), ("hidden_act", "x"), ("num_attention_heads", 0), ("dtype", [])],
)
def test_values_of_a_config_that_cannot_be_are_bad_input(key: str, value: object, tmp_path: Path) -> None:
    tiny.model("deepseek_v2").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(Exception) as caught:
        load_model(tmp_path)
    known = translate(caught.value)
    assert known is not None and known.exit_code == 3 and "\n" not in str(known)


# What Python's own reader takes for a value. Each has a place for a number in the files below.
NO_NUMBERS = ["NaN", "Infinity", "-Infinity", "1e400", '"nan"', '"1"', "true", "null", "[]", "{}", "9" * 401, "-5"]

MACHINE = '{"gpus_per_node": 8, "near": {"latency_us": 80, "gb_per_s": NUMBER}, "measured": {"of": [1, 2.5]}}'
TIMES = (
    '{"gpus_per_node": 8, "near": {"latency_us": 80, "gb_per_s": 9}, "fixed_us": {"off": 1}, '
    '"all_reduce_us": {"2": {"1024": NUMBER}}}'
)
NODE = '{"gpus_per_node": NUMBER, "near": {"latency_us": 80, "gb_per_s": 360}}'
ROW = (
    '{"version": 1, "user": "plugin", "tp": 2, "prefill": [], '
    '"decode": [{"from": NUMBER, "reduce": "vllm", "travels": false}]}'
)
RANKS = '{"version": 1, "user": "plugin", "tp": NUMBER, "prefill": [], "decode": []}'
VERSION = '{"version": NUMBER, "user": "plugin", "tp": 2, "prefill": [], "decode": []}'
LAYER = '{"tokens": 9, "ladder": {"alone": [null, 1, NUMBER, 2]}}'
PROBLEM = (
    '{"task_id": "HumanEval/0", "prompt": "def f(x):\\n", "entry_point": "f", "canonical_solution": "    return x\\n", '
    '"base_input": [[1e400]], "plus_input": [], "atol": NUMBER}'
)


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize(
    ("name", "text", "right"),
    [
        ("machine.json", MACHINE, "360"),
        ("machine.json", TIMES, "8.5"),
        ("machine.json", NODE, "8"),
        ("table.json", ROW, "16"),
        ("table.json", RANKS, "2"),
        ("table.json", VERSION, "1"),
        ("costs.json", LAYER, "0.5"),
        ("problems.jsonl", PROBLEM, "1e-6"),
    ],
)
def test_what_is_no_number_is_refused_where_a_number_stands(
    name: str, text: str, right: str, number: str, tmp_path: Path
) -> None:
    code = 2 if name in ("machine.json", "costs.json") else 3
    read = {
        "costs.json": lambda path: read_costs(path, 4),
        "table.json": lambda path: read_ways(str(path), 2),
        "machine.json": read_machine,
        "problems.jsonl": load_evalplus,
    }[name]
    path = tmp_path / name
    path.write_text(text.replace("NUMBER", right))
    read(path)
    path.write_text(text.replace("NUMBER", number))
    with pytest.raises(FcsdError) as caught:
        read(path)
    assert caught.value.exit_code == code and "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("alone", ['"1234"', "[0, 0, 0, 0]", "[null, null, null, null]", "[1, 2, null, 3]", '{"0": 1}'])
def test_costs_that_cannot_be_are_refused(alone: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(f'{{"ladder": {{"alone": {alone}}}}}')
    with pytest.raises(ConfigError, match=r"costs\.json has no costs of layers"):
        read_costs(path, 4)


@pytest.mark.parametrize("inside", ['"of": NaN', '"of": 1e400', '"of": 1, "of": 2', '"of": ' + "[" * 40 + "]" * 40])
def test_a_machine_file_is_strict_where_nothing_reads_it(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(MACHINE.replace("NUMBER", "360").replace('"of": [1, 2.5]', inside))
    with pytest.raises(ConfigError, match=r"machine\.json is not a machine file"):
        read_machine(path)
    path.write_text(" " * MAX_BYTES + MACHINE.replace("NUMBER", "360"))
    with pytest.raises(ConfigError, match="larger than"):
        read_machine(path)


def test_strict_json_has_what_json_has() -> None:
    text = '{"a": [1, -2, 0.5, 1e-400, "x", null, true, {"b": {}}], "c": 9223372036854775807}'
    assert parse(text) == json.loads(text) == parse(text.encode(), measured=True)
    assert parse("[" * 32 + "1" + "]" * 32) == json.loads("[" * 32 + "1" + "]" * 32)
    assert parse("[1e400]", measured=True) == [math.inf]
    for wrong in ("[" * 33 + "]" * 33, "[9223372036854775808]", '{"a": 1, "a": 1}', b"[\xff]"):
        with pytest.raises(StrictJsonError):
            parse(wrong)
