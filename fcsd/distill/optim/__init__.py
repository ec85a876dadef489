"""The optimizer of a run and the places of its states."""
