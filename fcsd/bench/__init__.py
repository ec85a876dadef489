"""Measurements beside their baselines: `fcsd bench NAME`, or `python -m fcsd.bench.NAME` where no command exists."""
