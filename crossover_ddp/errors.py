"""The errors that crossover_ddp raises at run time.

Wrong arguments raise ``ValueError`` or ``TypeError`` as everywhere in Python; these classes are for
what only the running job can find out.
"""


class CrossoverError(RuntimeError):
    """Base of every run-time error of this package."""


class UnsupportedConfigurationError(CrossoverError):
    """The model, process group or DDP options cannot work with the hook that was registered."""


class ExchangeError(CrossoverError):
    """A collective of the gradient exchange failed (a peer died, a connection broke, a timeout)."""


class ReplicasDifferError(CrossoverError):
    """Parameters that must be the same on all ranks are not; the message names one, the ranks and the step."""


class SegmentError(CrossoverError):
    """A shared-memory segment is foreign, malformed or unusable; the message names the file and the mend."""


class TurnError(CrossoverError):
    """Turns cannot be agreed on (siblings share only some devices, the job's store fails)."""
