"""Adapters: which linear layers of a model have them, and the layers of ``peft`` that compute them."""
