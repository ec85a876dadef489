"""From the sources of a recipe to packed rows of token ids."""
