"""Sweeps: choose hyperparameters by short runs before the full run."""
