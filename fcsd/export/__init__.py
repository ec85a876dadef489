"""The final directory of a model: its files, its card, the proof that it reloads, and its way to the hub."""
