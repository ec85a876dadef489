"""Measures whether a model kept its capability: benchmarks, fast scoring, paired comparison, and the verdict."""
