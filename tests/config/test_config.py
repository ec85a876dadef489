"""Recipes: strict YAML, overrides, origins, and the line each mistake is on."""

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from fcsd.config import Recipe, exclusions, load_recipe
from fcsd.errors import ConfigError
from fcsd.recipes import strict_yaml

GOOD = """\
name: run
model: converted
output_dir: runs/x
data:
  sources:
    - path: a.jsonl
      weight: 2.5
    - path: b.parquet
optim:
  lr: 2e-5
  betas: [0.9, 0.99]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def refused(path: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_values_and_defaults(recipe: Path) -> None:
    loaded = load_recipe(recipe).recipe
    assert loaded.optim.lr == 2e-5
    assert [source.weight for source in loaded.data.sources] == [2.5, 1.0]
    assert loaded.optim.schedule == "cosine"
    assert loaded.teacher is None


def test_origin_of_every_value(recipe: Path) -> None:
    resolved = load_recipe(recipe, ["train.steps=7", "optim.warmup_steps=0", "data.sources.1.weight=3"], {"seed": 4})
    origins = resolved.origins
    assert origins["name"] == "recipe:1"
    assert origins["data.sources.0.weight"] == "recipe:7"
    assert origins["data.sources.1.path"] == "recipe:8"
    assert origins["data.sources.1.weight"] == "--set"
    assert origins["data.sources.1.column"] == "default"
    assert origins["optim.lr"] == "recipe:10"
    assert origins["optim.betas"] == "recipe:11"
    assert origins["train.steps"] == "--set"
    assert origins["optim.schedule"] == "default"
    assert origins["seed"] == "flag"
    assert resolved.recipe.seed == 4


def test_precedence(recipe: Path) -> None:
    assert load_recipe(recipe, ["optim.lr=1e-3", "optim.lr=1e-4"]).recipe.optim.lr == 1e-4
    assert load_recipe(recipe, ["output_dir=runs/y"]).recipe.output_dir == "runs/y"
    assert load_recipe(recipe, ["output_dir=runs/y"], {"output_dir": "runs/z"}).recipe.output_dir == "runs/z"


def test_a_whole_section_can_be_set(recipe: Path) -> None:
    resolved = load_recipe(recipe, ["optim={warmup_steps: 0, lr: 1e-3}", "data.held_out.path=h.jsonl"])
    assert (resolved.recipe.optim.warmup_steps, resolved.recipe.optim.lr) == (0, 1e-3)
    assert resolved.origins["optim.lr"] == "--set"
    assert resolved.origins["optim.betas"] == "default"
    assert resolved.origins["data.held_out.path"] == "--set"
    assert resolved.origins["data.held_out.column"] == "default"


def test_resolved_file_loads_to_the_same_recipe(recipe: Path, tmp_path: Path) -> None:
    resolved = load_recipe(recipe, ["data.held_out={path: held.jsonl}", "train.eval_every=5"])
    text = resolved.to_yaml()
    again = tmp_path / "config.resolved.yaml"
    again.write_text(text, encoding="utf-8")
    assert load_recipe(again).recipe == resolved.recipe
    assert "default" not in load_recipe(again).origins.values()
    lines = {line.split("#")[0].strip(): line.split("# ")[-1] for line in text.splitlines()}
    assert lines["lr: 2e-05"] == "recipe:10"
    assert lines["eval_every: 5"] == "--set"
    assert lines["schedule: cosine"] == "default"


@given(
    column=st.text(st.characters(codec="utf-8"), min_size=1),
    weight=st.floats(min_value=1e-300, max_value=1e300),
    beta=st.floats(min_value=0, max_value=0.999),
)
def test_any_value_survives_the_resolved_file(column: str, weight: float, beta: float) -> None:
    source = {"path": "x", "column": column, "weight": weight}
    parts = {"name": "n", "model": "m", "output_dir": "o", "data": {"sources": [source]}, "optim": {"betas": [beta, 0]}}
    recipe = Recipe.model_validate(parts).model_dump()
    comments = dict.fromkeys([*_leaves(recipe)], "here")
    assert strict_yaml.parse(strict_yaml.dump(recipe, comments), "x")[0] == recipe


def _leaves(value: dict, key: str = ""):
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, f"{key}{name}.")
        elif name == "sources":
            yield from _leaves({str(i): entry for i, entry in enumerate(item)}, f"{key}{name}.")
        else:
            yield f"{key}{name}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-5", 2e-5),
        ("1E3", 1000.0),
        (".5", 0.5),
        ("-3", -3),
        ("true", True),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2024-01-02", "2024-01-02"),
        ('"2e-5"', "2e-5"),
        ("'null'", "null"),
        ("[1, a]", [1, "a"]),
        ("{a: {b: 1.}}", {"a": {"b": 1.0}}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    parsed = strict_yaml.parse(text, "x")[0]
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: 2\na: 3", 3, "duplicate key 'a', first on line 1"),
        ("a: 1\nb: &x [1]\nc: *x", 2, "anchors"),
        ("a: *x", 1, "aliases"),
        ("a: 1\nb: !!python/object/apply:os.system ['touch CANARY']", 2, "tags are not allowed"),
        ("a: !!str 5", 1, "tags are not allowed"),
        ("a: !function f", 1, "tags are not allowed"),
        ("a: 1\n\tb: 2", 2, "tab"),
        ("a:\t1", 1, "tab"),
        ("\ufeffa: 1", 1, "byte-order mark"),
        ("a: 1\nb: .inf", 2, "not a finite number"),
        ("a: -.Inf", 1, "not a finite number"),
        ("a: .nan", 1, "not a finite number"),
        ("a: 1e999", 1, "not a finite number"),
        ("a: 99999999999999999999", 1, "too large"),
        ("a: " + "9" * 5000, 1, "too large"),
        ("1: a", 1, "a key must be a word"),
        ("? [a]\n: b", 1, "a key must be a word"),
        ("a: 1\n---\nb: 2", 2, "but found another document"),
        ("a: [1", 1, "expected"),
        ("a: 1\nb: \x07", 2, "U+0007"),
        ("[" * 200_000, 1, "levels deep"),
        ("%YAML 1.1\n---\na: 1\n b: 2", 4, "mapping values are not allowed"),
    ],
)
def test_what_could_hide_something_is_refused(text: str, line: int, says: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"^r\.yaml:{line}: .*{says.replace('+', '[+]')}"):
        strict_yaml.parse(text, "r.yaml")
    assert list(tmp_path.iterdir()) == []


def test_alias_bomb(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(levels))
    assert "bomb.yaml:1: anchors" in refused(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"name: x\nmodel: \xff\xfe", ":2: not UTF-8"),
        (GOOD.encode("utf-16"), ":1: not UTF-8"),
        (b"\xef\xbb\xbf" + GOOD.encode(), ":1: there is a byte-order mark"),
        (b"# " + b"x" * 1_000_000, "larger than 256 kB"),
        (b"", "not a recipe"),
        (b"- a\n- b\n", "not a recipe"),
        (b"just text", "not a recipe"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert says in refused(path)


def test_a_data_type_is_written_as_in_options_or_in_short() -> None:
    for words in (("float32", "float32"), ("fp32", "fp32")):
        given = [f"train.dtype={words[0]}", f"optim.reduce_dtype={words[1]}"]
        recipe = load_recipe("tiny", given).recipe
        assert (recipe.train.dtype, recipe.optim.reduce_dtype) == ("fp32", "fp32")
    assert load_recipe("tiny", ["train.dtype=bfloat16", "optim.accumulate_dtype=auto"]).recipe.train.dtype == "bf16"


def test_missing_file_and_directory(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.yaml")
    (tmp_path / "folder.yaml").mkdir()
    assert "not a regular file" in refused(tmp_path / "folder.yaml")


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("optim:", "train:\n  anneal_share: 0.2\noptim:", 10, "annealed wiring was removed"),
        ("optim:", "parallel:\n  ep_size: 2\n  dedup: auto\noptim:", 11, "the choice by layer was removed; set off"),
        ("lr: 2e-5", "moments: bf16", 10, "moments in bf16 were removed; set optim.moments: 8bit"),
        ("lr: 2e-5", "offload: moments", 10, "it was removed; set optim.offload: host"),
        ("optim:", "objective:\n  teacher_cache:\n    path: c\noptim:", 10, "caches were removed; train.adapter"),
        ("optim:", "train:\n  graph: true\noptim:", 10, "captured passes were removed; use train.compile"),
        ("optim:", "init:\n  tp_degree: 2\noptim:", 10, "'init.tp_degree': it is called init.gpus"),
        ("name: run", "name: run\nreport: wandb", 2, "'report': write report: {to: wandb}"),
        ("name: run", "name: run\nreport: {to: wandbx}", 2, "got 'wandbx'; did you mean 'wandb'?"),
        ("lr: 2e-5", "reduce_dtype: float16", 10, "got 'fp16'"),
        ("lr: 2e-5", "lrr: 2e-5", 10, "unknown key 'optim.lrr'; did you mean 'optim.lr'?"),
        ("name: run", "name: run\nlr: 1e-4", 2, "unknown key 'lr'; did you mean 'optim.lr'?"),
        ("optim:", "optin:", 9, "unknown key 'optin'; did you mean 'optim'?"),
        ("weight: 2.5", "wieght: 2.5", 7, "did you mean 'data.sources.0.weight'?"),
        ("lr: 2e-5", "trust_remote_code: true", 10, "--trust-remote-code"),
        ("lr: 2e-5", "lr: '2e-5'", 10, "optim.lr: should be a valid number, got '2e-5'"),
        ("optim:", "train:\n  tokens: 1.5M\noptim:", 10, "should be a valid integer, got '1.5M'; did you mean 1.5e6?"),
        ("optim:", "init:\n  layers: 9\noptim:", 10, "should be a valid string, got 9; did you mean '9', in quotes?"),
        ("lr: 2e-5", "lr: -1.0", 10, "greater than 0"),
        ("lr: 2e-5", "lr: .nan", 10, "not a finite number"),
        ("lr: 2e-5", "lr: true", 10, "should be a valid number"),
        ("optim:", "train:\n  steps: 3.0\noptim:", 10, "should be a valid integer"),
        ("optim:", "train:\n  steps: 0\noptim:", 10, "greater than 0"),
        ("optim:", "train:\n  steps: 0o17\noptim:", 10, "should be a valid integer"),
        ("optim:", "train:\n  activation_checkpointing: yes\noptim:", 10, "should be a valid boolean"),
        ("lr: 2e-5", "schedule: cosin", 10, "'cosine', 'linear' or 'constant', got 'cosin'; did you mean 'cosine'?"),
        ("optim:", "parallel:\n  zero_stage: 4\noptim:", 10, "should be 0, 1 or 2"),
        ("optim:", "parallel:\n  zero_stage: 3\noptim:", 10, "zero_stage': 3 was removed; set parallel.tp_size, or "),
        ("optim:", "parallel:\n  ep_size: 0\noptim:", 10, "greater than 0"),
        ("optim:", "parallel:\n  overlap: eager\noptim:", 10, "'on', 'eager-sync' or 'off'"),
        ("optim:", "parallel:\n  teacher_placement: sharded\noptim:", 10, "needs parallel.ep_size above 1"),
        ("optim:", "parallel:\n  dedup: host\noptim:", 10, "'off', 'rank' or 'node'"),
        ("name: run", "name: run\nteacher: ~/m", 2, "`~` is not expanded"),
        ("optim:", "parallel:\n  dedup: rank\noptim:", 10, "dedup rank needs parallel.ep_size above 1"),
        ("optim:", "parallel:\n  quantised:\n    dispatch: fp8\noptim:", 11, '"fp8" is not a format'),
        ("optim:", "parallel:\n  quantised:\n    combine: int9\noptim:", 11, "2 to 8 bits, not 9"),
        (
            "optim:",
            "parallel:\n  quantised:\n    forward: int8\noptim:",
            11,
            "unknown key 'parallel.quantised.forward'",
        ),
        ("optim:", "parallel:\n  ep_size: 4\n  dedup: node\noptim:", 11, "dedup node needs parallel.node_size"),
        ("optim:", "parallel:\n  ep_size: 4\n  node_size: 3\noptim:", 11, "node_size 3 must be above 1, below"),
        ("optim:", "parallel:\n  ep_size: 4\n  node_size: 4\noptim:", 11, "set parallel.dedup: rank"),
        ("optim:", "train:\n  ep_size: 2\noptim:", 10, "unknown key 'train.ep_size'; did you mean 'parallel.ep_size'?"),
        ("optim:", "parallel:\n  overlap: Off\noptim:", 10, "got 'Off'; did you mean 'off'?"),
        ("optim:", "train:\n  trace_every: 2\noptim:", 10, "train.trace_every needs parallel.ep_size above 1"),
        ("optim:", "train:\n  lrr: 2\noptim:", 10, "unknown key 'train.lrr'; did you mean 'optim.lr'?"),
        ("lr: 2e-5", "horizon: 20", 10, "train.steps (300) go beyond optim.horizon (20)"),
        ("lr: 2e-5", "min_lr: 1", 10, "optim.min_lr (1.0) is above optim.lr"),
        ("lr: 2e-5", "warmup_steps: 300", 10, "leaves none of 300 steps"),
        ("optim:", "train:\n  batch_tokens: 1000\noptim:", 10, "not a multiple"),
        ("optim:", "train:\n  tokens: 1.5\noptim:", 10, "should be a valid integer"),
        ("optim:", "train:\n  tokens: 0\noptim:", 10, "greater than 0"),
        (
            "optim:",
            "train:\n  tokens: 1e6\n  steps: 5\noptim:",
            10,
            "is 123 steps of 8192 tokens, but train.steps is 5",
        ),
        ("weight: 2.5", "prompt: q", 6, "prompt and response go together"),
        ("weight: 2.5", "messages: m\n      prompt: q\n      response: r", 6, "give one of column"),
        ("weight: 2.5", "column: body\n      messages: m", 6, "give one of column"),
        ("weight: 2.5", "chat_template: t.jinja", 6, "chat_template is for chats"),
        ("weight: 2.5", "streaming: true\n      max_rows: 10", 6, "streaming needs format: hf"),
        ("weight: 2.5", "format: hf\n      streaming: true", 6, "and max_rows, the number of rows"),
        ("weight: 2.5", "max_rows: 0", 7, "greater than 0"),
        ("weight: 2.5", "overlong: cut", 7, "'auto', 'split', 'truncate' or 'skip'"),
        ("optim:", "train:\n  eval_every: 10\noptim:", 10, "needs data.held_out"),
        ("betas: [0.9, 0.99]", "betas: [0.9]", 11, "at least 2 items"),
        ("betas: [0.9, 0.99]", "betas: [0.9, 1.0]", 11, "less than 1"),
        ("output_dir: runs/x", "output_dir: ../../etc", 3, "`..` is not allowed"),
        ("output_dir: runs/x", "output_dir: ~/x", 3, "`~` is not expanded"),
        ("output_dir: runs/x", "output_dir: $HOME/x", 3, "`$` is not expanded"),
        ("path: a.jsonl", "path: $(touch CANARY).jsonl", 6, "`$` is not expanded"),
        ("path: a.jsonl", r'path: "a\nb"', 6, "control character"),
        ("model: converted", "model: ''", 2, "at least 1 character"),
        ("name: run", "name: a/b", 1, "begins with a letter or digit"),
        ("name: run", "seed: -1", 1, "greater than or equal to 0"),
        ("name: run", "", 2, "'name' is missing"),
        ("    - path: a.jsonl\n      weight: 2.5\n    - path: b.parquet\n", "", 5, "should be a valid list"),
    ],
)
def test_mistakes_name_their_line(recipe: Path, old: str, new: str, line: int, says: str, monkeypatch) -> None:
    monkeypatch.chdir(recipe.parent)
    assert GOOD.count(old) == 1
    recipe.write_text(GOOD.replace(old, new), encoding="utf-8")
    message = refused(Path("./r.yaml").absolute())
    assert any(f"r.yaml:{line}: " in text and says in text for text in message.splitlines()), message
    assert [path.name for path in recipe.parent.iterdir()] == ["r.yaml"]


def test_a_budget_in_tokens_gives_the_steps(recipe: Path, tmp_path: Path) -> None:
    budget = ["train.tokens=500e6", "train.batch_tokens=131072"]
    resolved = load_recipe(recipe, budget)
    assert (resolved.recipe.train.tokens, resolved.recipe.train.steps) == (500_000_000, 3815)
    assert resolved.origins["train.steps"] == "train.tokens"
    (tmp_path / "again.yaml").write_text(resolved.to_yaml())
    assert load_recipe(tmp_path / "again.yaml").recipe == resolved.recipe
    assert load_recipe(tmp_path / "again.yaml", ["train.tokens=1e9", "train.steps=null"]).recipe.train.steps == 7630
    assert load_recipe(recipe, [*budget, "train.tokens=null", "train.steps=20"]).recipe.train.steps == 20


def test_an_override_of_the_length_replaces_the_recipes(recipe: Path) -> None:
    text = GOOD.replace("optim:", "train:\n  batch_tokens: 2048\n  steps: 300\noptim:")
    recipe.write_text(text, encoding="utf-8")
    by_tokens = load_recipe(recipe, ["train.tokens=1e6"])
    assert (by_tokens.recipe.train.tokens, by_tokens.recipe.train.steps) == (1_000_000, 489)
    assert by_tokens.origins["train.tokens"] == "--set" and by_tokens.origins["train.steps"] == "train.tokens"
    recipe.write_text(text.replace("steps: 300", "tokens: 1e6"), encoding="utf-8")
    by_steps = load_recipe(recipe, ["train.steps=20"])
    assert (by_steps.recipe.train.tokens, by_steps.recipe.train.steps) == (None, 20)
    assert by_steps.origins["train.tokens"] == "default" and by_steps.origins["train.steps"] == "--set"
    recipe.write_text(text.replace("steps: 300", "steps: 300\n  tokens: 1e6"), encoding="utf-8")
    assert load_recipe(recipe, ["train.steps=20"]).recipe.train.steps == 20
    assert "give one, set the other to null" in refused(recipe)
    assert "give one, set the other to null" in refused(recipe, ["train.tokens=1e6", "train.steps=20"])


def test_every_mistake_is_told_at_once(recipe: Path) -> None:
    recipe.write_text(GOOD.replace("name: run", "nam: run").replace("lr: 2e-5", "lr: x"), encoding="utf-8")
    assert len(refused(recipe).splitlines()) == 3  # unknown key, missing name, wrong type


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lr", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("optim..lr=1", "expected KEY=VALUE"),
        ("optim.lr=abc", "--set optim.lr: should be a valid number, got 'abc'"),
        (
            "optim.train=converted",
            "--set optim.train: should be a valid list, got 'converted'; did you mean [converted]?",
        ),
        ("train.lrr=1", "--set train.lrr: unknown key 'train.lrr'; did you mean 'optim.lr'?"),
        ("data.sources.9.path=x", "there is no key '9.path'"),
        ("optim.lr.x=1", "there is no key 'x' inside 2e-05"),
        ("optim.lr=[1", "--set optim.lr:1:"),
        ("optim.lr=!!python/none 1", "tags are not allowed"),
        ("optim.lr=.inf", "not a finite number"),
        ("model=~/x", "`~` is not expanded"),
        ("trust_remote_code=true", "--trust-remote-code"),
        (".".join("a" * 5000) + "=1", "expected KEY=VALUE"),
        ("optim=1", "'optim' is a section"),
    ],
)
def test_bad_overrides(recipe: Path, override: str, says: str) -> None:
    assert says in refused(recipe, [override])


def test_a_bad_flag_is_named_as_the_flag(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--output-dir: output_dir: "):
        load_recipe(recipe, [], {"output_dir": "$X"})


@given(st.text(max_size=200))
def test_any_text_loads_or_is_refused(text: str) -> None:
    try:
        strict_yaml.parse(text, "x")
    except ConfigError as error:
        assert str(error).startswith("x:")


def test_every_field_is_described() -> None:
    for section in _sections(Recipe):
        assert section.__doc__
        for name, field in section.model_fields.items():
            assert field.description, name
            assert field.description.endswith("."), name


def _sections(schema: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section, and those in the annotations of its fields."""
    yield schema
    for field in schema.model_fields.values():
        for inner in [field.annotation, *get_args(field.annotation)]:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from _sections(inner)


