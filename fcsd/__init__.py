"""Rewire, heal, prove and export mixture-of-experts checkpoints.

``import fcsd`` makes transformers' Auto classes load converted checkpoints without remote code. It imports neither
torch nor transformers itself: registration happens when transformers' Auto classes are imported.
"""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

_AUTO = "transformers.models.auto.modeling_auto"


def _register() -> None:
    from .models.build import register

    register()


class _RegisterOnImport(MetaPathFinder):
    """Runs ``_register`` once, right after the module ``_AUTO`` has been imported for the first time."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if fullname != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_then_register(module: ModuleType) -> None:
            run(module)
            sys.modules[_AUTO] = module
            _register()

        spec.loader.exec_module = run_then_register
        return spec


if _AUTO in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _RegisterOnImport())
