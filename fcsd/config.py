"""A recipe: everything a distillation run depends on, where each value came from, and the file that says so.

Precedence: default < base recipe < recipe < --set < flag. Paths are relative to the current directory and taken
literally.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from fcsd import recipes, strict_yaml
from fcsd.errors import ConfigError
from fcsd.explain import explain, nearest
from fcsd.recipes import inherit


def _literal_path(value: str) -> str:
    if value.startswith("~"):
        raise ValueError("`~` is not expanded; write the path out")
    if "$" in value:
        raise ValueError("`$` is not expanded; write the path out")
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise ValueError("control character in a path")
    return value


def _stays_below(value: str) -> str:
    if ".." in Path(value).parts:
        raise ValueError("`..` is not allowed in a path that is written to; write an absolute path")
    return value


def _no_stage_3(value: object) -> object:
    if value == 3:
        raise ValueError(
            "ZeRO-3 would part the output head, which the loss reads outside of its module, and release parameters "
            "that the reordered backward pass of overlapped experts still needs; expert_parallel shards most weights"
        )
    return value


def _whole(value: object) -> object:
    """`500e6` is a whole number to people and a float to YAML."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


PathText = Annotated[str, Field(min_length=1, max_length=4096), AfterValidator(_literal_path)]
OutputPath = Annotated[PathText, AfterValidator(_stays_below)]
Positive = Annotated[int, Field(gt=0)]
Count = Annotated[int, BeforeValidator(_whole), Field(gt=0, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Source(_Section):
    """Text or chats to train or measure on: `column`, or `messages`, or `prompt` and `response`."""

    path: PathText
    """File, folder or glob on disk; for `hf`, a folder of datasets, a dataset saved on disk, or a hub id."""
    format: Literal["auto", "jsonl", "parquet", "hf"] = "auto"
    """How to read it; `auto` goes by the file's ending."""
    subset: str | None = None
    """Configuration of an `hf` dataset that has several."""
    split: str = "train"
    """Which split of an `hf` dataset; `a+b` joins two."""
    revision: str | None = None
    """Commit, tag or branch of an `hf` dataset on the hub."""
    streaming: bool = False
    """Read the first `max_rows` rows of an `hf` dataset over the network and leave the rest there."""
    max_rows: Count | None = None
    """Rows to take from the front; null takes all."""
    column: str = "text"
    """Field or column that holds plain text, every token of which counts."""
    messages: str | None = None
    """Field or column that holds a chat as a list of messages, rendered by the chat template."""
    message_keys: Literal["role/content", "from/value"] = "role/content"
    """What a message calls its speaker and its text; `from/value` speakers are human, gpt and system."""
    prompt: str | None = None
    """Field or column of a question; with `response` it makes a chat of one turn."""
    response: str | None = None
    """Field or column of the answer to `prompt`."""
    chat_template: PathText | None = None
    """Jinja file to render chats with; null is the tokenizer's own template."""
    train_on: Literal["response", "all"] = "response"
    """Tokens of a chat that count in the loss: the assistant's, or all."""
    overlong: Literal["auto", "split", "truncate", "skip"] = "auto"
    """Documents that outgrow a row: split over rows, cut to one, or left out; `auto` splits text, truncates chats."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the mixture, relative to the other sources' weights."""

    @property
    def chat(self) -> bool:
        """Whether its documents are chats."""
        return self.messages is not None or self.prompt is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The fields that are read, in the order in which they are asked for."""
        if self.messages is not None:
            return (self.messages,)
        return (self.column,) if self.prompt is None or self.response is None else (self.prompt, self.response)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.prompt is None) != (self.response is None):
            raise ValueError("prompt and response go together: give both or neither")
        if [self.column != "text", self.messages is not None, self.prompt is not None].count(True) > 1:
            raise ValueError("give one of column (plain text), messages (chats), and prompt with response (chats)")
        if self.chat_template is not None and not self.chat:
            raise ValueError("chat_template is for chats: give messages, or prompt and response")
        if self.streaming and (self.format != "hf" or self.max_rows is None):
            raise ValueError("streaming needs format: hf and max_rows, the number of rows to read")
        return self


class Data(_Section):
    """What the student sees."""

    sources: Annotated[list[Source], Field(min_length=1)]
    """Training text, mixed by weight."""
    seq_len: Annotated[int, Field(ge=2)] = 256
    """Tokens per packed row."""
    held_out: Source | None = None
    """Text never trained on, for the held-out loss."""


class Hidden(_Section):
    """The squared distance of the residual streams: weight * sum over layers of ||student - teacher||^2."""

    weight: Weight = 0.0
    """Weight of the distance; it grows with the hidden size and with the number of layers."""
    layers: str = "all"
    """Which layers' full streams to compare: all, last:24, first:8, 50%, 12-27 or 0,2,5-7."""


class TeacherCache(_Section):
    """The teacher's most likely words on disk, instead of the teacher; written by `fcsd cache-teacher`."""

    path: OutputPath
    """Directory of the cache."""
    top_k: Positive = 64
    """Words per position; 8 bytes each."""


class Objective(_Section):
    """The loss: kl * KL(teacher || student) + sft * cross-entropy + hidden.weight * squared distance."""

    kl: Weight = 1.0
    """Weight of the divergence from the teacher."""
    sft: Weight = 0.0
    """Weight of the cross-entropy with the text itself."""
    hidden: Hidden = Hidden()
    """The distance of the streams inside."""
    teacher_cache: TeacherCache | None = None
    """Use a cache for the divergence, a lower bound of it; null runs the teacher."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Both softmaxes' temperature in the divergence."""
    reduction: Literal["mean", "sum"] = "mean"
    """Mean or sum over the tokens of a batch; clipping and the meaning of lr depend on it."""
    chunk_tokens: Positive = 512
    """Tokens whose logits exist at the same time; bounds memory, not the result."""
    freeze_embeddings: bool = False
    """Leave the input embeddings as they are."""
    freeze_lm_head: bool = False
    """Leave the output head as it is."""

    @model_validator(mode="after")
    def _something_to_learn(self) -> Self:
        if self.kl == 0 and self.sft == 0 and self.hidden.weight == 0:
            raise ValueError("objective.kl, objective.sft and objective.hidden.weight are all 0, so nothing is learned")
        if self.teacher_cache and (self.kl == 0 or self.hidden.weight):
            raise ValueError("objective.teacher_cache serves kl alone: kl must have a weight, hidden none")
        return self


class NonFinite(_Section):
    """What becomes of a step whose loss or gradients are NaN or infinite. It never changes a weight."""

    skip: NonNegative = 0
    """Such steps in a row that are passed over; one more ends the run."""


class Init(_Section):
    """Where the student starts."""

    weights: Literal["loaded", "random"] = "loaded"
    """`loaded` from `model`; `random` by its config's standard deviation and the seed, for training from scratch."""
    wiring: Literal["standard", "farskip", "ladder", "parallel", "desync-2x", "desync-4x"] | None = None
    """Rewires an original as `fcsd convert` would; null keeps the wiring of `model`."""
    layers: str = "all"
    """Which layers to rewire: all, last:24, first:8, 50%, 12-27 or 0,2,5-7."""
    variant: Literal["full", "attn-only", "mlp-only"] = "full"
    """As in `fcsd convert`."""
    distance: Positive = 1
    """Sub-blocks whose outputs may be in flight."""
    tp_degree: Positive = 1
    """Tensor-parallel degree, for desync."""

    @model_validator(mode="after")
    def _nothing_without_a_wiring(self) -> Self:
        if self.wiring is None and (self.layers, self.variant, self.distance, self.tp_degree) != ("all", "full", 1, 1):
            raise ValueError("init.wiring is null, so nothing is rewired, but other fields of init say how")
        return self


class Train(_Section):
    """The optimizer's side of the run."""

    batch_tokens: Positive = 8192
    """Tokens per optimizer step, over all processes."""
    micro_batch_size: Positive = 8
    """Rows per forward pass and process."""
    steps: Positive = 300
    """Optimizer steps."""
    tokens: Count | None = None
    """Budget in tokens that gives `steps`, rounded up to whole steps; null leaves it to `steps`."""
    lr: Annotated[float, Field(gt=0)] = 2e-5
    """AdamW's peak learning rate."""
    min_lr: Weight = 0.0
    """Learning rate at the last step."""
    horizon: Positive | None = None
    """Steps over which the schedule is laid out, for a run that ends earlier; null is `steps`."""
    warmup_steps: NonNegative = 10
    """Steps of linear rise from 0 to lr."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the fall from lr to min_lr."""
    weight_decay: Weight = 0.0
    """AdamW's decoupled weight decay."""
    betas: Annotated[list[Beta], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """AdamW's decay rates of the two moments."""
    grad_clip: Weight = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of weights and activations; the optimizer keeps fp32."""
    zero_stage: Annotated[Literal[0, 1, 2], BeforeValidator(_no_stage_3)] = 1
    """DeepSpeed ZeRO stage."""
    expert_parallel: Positive = 1
    """Processes that divide the experts of each MoE layer among them; 1 leaves all experts on every process."""
    overlap: Literal["on", "eager-sync", "off"] = "on"
    """Under expert_parallel: hide the all-to-alls, await each where it starts, or run the blocking parts."""
    fused: bool = False
    """Under expert_parallel, on GPUs: one kernel for each norm and each move of rows; rounds otherwise."""
    teacher_placement: Literal["auto", "sharded", "replicated"] = "auto"
    """Whether expert_parallel holds for the teacher, too; `auto` shards it with the student."""
    activation_checkpointing: bool = False
    """Recompute activations in backward, trading time for memory."""
    log_every: Positive = 10
    """Steps between lines of metrics.jsonl."""
    save_every: NonNegative = 100
    """Steps between checkpoints; 0 saves only the last."""
    eval_every: NonNegative = 0
    """Steps between held-out losses; 0 measures only at the end."""
    trace_every: NonNegative = 0
    """Steps between those that are profiled for exposed communication, under expert_parallel; 0 profiles none."""
    sample_tokens: NonNegative = 64
    """Longest answer of student and teacher to the fixed prompts at each evaluation; 0 asks nothing."""
    keep: Positive = 2
    """Newest checkpoints to keep."""
    nonfinite: NonFinite = NonFinite()
    """What becomes of a step whose loss or gradients are NaN or infinite."""
    save_failures: NonNegative = 3
    """Saves in a row that a full disk may prevent before the run stops."""
    stuck_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time without a step on any process before the run ends itself; saving and scoring count."""
    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Time between SIGTERM and the end of the process; a save that takes longer is not begun."""

    @model_validator(mode="before")
    @classmethod
    def _steps_of_tokens(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("tokens") is None or given.get("steps"):
            return given
        tokens, batch = _whole(given["tokens"]), given.get("batch_tokens", cls.model_fields["batch_tokens"].default)
        if not isinstance(tokens, int) or not isinstance(batch, int) or min(tokens, batch) < 1:
            return given  # the fields themselves say what is wrong
        return {**given, "steps": -(-tokens // batch)}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.tokens is not None and self.steps != -(-self.tokens // self.batch_tokens):
            raise ValueError(
                f"train.tokens ({self.tokens}) is {-(-self.tokens // self.batch_tokens)} steps of "
                f"{self.batch_tokens} tokens, but train.steps is {self.steps}; give one, set the other to null"
            )
        if self.min_lr > self.lr:
            raise ValueError(f"train.min_lr ({self.min_lr}) is above train.lr ({self.lr})")
        if self.teacher_placement == "sharded" and self.expert_parallel == 1:
            raise ValueError("train.teacher_placement sharded needs train.expert_parallel above 1")
        if self.trace_every and self.expert_parallel == 1:
            raise ValueError("train.trace_every needs train.expert_parallel above 1; else there is nothing to expose")
        if self.warmup_steps >= self.schedule_steps:
            raise ValueError(f"train.warmup_steps ({self.warmup_steps}) leaves none of {self.schedule_steps} steps")
        if self.steps > self.schedule_steps:
            raise ValueError(f"train.steps ({self.steps}) go beyond train.horizon ({self.horizon})")
        return self

    @property
    def schedule_steps(self) -> int:
        """Steps of the whole schedule, of which the run takes the first ``steps``."""
        return self.horizon or self.steps


NO_METRIC, HELD_OUT = "none", "held_out"


class EarlyStop(_Section):
    """When to stop before the last step, and which checkpoint is the best."""

    metric: Annotated[str, Field(min_length=1, max_length=64)] = NO_METRIC
    """`none`; `held_out`, the cross-entropy of data.held_out; `mbpp_plus` or any other task of the suite."""
    suite: str = "strict"
    """Whose settings the task has: a suite of `fcsd eval`."""
    every: Positive = 1000
    """Steps between scores; a step whose score is the best so far is saved."""
    patience: Positive = 20
    """Scores in a row without improvement after which the run stops."""
    delta: Weight = 0.02
    """How much better a score must be to be an improvement."""
    delta_kind: Literal["relative", "absolute"] = "relative"
    """Whether delta is a share of the score to beat or a difference from it."""
    limit: Positive | None = None
    """Only the first so many documents of the task; null for all."""
    data_mirror: PathText | None = None
    """Data sets on disk, instead of the hub."""

    @property
    def benchmark(self) -> str | None:
        """The task that `fcsd eval` must score, if there is one."""
        return None if self.metric in (NO_METRIC, HELD_OUT) else self.metric


class Sweep(_Section):
    """Short runs over a grid of values, stage by stage, by which the values of the full run are chosen."""

    stages: Annotated[list[dict[str, Annotated[list[Any], Field(min_length=1)]]], Field(min_length=1)]
    """By dotted key the values to try, all combinations; a stage starts from the choice of the one before it."""
    steps: Positive
    """Steps of each trial."""
    horizon: Literal["full", "trial"] = "full"
    """Whose steps the schedule is laid out for; with `full`, a trial is the beginning of the full run."""
    metric: str = "loss"
    """What is compared, a name in metrics.jsonl; the smallest wins."""
    window: Positive = 100
    """Steps at the end of a trial over which the metric is averaged."""
    then: Literal["continue", "stop"] = "continue"
    """Whether the full run follows, with the chosen values."""


class Recipe(_Section):
    """One distillation run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    """Name of the run in logs, cards and trackers."""
    model: PathText
    """The student: a converted checkpoint, as a directory or hub id; see `init` for others."""
    init: Init = Init()
    """Where the student starts."""
    teacher: PathText | None = None
    """The frozen teacher; null is the original that the student was converted from."""
    teacher_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The teacher's fingerprint; null is what the student's conversion recorded."""
    output_dir: OutputPath
    """Run directory: checkpoints, metrics, the resolved recipe."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of data order and of every random number."""
    deterministic: bool = False
    """Bit-reproducible kernels only, at some cost in speed."""
    data: Data
    """What the student sees."""
    objective: Objective = Objective()
    """What it is asked to match."""
    train: Train = Train()
    """The optimizer's side of the run."""
    early_stop: EarlyStop = EarlyStop()
    """When to stop before the last step."""
    sweep: Sweep | None = None
    """For `fcsd distill --sweep`: how to choose values before the full run."""
    report: Literal["none", "wandb", "trackio", "tensorboard"] = "none"
    """Where metrics go besides metrics.jsonl."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        micro = self.train.micro_batch_size * self.data.seq_len
        if self.train.batch_tokens % micro:
            raise ValueError(
                f"train.batch_tokens ({self.train.batch_tokens}) is not a multiple of "
                f"train.micro_batch_size * data.seq_len ({micro})"
            )
        if self.train.eval_every and self.data.held_out is None:
            raise ValueError("train.eval_every needs data.held_out, the text to measure on")
        if self.early_stop.metric == HELD_OUT and self.data.held_out is None:
            raise ValueError("early_stop.metric held_out needs data.held_out, the text to measure on")
        return self


@dataclass(frozen=True)
class ResolvedRecipe:
    """A complete recipe and, by dotted key, the origin of each value.

    An origin is `default`, `recipe:LINE`, `BASE.yaml:LINE`, `--set` or `flag`; steps that follow from a budget have
    `train.tokens`.
    """

    recipe: Recipe
    origins: dict[str, str]

    def to_yaml(self) -> str:
        """The whole recipe with the origin of each value as a comment; loads to the same recipe."""
        return strict_yaml.dump(self.recipe.model_dump(), self.origins)


def load_recipe(
    path_or_name: str | Path, overrides: list[str] | None = None, flags: Mapping[str, object] | None = None
) -> ResolvedRecipe:
    """Reads a recipe and resolves every value.

    Args:
        path_or_name: a YAML file, or the name of a packaged recipe.
        overrides: `--set` arguments, `train.lr=1e-4`; values follow the recipe's YAML rules.
        flags: values of command-line flags by dotted key; they win over everything.

    Raises:
        ConfigError: unreadable file, bad YAML, unknown key, wrong type or contradiction, with its place.
    """
    path = recipes.find(str(path_or_name))
    raw, found = inherit.read(path)
    places = {key: f"{file}:{line}" for key, (file, line) in found.items()}
    origins = {key: f"{'recipe' if file == path else file.name}:{line}" for key, (file, line) in found.items()}
    assignments = [("--set", *_split_override(text)) for text in overrides or []]
    assignments += [("flag", key, value) for key, value in (flags or {}).items()]
    for origin, key, value in assignments:
        raw = _assign(raw, key.split("."), value)
        for known in [k for k in origins if k == key or k.startswith(f"{key}.")]:
            del origins[known], places[known]
        origins[key], places[key] = origin, _written(origin, key)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        problems = [explain(problem, places, Recipe) for problem in error.errors()]
        raise ConfigError("\n".join(problems)) from error
    given = {key for key, _ in _leaves(raw)}
    leaves = [key for key, _ in _leaves(recipe.model_dump())]
    resolved = {k: nearest(k, origins) if k in given else "default" for k in leaves}
    if recipe.train.tokens is not None and "train.steps" not in given:
        resolved["train.steps"] = "train.tokens"
    return ResolvedRecipe(recipe, resolved)


def vary(resolved: ResolvedRecipe, values: Mapping[str, object]) -> ResolvedRecipe:
    """The recipe with other values, by dotted key; their origin is `sweep`.

    Raises:
        ConfigError: unknown key, wrong type or contradiction.
    """
    raw: object = resolved.recipe.model_dump()
    if resolved.recipe.train.tokens is not None:
        raw = _assign(raw, ["train", "steps"], None)
    for key, value in values.items():
        raw = _assign(raw, key.split("."), value)
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        places = {"": "sweep", **{key: f"sweep, {key} {value!r:.100}" for key, value in values.items()}}
        raise ConfigError("\n".join(explain(problem, places, Recipe) for problem in error.errors())) from error
    origins = {"": "default", **resolved.origins, **dict.fromkeys(values, "sweep")}
    return ResolvedRecipe(recipe, {key: nearest(key, origins) for key, _ in _leaves(recipe.model_dump())})


def value_of(recipe: Recipe, key: str) -> object:
    """What a recipe says under a dotted key, a number picking a list item; None where it says nothing."""
    found: Any = recipe.model_dump()
    for part in key.split("."):
        if isinstance(found, list):
            found = {str(number): item for number, item in enumerate(found)}
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _written(origin: str, key: str) -> str:
    """How the user wrote an assignment, for messages."""
    return f"--set {key}" if origin == "--set" else f"--{key.rpartition('.')[2].replace('_', '-')}"


def _split_override(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")) or key.count(".") > strict_yaml.MAX_DEPTH:
        raise ConfigError(f"--set {text}: expected KEY=VALUE", hint="for example --set train.lr=1e-4")
    return key, strict_yaml.parse(value, f"--set {key}")[0]


def _assign(current: object, parts: list[str], value: object) -> object:
    """`current` with `value` at the dotted key `parts`; a number picks a list item, mappings are made."""
    if not parts:
        return value
    head, *rest = parts
    if isinstance(current, list) and head in map(str, range(len(current))):
        return [_assign(item, rest, value) if str(i) == head else item for i, item in enumerate(current)]
    if current is None or isinstance(current, dict):
        known = current or {}
        return {**known, head: _assign(known.get(head), rest, value)}
    raise ConfigError(f"--set: nothing is called {'.'.join(parts)!r} inside {current!r:.100}")


def _leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Dotted key and value of everything that is not a mapping or a list of mappings."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = {str(i): item for i, item in enumerate(value)}
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, f"{key}.{name}" if key else name)
    else:
        yield key, value
