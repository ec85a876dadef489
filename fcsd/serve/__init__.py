"""What answers: chat in a terminal, the server of a converted model, and fcsd's plugin for vLLM."""
