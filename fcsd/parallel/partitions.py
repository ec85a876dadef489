"""Sizes of what ZeRO partitions and sends at once, in parameters. Runs set them and plans count with them."""

GROUP = 2**28  # parameters of a group of the optimizer, which ZeRO copies in its step, unless one tensor has more
BUCKET = 500_000_000  # gradients that are reduced at once; DeepSpeed's default
