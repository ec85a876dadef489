"""Makes what a process makes once for all families: their rewired classes, and transformers' tables of weights' names.

``ranks.py`` imports this before it forks. Nothing is registered, so a command must still do that.
"""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from fcsd.models.archs import ARCHS
from fcsd.models.build import model_classes

for model_type in ARCHS:
    model_classes(model_type)
    get_checkpoint_conversion_mapping(model_type)
