"""The directory of a run and what keeps the run safe: checkpoints, signals, watchdog, metrics."""
