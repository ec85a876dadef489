"""Checkpoints whose weights are quantised: which method, which tensors it implies, and the values that they stand for.

``method`` reads what config.json says. ``layouts`` has one row for each way in which the weights of a linear layer are
stored, with its tensors, and ``values`` its decoder and what their values must satisfy. ``decode`` makes the plain
tensors of a checkpoint from that, one at a time. Nothing here writes a tensor: a conversion keeps the quantised files.
"""
