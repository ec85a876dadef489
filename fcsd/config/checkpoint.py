"""`checkpoint`: when a run saves, and what it keeps."""

from fcsd.config.fields import NonNegative, Positive, Section


class Checkpoint(Section):
    """When a run saves, and how many checkpoints it keeps."""

    every_steps: NonNegative = 100
    """The number of optimizer steps between checkpoints; 0 saves only at the last step."""
    keep: Positive = 2
    """The number of newest checkpoints to keep. The one with the best early-stopping score is always kept."""
