"""Choosing hyperparameters by short runs before the full run."""
