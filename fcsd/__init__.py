"""Rewire, heal, prove and export mixture-of-experts checkpoints."""
