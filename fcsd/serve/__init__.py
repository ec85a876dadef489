"""Generation and scoring with a model in memory: caches, decoding, log-probabilities and chat."""
