"""Chooses the families on which a test runs each day: one for each way in which transformers' code differs.

Ninety families share sixteen sources of norms and thirty of decoder layers. A test that is about norms finds the same
faults with one family of each source, so the daily run takes the first one, and ``pytest -m nightly`` all others. A new
family is a group of its own until its code, and what its row says about the parts, equals those of another.
"""

import ast
import re
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tiny

from fcsd.models.archs import ARCHS
from fcsd.parallel.tensor.tp_plan import tp_plan_of

# Part -> the names of transformers' classes and functions that compute it, without the family's own name.
_SOURCES = {
    "norm": r"\w*Norm\w*",
    "mlp": r"\w*(MLP|Mlp|FeedForward)",
    "moe": r"\w*(Mo[eE]|Expert|Router|SparseMoeBlock)\w*|\w*Gate",
    "rotary": r"rotate_half|apply_\w*rotary\w*",
    "attention": r"\w*Attention|\w*(Indexer|GatedDelta|Mamba|Mixer|Conv)\w*",
    "layer": r"\w*DecoderLayer|Block",
}
# Part -> the fields of our rows that say how fcsd takes it apart.
_FIELDS = {
    "norm": ("norm_epsilon", "norm_offset"),
    "mlp": (),
    "moe": ("dense",),
    "rotary": ("rotates_halves",),
    "attention": ("rotates_halves", "packs", "keeps_documents"),
    "layer": ("blocks", "dense"),
    "head": ("text_config", "final_norm", "logits_factor", "logits_cap", "spanning", "stored", "injected"),
    "shards": ("tp_plan", "no_tp", "norms_over_heads"),
}
_OF_IMAGES = re.compile(r"Vision|Audio|Image|Video|Patch|Projector|Merger")
_NOT_COMPUTED = ("__init__", "extra_repr", "compute_default_rope_parameters")


def representatives(*parts: str, of: Iterable[str] = tiny.CONFIGS, also: tuple[Any, ...] = ()) -> list[Any]:
    """The parameters of a test over families ``of`` that is about ``parts``: the others than the chosen are nightly.

    A family is chosen where one of the parts has code, or fields of our row about it, that no family before it has.

    Args:
        also: what stands behind the family in each parameter.
    """
    seen: set[object] = set()
    found: list[Any] = []
    for arch in of:
        groups = {(part, group(arch, part)) for part in parts}
        found.append(pytest.param(arch, *also, marks=[pytest.mark.nightly] if groups <= seen else []))
        seen |= groups
    return found


def by_day_and_night(*parts: str, of: Iterable[str] = tiny.CONFIGS) -> list[Any]:
    """The parameters of a test that takes many families at once: those chosen by ``representatives``, and the others.

    The second list is nightly.
    """
    cases = representatives(*parts, of=of)
    day, night = ([case.values[0] for case in cases if bool(case.marks) == late] for late in (False, True))
    return [pytest.param(day, id="day"), pytest.param(night, id="night", marks=pytest.mark.nightly)]


@cache
def group(arch: str, part: str) -> frozenset[str]:
    """What a family has in common with the others of its group: the code of the part, and its fields of our row.

    Args:
        arch: as ``tiny.config`` takes it, so also ``TYPE+TEXT``.
    """
    text = _inside(arch)
    row = ARCHS[arch.partition("+")[0]].around(text)
    fields = [f"{name}={getattr(row, name)}" for name in _FIELDS[part]]
    if part == "shards":  # most of its plan follows from the config's class and from usual names
        fields.append(repr(tp_plan_of(row, tiny.config(arch))))
    pattern = re.compile(_SOURCES.get(part, "(?!)"))
    return frozenset([*fields, *(_computed(code) for name, code in _code(text) if pattern.fullmatch(name))])


def _inside(arch: str) -> str:
    """The type whose code computes the language model of a family: that inside it, for types that take several."""
    own, _, text = arch.partition("+")
    if ARCHS[own].texts:
        text = text or tiny.CONFIGS[own][1]["text_config"]["model_type"]
    return text if text in ARCHS else text.removesuffix("_text") or own


@cache
def _code(model_type: str) -> list[tuple[str, str]]:
    """Names and sources of the functions and classes in a family's modeling file, without the family's own name.

    The file is read as text: to import ninety of them takes longer than most tests.
    """
    folder, stem = model_type.removesuffix("_text"), ARCHS[model_type].config.removesuffix("Config")
    spec = find_spec("transformers")
    assert spec and spec.origin
    source = (Path(spec.origin).parent / "models" / folder / f"modeling_{folder}.py").read_text()
    source = re.sub(rf"{stem.removesuffix('Text')}(Text)?", "", source)
    found = re.finditer(r"^(?:class|def) (\w+)[^\n]*(?:\n(?![@\w]).*)*", source, flags=re.MULTILINE)
    return [(match[1], match[0]) for match in found if not _OF_IMAGES.search(match[1])]


@cache
def _computed(source: str) -> str:
    """The statements of a function, or of the methods of a class: neither names and types of arguments, nor texts."""
    (tree,) = ast.parse(source).body
    methods = tree.body if isinstance(tree, ast.ClassDef) else [tree]
    functions = [each for each in methods if isinstance(each, ast.FunctionDef) and each.name not in _NOT_COMPUTED]
    lines = [
        line for each in functions for line in each.body if not isinstance(getattr(line, "value", 0), ast.Constant)
    ]
    return "\n".join(map(ast.unparse, lines))
