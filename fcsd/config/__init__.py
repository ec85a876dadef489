"""The sections of a recipe, which holds every setting of a distillation run, and the origin of every value.

The precedence of values is: default < base recipe < recipe < --set < flag. Paths are relative to the current directory
and are taken literally. Each file of a section holds that section alone. Other packages import everything from here.
"""

from fcsd.config.batch import accumulation
from fcsd.config.checkpoint import Checkpoint
from fcsd.config.data import Data, Source
from fcsd.config.faults import Faults
from fcsd.config.objective import TERMS, Hidden, Objective
from fcsd.config.optim import Optim
from fcsd.config.parallel import Parallel, Quantised
from fcsd.config.recipe import HELD_OUT, NO_METRIC, EarlyStop, Init, Recipe, Report, Sweep
from fcsd.config.resolve import ResolvedRecipe, load_recipe, value_of, vary
from fcsd.config.train import Adapter, Train

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
