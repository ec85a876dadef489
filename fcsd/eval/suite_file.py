"""Reads an evaluation suite of a user's own from a YAML file: tasks of lm-eval, with settings where they differ."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from fcsd.config.explain import explain
from fcsd.config.fields import NonNegative, Positive, Section
from fcsd.errors import ConfigError
from fcsd.recipes import strict_yaml


class Task(Section):
    """A task or group of lm-eval. What is left out is as its definition there says."""

    task: Annotated[str, Field(min_length=1)]
    """Its name in lm-eval."""
    column: Annotated[str, Field(min_length=1)] | None = None
    """Its heading in tables; null takes the name."""
    shots: NonNegative | None = None
    """Examples in each prompt."""
    metric: str = ""
    """What is reported: a mean over questions, such as acc_norm, or a perplexity."""
    filter: str = ""
    """lm-eval's filter, which extracts the answer from generated text."""
    chat: bool = False
    """Whether the tokenizer's chat template wraps the prompt."""
    max_tokens: Positive | None = None
    """The longest generated answer."""
    chance: Annotated[float, Field(ge=0, le=100)] | None = None
    """The score of guessing, in points; null where the number of choices says it."""


class Suite(Section):
    """The whole file."""

    tasks: Annotated[list[Task], Field(min_length=1)]
    """The columns of the table, in their order."""


def read_tasks(path: Path) -> list[Task]:
    """The tasks of a suite in a file, whose entries are names or mappings.

    Raises:
        ConfigError: there is no such file, it is not strict YAML or no suite, or two columns have the same name.
    """
    if not path.is_file():
        raise ConfigError(f"--suite {path}: no such file", "docs/adding_a_suite.md has an example.")
    values, lines = strict_yaml.parse_file(path)
    if isinstance(values, dict) and isinstance(values.get("tasks"), list):
        entries = [{"task": entry} if isinstance(entry, str) else entry for entry in values["tasks"]]
        values = {**values, "tasks": entries}
    try:
        tasks = Suite.model_validate(values).tasks
    except ValidationError as error:
        places = {key: f"{path}:{line}" for key, line in lines.items()}
        raise ConfigError("\n".join(explain(problem, places, Suite) for problem in error.errors())) from error
    columns = [task.column or task.task for task in tasks]
    if twice := [column for column in columns if columns.count(column) > 1]:
        raise ConfigError(f"{path}: two tasks have the column {twice[0]!r}", "Give one of them another `column`.")
    return tasks
