"""Benchmarks, each runnable as ``python -m fcsd.bench.<name>``."""
