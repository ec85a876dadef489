"""The random generators of a process, put down as JSON and taken up again."""

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Every global random generator of this process, as JSON."""
    version, words, position = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": [version, list(words), position],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": None if cuda is None else _text(cuda),
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Puts every generator where ``random_state`` found it."""
    version, words, position = state["python"]
    random.setstate((version, tuple(words), position))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_tensor(state["torch"]))
    if state["cuda"] is not None:
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
