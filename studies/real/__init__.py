"""Healing of models that people know: from a checkpoint to its figures."""
