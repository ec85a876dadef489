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
    overlap: bool = False
    """Whether the run continues while a checkpoint is written. The step then waits only until each process has copied
    its state to host memory, which holds that copy for the rest of the run; `fcsd plan` says how much. If the memory
    is not free, a warning says so, and the run waits for every checkpoint. The last checkpoint and the one before a
    preemption are always waited for. On GPUs only a small model has run with it, so it is off unless a recipe asks for
    it."""
