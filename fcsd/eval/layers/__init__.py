"""Finds out which layers to convert: a sweep over the first and the last N layers, and a search for the best set."""
