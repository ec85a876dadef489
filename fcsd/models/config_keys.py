"""Keys of config.json that several packages need. This file imports nothing, so that each of them can import it."""

# The model_type of a converted checkpoint is this prefix followed by that of its base.
PREFIX = "fcsd_"

# The number of routed experts; a config has one of these keys, or two of them that are equal.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")

# transformers reads the name of the weights file from this key. If the value is not a file name, transformers refuses
# the directory with a message that contains the value. A converted config.json has REFUSAL as the value, so that the
# base class of transformers refuses the directory instead of computing a different function with its weights. The
# config classes of fcsd ignore the key.
WEIGHTS_FILE = "transformers_weights"
REFUSAL = "this model is rewired; load it by an Auto class, with trust_remote_code=True or after `import fcsd`"
