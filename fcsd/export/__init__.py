"""Writes the final directory of a model: its files, its card and the proof that it reloads; uploads it to the hub."""
