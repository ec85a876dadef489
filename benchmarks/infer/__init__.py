"""The benchmark of inference: one workload for fcsd's own engine and for vLLM, with rows of the same form."""
