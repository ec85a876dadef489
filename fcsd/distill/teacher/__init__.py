"""The frozen teacher and the targets of the student, which come from a model in memory or from a cache on disk."""
