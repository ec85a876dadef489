"""The benchmark of a training step: ``python -m benchmarks.train.step``."""
