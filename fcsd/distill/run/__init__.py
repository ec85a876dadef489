"""The run directory, and the parts that protect and record a run: checkpoints, signals, watchdog, metrics."""
