"""`checkpoint`: when a run saves, and what it keeps."""

from typing import Annotated

from pydantic import Field

from fcsd.config.fields import NonNegative, Positive, Section


class Checkpoint(Section):
    """When a run saves, and how many checkpoints it keeps."""

    every_steps: NonNegative = 100
    """The number of optimizer steps between checkpoints; 0 saves by time or only at the last step."""
    every_minutes: Annotated[float, Field(ge=0)] = 0.0
    """The time between checkpoints, in minutes, besides `every_steps`; 0 saves by steps only. A long run should save by
    time: what a kill costs is then bounded, and the disk is not kept busy by short steps."""
    keep: Positive = 2
    """The number of newest checkpoints to keep. The one with the best early-stopping score is always kept."""
