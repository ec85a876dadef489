"""Adapters: which linear layers of a model have them, and the layers of ``peft`` that compute them."""

GROUPS = ("attention", "mlp", "shared_experts")  # the groups of linear layers that adapters are beside
