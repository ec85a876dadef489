"""How a model is asked: the lm-eval adapter over transformers, and the one over vLLM."""
