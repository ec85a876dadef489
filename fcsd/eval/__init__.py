"""Did the model keep its capability? The benchmarks as a table, a fast scorer, and a paired verdict."""
