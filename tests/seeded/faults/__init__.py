"""The faults, by what is broken. A fault stands here when a test that found it was shortened, moved or shared."""

from typing import Final

from tests.seeded.fault import Fault

from .averaging import AVERAGING
from .checkpoints import CHECKPOINTS
from .codecs import CODECS
from .command import COMMAND
from .decoupled import DECOUPLED
from .device import DEVICE
from .engine import ENGINE
from .exchange import EXCHANGE
from .kfac import KFAC
from .owners import OWNERS
from .pipeline import PIPELINE
from .recipes import RECIPES
from .risks import RISKS
from .stats import STATS
from .turns import TURNS

FAULTS: Final[tuple[Fault, ...]] = (
    *ENGINE,
    *EXCHANGE,
    *DECOUPLED,
    *KFAC,
    *CODECS,
    *AVERAGING,
    *OWNERS,
    *CHECKPOINTS,
    *PIPELINE,
    *TURNS,
    *COMMAND,
    *RECIPES,
    *RISKS,
    *DEVICE,
    *STATS,
)
