"""Which layers to convert: the sweep over the first and last N layers, and the search for a choice."""
