"""`faults`: what a run does about values that are not finite, full disks, stuck processes and SIGTERM."""

from typing import Annotated

from pydantic import Field

from fcsd.config.fields import NonNegative, Section


class Faults(Section):
    """What a run tolerates before it ends itself."""

    nonfinite_skip: NonNegative = 0
    """The number of successive optimizer steps with a NaN or infinite loss or gradient that are skipped; one more ends
    the run. Such a step never changes a weight."""
    save_failures: NonNegative = 3
    """The number of successive checkpoints that may fail because the disk is full; one more ends the run."""
    stuck_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """The longest time, in seconds, that a process may spend on one step before the run ends itself. Saving and scoring
    count as parts of a step."""
    grace_seconds: Annotated[float, Field(gt=0)] = 30.0
    """The time, in seconds, between SIGTERM and the end of the process. No checkpoint is begun that would probably take
    longer than what is left of it."""
