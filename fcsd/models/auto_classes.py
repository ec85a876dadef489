"""Lets transformers' Auto classes load converted checkpoints without remote code once fcsd is imported.

The classes of converted models derive from transformers' own, so making them imports torch and transformers.
``import fcsd`` must stay light and therefore only prepares for it: the classes are made and registered when
transformers looks up the first ``model_type`` that starts with ``fcsd_``.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_CONFIGS = "transformers.models.auto.configuration_auto"


def prepare_transformers() -> None:
    """Let transformers find the converted types, whether it is imported already or will be imported later."""
    if _CONFIGS in sys.modules:
        _prepare(sys.modules[_CONFIGS])
    else:
        sys.meta_path.insert(0, _PrepareOnImport())


class _Registered(dict[str, Any]):
    """transformers' table of added model types; it registers fcsd's types when the first of them is looked up.

    It cannot do so earlier: transformers also imports its Auto classes while it is importing a model that one of
    fcsd's classes would derive from.
    """

    _made = False

    def __contains__(self, model_type: object) -> bool:
        if not self._made and isinstance(model_type, str) and model_type.startswith("fcsd_"):
            self._made = True
            from fcsd.models.build import register

            register()
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
