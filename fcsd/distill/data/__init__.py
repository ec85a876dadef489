"""Turns the data sources of a recipe into packed rows of token ids."""
