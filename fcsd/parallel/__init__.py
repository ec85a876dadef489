"""Decides when and how a model communicates: several ranks together compute the function that ``models/`` defines."""
