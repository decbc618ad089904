"""The errors that crossover_ddp raises at run time.

Wrong arguments raise ``ValueError`` or ``TypeError``, as usual in Python. These classes report
problems that appear only while the job runs.
"""


class CrossoverError(RuntimeError):
    """Base class of all run-time errors in this package."""


class UnsupportedConfigurationError(CrossoverError):
    """The model, the process group or the DDP options do not work with the registered hook."""


class ExchangeError(CrossoverError):
    """A collective of the gradient exchange failed: a peer died, a link broke or time ran out."""


class ReplicasDifferError(CrossoverError):
    """Parameters differ between ranks. The message names one parameter, the ranks and the step."""


class SegmentError(CrossoverError):
    """A shared-memory segment is foreign, malformed or unusable. The message names the file."""


class TurnError(CrossoverError):
    """Ranks cannot agree on turns: siblings share only some devices, or the job's store failed."""
