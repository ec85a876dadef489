"""What depends on the version of transformers that is installed."""

from functools import cache
from importlib.metadata import version


@cache
def transformers_version() -> tuple[int, int]:
    """The first two numbers of the installed version."""
    major, minor = version("transformers").split(".")[:2]
    return int(major), int(minor)


def cache_keyword() -> str:
    """The name under which transformers' models, layers and attentions take the keys and values of earlier tokens.

    Since 5.24 a decorator of theirs still takes the older name, with a warning, and passes on the new one alone.
    """
    return "cache" if transformers_version() >= (5, 24) else "past_key_values"
