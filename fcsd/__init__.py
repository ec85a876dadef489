"""Rewire, heal, prove and export mixture-of-experts checkpoints: the Python API.

The functions are those that the command line calls; ``docs/python.md`` shows them at work. Each name is imported from
its room when it is first used, so ``import fcsd`` loads neither torch nor transformers. It makes transformers' Auto
classes load converted checkpoints without remote code.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fcsd.extras import require_extra
from fcsd.models import auto_classes
from fcsd.version import __version__ as __version__

__all__ = [
    "Wiring",
    "compare_models",
    "convert_checkpoint",
    "distill_model",
    "evaluate_models",
    "export_model",
    "inspect_checkpoint",
    "load_model",
    "load_recipe",
    "plan_run",
    "push_model",
    "wire",
]

_EXTRAS = {"compare_models": "eval", "distill_model": "train", "evaluate_models": "eval"}  # what each one needs

if TYPE_CHECKING:
    from fcsd.checkpoint.inspection import inspect_checkpoint
    from fcsd.config.resolve import load_recipe
    from fcsd.convert import convert_checkpoint
    from fcsd.distill.loop import distill_model
    from fcsd.eval.compare import compare_models
    from fcsd.eval.harness import evaluate_models
    from fcsd.export.final import export_model
    from fcsd.export.push import push_model
    from fcsd.models.build import load_model, wire
    from fcsd.models.wiring_block import Wiring
    from fcsd.plan import plan_run
else:  # a type checker that saw __getattr__ would accept any name
    _MODULES = {
        "Wiring": "fcsd.models.wiring_block",
        "compare_models": "fcsd.eval.compare",
        "convert_checkpoint": "fcsd.convert",
        "distill_model": "fcsd.distill.loop",
        "evaluate_models": "fcsd.eval.harness",
        "export_model": "fcsd.export.final",
        "inspect_checkpoint": "fcsd.checkpoint.inspection",
        "load_model": "fcsd.models.build",
        "load_recipe": "fcsd.config.resolve",
        "plan_run": "fcsd.plan",
        "push_model": "fcsd.export.push",
        "wire": "fcsd.models.build",
    }

    def __getattr__(name: str) -> Any:
        """The function or class of this name, imported from its room."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name in _EXTRAS:
            require_extra(_EXTRAS[name], f"fcsd.{name}")
        return getattr(import_module(_MODULES[name]), name)

    def __dir__() -> list[str]:
        """What completion offers."""
        return [*__all__, "__version__"]


auto_classes.prepare_transformers()
