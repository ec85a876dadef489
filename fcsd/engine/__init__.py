"""fcsd's own tensor-parallel model and its generator: for scoring, chat and the papers' tables. vLLM is the server."""
