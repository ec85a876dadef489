"""A stand-in for vLLM at the border that ``fcsd bench serve`` talks to: ``vllm serve`` with OpenAI's completions."""

__version__ = "0.28.0"
