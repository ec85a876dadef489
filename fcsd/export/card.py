"""The model card of an exported directory: the model, its training, its scores and how to load it."""

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fcsd import markdown
from fcsd.checkpoint.config_json import describe
from fcsd.checkpoint.location import RUN_RECIPE
from fcsd.distill.run.report import METRICS, read_metrics
from fcsd.errors import ConfigError
from fcsd.eval.results import Result, is_accuracy, is_quantised, read_directory, run_of, shown

if TYPE_CHECKING:
    from fcsd.config import Recipe
    from fcsd.models.arch import Arch

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")

# wiring -> a sentence about its effect on a decoder layer
SENTENCES = {
    "standard": "Every sub-block reads the full residual stream, as in the base model.",
    "farskip": "Attention reads the residual stream without the routed experts of the layer before, and each MLP or "
    "MoE block reads it without its own layer's attention, so dispatch, combine and all-reduce overlap with "
    "computation (FarSkip-Collective).",
    "ladder": "Each sub-block reads the residual stream without the output of the sub-block right before it, so the "
    "all-reduce of that output overlaps with computation (Ladder-Residual).",
    "parallel": "Attention and MLP of a layer read the same residual stream, so one reduction serves both (PaLM).",
    "desync-2x": "With tensor parallelism, only every second all-reduce is kept; in between, each rank extends a "
    "residual stream of its own (Desync, Ladder-Residual §5).",
    "desync-4x": "With tensor parallelism, only every fourth all-reduce is kept; in between, each rank extends a "
    "residual stream of its own (Desync, Ladder-Residual §5).",
    "desync": "With tensor parallelism, only some all-reduces are kept; in between, each rank extends a residual "
    "stream of its own (Desync, Ladder-Residual §5).",
}

_CARD = """# {title}

{base} with a rewired residual stream: {wiring}. {sentence}

## Load

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{title}", trust_remote_code=True)
```

Plain transformers computes the same function, but overlaps nothing, so it is not faster there than the base model.
Speed needs vLLM with fcsd's plugin (`fcsd serve`).

The code in this directory needs only torch and transformers (>=5.17,<6). After `import fcsd` no remote code is needed.
The model has a model type of its own, `{model_type}`. An engine that does not know this type stops with an error, and
does not run the base model's graph on these weights.
{sections}"""


def model_card(raw: dict[str, Any], arch: "Arch", former: Path | None, run: Path | None, title: str) -> str:
    """The text of README.md.

    Args:
        raw: the content of the exported config.json.
        former: README.md of the base, from which licence and language are inherited.
        run: the run directory that trained the model, if there is one.
    """
    from huggingface_hub import ModelCardData

    block = raw["fcsd"]
    rows = read_directory(run / "eval") if run else []  # `fcsd eval` writes the scores of a run's model there
    rows = [row for row in rows if not is_quantised(row)]  # those are not the model's own scores
    own = _own(rows, run) if run else []
    recipe = None if run is None else _recipe(run)
    base = block["base_model"] if block["base_revision"] else None  # others cannot use the name of a local directory
    data = ModelCardData(
        base_model=base,
        base_model_relation="finetune" if base else None,
        library_name="transformers",
        datasets=(recipe and _datasets(recipe)) or None,
        tags=[block["wiring"], "fcsd", "custom_code"],
        **({"model_name": title, "eval_results": _eval_results(own)} if own else {}),
        **_inherited(former),
    )
    sections = _training(run, recipe) + _evaluation(rows)
    text = _CARD.format(
        title=title,
        base=f"{base} (revision {block['base_revision']})" if base else f"A {arch.model_type} model",
        wiring=describe({"by": "fcsd", **block}).removesuffix(", by fcsd"),
        sentence=SENTENCES[block["wiring"]],
        model_type=raw["model_type"],
        sections=sections,
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def _inherited(former: Path | None) -> dict[str, Any]:
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    if former is None:
        return {}
    try:
        found = metadata_load(former) or {}
    except (ValueError, YAMLError, UnicodeDecodeError):
        log.warning("%s: its front matter cannot be read; no licence was inherited", former)
        return {}
    return {key: found[key] for key in _INHERITED if key in found}


def _recipe(run: Path) -> "Recipe | None":
    """The recipe of a run; None, and a warning, if this version of fcsd does not understand it."""
    from fcsd.config import load_recipe

    try:
        return load_recipe(run / RUN_RECIPE).recipe
    except ConfigError as error:
        log.warning("the card leaves out the settings of the training: %s", error)
        return None


def _datasets(recipe: "Recipe") -> list[str]:
    """The hub's data sets among the sources of a recipe."""
    hub = [source.path for source in recipe.data.sources if source.format == "hf" and _HUB_ID.fullmatch(source.path)]
    return list(dict.fromkeys(path for path in hub if not Path(path).exists()))


def _portable(value: Any) -> Any:
    """A value of a recipe without the folders of this machine: a path is relative to the current one, or a name."""
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    path, here = Path(value), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else path.name


def _training(run: Path | None, recipe: "Recipe | None") -> str:
    if run is None:
        return ""
    text = "\n## Training\n"
    if recipe is not None:
        import yaml

        values = _portable(recipe.model_dump(exclude_defaults=True, exclude={"output_dir"}))
        written = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        text += f"\nThe recipe, without fcsd's defaults:\n\n```yaml\n{written}```\n"
    if (run / METRICS).is_file() and (lines := read_metrics(run)):
        text += f"\nLast record: {', '.join(f'{key} {value:.6g}' for key, value in lines[-1].items())}.\n"
    return text


def _own(rows: list[Result], run: Path) -> list[Result]:
    """The accuracies of the run's own model, without those of other models that were evaluated beside it.

    The run's own model is the one that lies in the run directory. If no model lies there, it is the only model besides
    the baseline.
    """
    scored = [row for row in rows if is_accuracy(row) and not row["baseline"]]
    inside = [row for row in scored if row.get("path") and run_of(row["path"]) == run.resolve()]
    return inside or (scored if len({row["model"] for row in scored}) == 1 else [])


def _evaluation(rows: list[Result]) -> str:
    if not rows:
        return ""
    body = [[row["model"], row["column"], row["metric"], " ± ".join(shown(row)), str(row["n"])] for row in rows]
    return f"\n## Evaluation\n\n{markdown.table(['model', 'task', 'metric', 'value', 'n'], body, left=3)}\n"


def _eval_results(rows: list[Result]) -> list[Any]:
    """Accuracies in the form that the hub indexes."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=row["task"],
            dataset_name=row["column"],
            metric_type=row["metric"],
            metric_value=round(row["value"], 4),
        )
        for row in rows
    ]
