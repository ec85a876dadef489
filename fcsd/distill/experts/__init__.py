"""Divided experts in a run: how they are wired, moved and deduplicated."""
