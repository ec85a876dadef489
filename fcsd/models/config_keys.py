"""Keys of config.json that several rooms need. This file imports nothing, so every room can read it."""

# The number of routed experts; a config has one of these keys, or two of them that are equal.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")

# transformers reads the name of the weights file from this key and refuses a name that is none, with the name in its
# message. A converted config.json has REFUSAL there, so that transformers' own class of the base refuses the directory
# instead of computing another function with its weights. fcsd's config classes ignore the key.
WEIGHTS_FILE = "transformers_weights"
REFUSAL = "this model is rewired; load it by an Auto class, with trust_remote_code=True or after `import fcsd`"
