"""The frozen original and what the student is held against: live, or from a cache on disk."""
