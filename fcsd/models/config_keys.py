"""Keys that transformers' configs have under several names. This file imports nothing, so every room can read it."""

# The number of routed experts; a config has one of these keys, or two of them that are equal.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
