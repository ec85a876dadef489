"""The sections of a recipe, which holds every setting of a distillation run, and the origin of every value.

The precedence of values is: default < base recipe < recipe < --set < flag. Paths are relative to the current directory
and are taken literally. Other packages import everything from here.
"""

from fcsd.config.recipe import (
    HELD_OUT,
    NO_METRIC,
    Checkpoint,
    EarlyStop,
    Faults,
    Init,
    Optim,
    Recipe,
    Report,
    Sweep,
    accumulation,
)
from fcsd.config.resolve import ResolvedRecipe, load_recipe, value_of, vary
from fcsd.config.sections import TERMS, Adapter, Data, Hidden, Objective, Parallel, Quantised, Source, Train

__all__ = [
    "HELD_OUT",
    "NO_METRIC",
    "TERMS",
    "Adapter",
    "Checkpoint",
    "Data",
    "EarlyStop",
    "Faults",
    "Hidden",
    "Init",
    "Objective",
    "Optim",
    "Parallel",
    "Quantised",
    "Recipe",
    "Report",
    "ResolvedRecipe",
    "Source",
    "Sweep",
    "Train",
    "accumulation",
    "load_recipe",
    "value_of",
    "vary",
]
