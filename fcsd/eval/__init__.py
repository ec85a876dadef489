"""Did the model keep its capability? Benchmarks, fast scoring, paired comparison, and the verdict."""
