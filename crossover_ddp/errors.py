"""The errors that crossover_ddp raises at run time.

Wrong arguments raise ``ValueError`` or ``TypeError``, as usual in Python. These classes are for
problems that show only while the job runs.
"""


class CrossoverError(RuntimeError):
    """Base of every run-time error of this package."""


class UnsupportedConfigurationError(CrossoverError):
    """The model, process group or DDP options cannot work with the hook that was registered."""


class ExchangeError(CrossoverError):
    """A collective of the gradient exchange failed (a peer died, a connection broke, a timeout)."""


class ReplicasDifferError(CrossoverError):
    """Parameters differ between ranks. The message names one of them, the ranks and the step."""


class SegmentError(CrossoverError):
    """A shared-memory segment is foreign, malformed or unusable. The message names the file."""


class TurnError(CrossoverError):
    """Ranks cannot agree on turns (siblings share only some devices, or the job's store failed)."""