def test_every_exclusion_is_found_by_one_reader(recipe: Path) -> None:
    """A setting alone excludes nothing, and a pair of the table says why; the line begins with a key of recipes."""
    for one, other, why in exclusions.EXCLUSIONS:
        assert exclusions.conflict({one}) is None and exclusions.conflict({other}) is None
        told = exclusions.conflict({one, other})
        assert told == f"{one} cannot be combined with {other}: {why}"
    alone = {f"parallel.zero_stage={stage}": own for stage, own in enumerate([{exclusions.UNDIVIDED}, set(), set()])}
    alone |= {"parallel.tp_size=2": {exclusions.SHARDED}, "train.compile=true": {exclusions.COMPILED}}
    alone |= {
        "optim.offload=host": {exclusions.ON_HOST, exclusions.OTHER_STATES},
        "optim.moments=8bit": {exclusions.ROUNDED_MOMENTS, exclusions.OTHER_STATES},
    }
    assert {each: load_recipe(recipe, [each]).recipe.settings for each in alone} == alone
    assert "tp_size above 1 cannot be combined with train.compile" in refused(
        recipe, ["parallel.tp_size=2", "train.compile=true"]
    )
    assert "'parallel.zero_stage': 3 was removed; set parallel.tp_size" in refused(recipe, ["parallel.zero_stage=3"])
