"""Adapters, which nobody here uses."""


class LoRARequest: ...
