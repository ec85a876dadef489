"""IFEval: the libraries that its rules need, and its aggregated accuracy."""

from collections.abc import Sequence
from typing import Any

from fcsd.errors import ConfigError
from fcsd.extras import require_extra

# The mean of the four accuracies that lm-eval reports for IFEval.
AGGREGATED = "aggregated_acc"


def require_ifeval_tools() -> None:
    """Refuse IFEval where its libraries are missing.

    lm-eval looks for them late: it would use the network, or fail after all answers have been generated.

    Raises:
        ConfigError: a library is missing. The message says what to install.
    """
    require_extra("eval", "IFEval", "immutabledict", "langdetect", "nltk")
    import nltk

    try:
        nltk.data.find("tokenizers/punkt_tab")
    except LookupError:
        raise ConfigError(
            "IFEval counts sentences by NLTK's punkt_tab, which is not installed",
            "python -m nltk.downloader punkt_tab; offline, copy tokenizers/punkt_tab into a directory of NLTK_DATA",
        ) from None


def aggregated_items(samples: Sequence[dict[str, Any]]) -> list[float]:
    """The contribution of each prompt to the mean of IFEval's four accuracies; the mean of the items is that mean.

    The four are the shares of prompts and of instructions that are followed, each judged strictly and loosely.
    An instruction counts the same in whichever prompt it stands, so a prompt with more instructions than the average
    one may add more than 1.

    Args:
        samples: lm-eval's samples, with its four metrics.
    """
    instructions = sum(len(sample["inst_level_strict_acc"]) for sample in samples)
    per_instruction = len(samples) / instructions
    return [
        sum(
            float(sample[f"prompt_level_{how}_acc"]) + sum(sample[f"inst_level_{how}_acc"]) * per_instruction
            for how in ("strict", "loose")
        )
        / 4
        for sample in samples
    ]
