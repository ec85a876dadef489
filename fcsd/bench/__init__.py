"""Benchmarks that measure a part of fcsd and its baseline: `fcsd bench NAME`, or `python -m fcsd.bench.NAME`."""
