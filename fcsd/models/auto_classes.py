"""Lets transformers' Auto classes load converted checkpoints without remote code once fcsd is imported.

The classes of converted models derive from transformers' own, so making them imports torch and transformers.
``import fcsd`` must stay light and therefore only prepares for it: the classes of a ``model_type`` that starts with
``fcsd_`` are made and registered when transformers looks it up.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from fcsd.models.config_keys import PREFIX

_CONFIGS = "transformers.models.auto.configuration_auto"


def prepare_transformers() -> None:
    """Let transformers find the converted types, whether it is imported already or will be imported later."""
    if _CONFIGS in sys.modules:
        _prepare(sys.modules[_CONFIGS])
    else:
        sys.meta_path.insert(0, _PrepareOnImport())


class _Registered(dict[str, Any]):
    """transformers' table of added model types; it registers each of fcsd's types when that is first looked up.

    It cannot do so earlier: transformers also imports its Auto classes while it is importing a model that one of
    fcsd's classes would derive from.
    """

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__(known)
        self._looked_up: set[str] = set()

    def __contains__(self, model_type: object) -> bool:
        if isinstance(model_type, str) and model_type.startswith(PREFIX) and model_type not in self._looked_up:
            self._looked_up.add(model_type)
            from fcsd.models.archs import ARCHS
            from fcsd.models.build import register

            if (own := model_type.removeprefix(PREFIX)) in ARCHS:
                register(own)
        return super().__contains__(model_type)


def _prepare(module: ModuleType) -> None:
    module.CONFIG_MAPPING._extra_content = _Registered(module.CONFIG_MAPPING._extra_content)


class _PrepareOnImport(MetaPathFinder):
    """Runs ``_prepare`` once, right after the module ``_CONFIGS`` has been imported for the first time."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != _CONFIGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_then_prepare(module: ModuleType) -> None:
            run(module)
            _prepare(module)

        spec.loader.exec_module = run_then_prepare
        return spec
