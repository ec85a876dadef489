"""Loads the tokenizer of a model directory, and says so in one line if there is none."""

from pathlib import Path
from typing import TYPE_CHECKING

from fcsd.errors import BadInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer in a model directory. Code in the directory is not run.

    Raises:
        BadInputError: the directory has no tokenizer, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model), trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(": ")
        raise BadInputError(
            f"{model}: there is no usable tokenizer ({reason})",
            "Copy tokenizer.json and tokenizer_config.json of the model into this directory.",
        ) from error
