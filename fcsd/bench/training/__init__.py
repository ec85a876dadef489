"""The training-step benchmark: variants of one step, their bound, their equality, and their traces."""
