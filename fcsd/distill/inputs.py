"""The models and data files that a recipe names: that they exist is checked before torch is imported."""

from pathlib import Path

from fcsd.checkpoint import Checkpoint, expect_directory, open_checkpoint
from fcsd.config import Recipe
from fcsd.distill.data.files import require_apart
from fcsd.errors import BadInputError, ConfigError

_NO_BASE = "If it is an original, convert it or set init.wiring. If not, name its original in the recipe: `teacher:`."


def require_inputs(recipe: Recipe, conversion: str | None = None) -> None:
    """Check that the model, the teacher and the data files that a recipe names exist. No weight is read or downloaded.

    Args:
        conversion: the command that makes the model, if the recipe's file says it.

    Raises:
        BadInputError: the model or the teacher does not exist or is not a checkpoint, a data file does not exist, or
            the run would train on a file that it is to measure on.
        ConfigError: the format of a data file cannot be told from its name.
    """
    require_model(recipe, conversion)
    if recipe.teacher is not None:
        open_checkpoint(recipe.teacher, weights=False)
    require_apart(recipe.data.sources, recipe.data.measured)


def require_model(recipe: Recipe, conversion: str | None = None) -> None:
    """The part of :func:`require_inputs` about the model that is to be trained."""
    if Path(recipe.model).is_dir():
        expect_directory(Path(recipe.model), weights=recipe.init.weights == "loaded")
    elif conversion is not None and not Path(recipe.model).exists():
        raise BadInputError(
            f"{recipe.model}: there is no such directory here, and the recipe {recipe.name} trains the model in it",
            f"Convert the original first: {conversion}",
        )
    else:
        _resolve_student(recipe, weights=False)


def student_source(recipe: Recipe) -> Checkpoint:
    """The checkpoint that the student is made from. With random weights, only its config and tokenizer are fetched.

    Raises:
        BadInputError: the path does not exist or is not a checkpoint.
    """
    return _resolve_student(recipe, weights=recipe.init.weights == "loaded")


def _resolve_student(recipe: Recipe, *, weights: bool) -> Checkpoint:
    try:
        return open_checkpoint(recipe.model, weights=weights)
    except BadInputError as error:
        if recipe.init.wiring is None and not Path(recipe.model).exists():
            create = f"fcsd convert {recipe.teacher or 'ORIGINAL'} {recipe.model}"
            error.hint = (
                f"If you mean a directory that does not exist yet, create it: {create}. {error.hint or ''}".strip()
            )
        raise


def teacher_name(recipe: Recipe) -> str:
    """The directory or hub id of the teacher.

    It is the teacher of the recipe or, if the recipe names none, the original that the student was converted from.

    Raises:
        ConfigError: the recipe names no teacher and the student's config records no original.
    """
    if recipe.teacher is not None:
        return recipe.teacher
    if recipe.init.wiring is not None and recipe.init.weights == "loaded":
        return recipe.model
    original = open_checkpoint(recipe.model, weights=False).original
    if original is None:
        raise ConfigError(f"{recipe.model} records no base model", hint=_NO_BASE)
    return original
