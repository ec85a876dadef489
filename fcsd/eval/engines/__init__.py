"""The engines that run a model in an evaluation: one lm-eval adapter over transformers, and one over vLLM."""
