"""A recipe: everything a distillation run depends on, where each value came from, and the file that says so.

Precedence: default < base recipe < recipe < --set < flag. Paths are relative to the current directory and taken
literally. A file holds a section; everything is imported from here.
"""

from fcsd.config.batch import accumulation
from fcsd.config.data import Data, Source
from fcsd.config.objective import Hidden, Objective, TeacherCache
from fcsd.config.recipe import HELD_OUT, NO_METRIC, EarlyStop, Recipe, Sweep
from fcsd.config.resolve import ResolvedRecipe, load_recipe, value_of, vary
from fcsd.config.train import Train

__all__ = [
    "HELD_OUT",
    "NO_METRIC",
    "Data",
    "EarlyStop",
    "Hidden",
    "Objective",
    "Recipe",
    "ResolvedRecipe",
    "Source",
    "Sweep",
    "TeacherCache",
    "Train",
    "accumulation",
    "load_recipe",
    "value_of",
    "vary",
]
