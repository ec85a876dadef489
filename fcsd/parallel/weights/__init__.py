"""Loads, saves and randomly initialises models with divided experts, whose tensors it maps to those on disk."""
