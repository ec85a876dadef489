"""Rewire, heal, prove and export mixture-of-experts checkpoints."""

__version__ = "0.1.0"
