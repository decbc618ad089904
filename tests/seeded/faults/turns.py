"""Faults of turns."""

from typing import Final

from tests.seeded.fault import Fault

_RULES = "crossover_ddp/_turns/rules.py"
_MODEL = ("tests/unit/turns/test_turn_model.py", "-k", "promise")
_JOINING = "tests/multiprocess/test_joining.py"

TURNS: Final[tuple[Fault, ...]] = (
    Fault(
        "a rank waits for the lowest turn alone, and for none once it has passed that over",
        _RULES,
        "for first in waiting:\n",
        "for first in waiting[:1]:\n",
        _MODEL,
    ),
    Fault(
        "who passes one job over forgets the jobs that it passed over before",
        _RULES,
        "{known: each for known, each in self._forgiven.items() if known in present}",
        "{}",
        _MODEL,
    ),
    Fault(
        "a slot's record of its earlier owner is taken for one of the present owner",
        _RULES,
        "if last > member.joined_at:",
        "if last >= member.joined_at:",
        _MODEL,
    ),
    Fault(
        "of several jobs a grant names the last alone",
        _RULES,
        "tuple(sorted(after.items()))",
        "tuple(sorted(after.items())[-1:])",
        _MODEL,
    ),
    Fault(
        "a rank waits until earlier turns have begun, not until they are given back",
        _RULES,
        "member.returned < needed.get(member.job, 0)",
        "member.started < needed.get(member.job, 0)",
        _MODEL,
    ),
    Fault(
        "only rank 0's problem keeps a job from joining",
        "crossover_ddp/_turns/joining.py",
        "enumerate(everyone):",
        "enumerate(everyone[:1]):",
        (_JOINING, "-k", "memory_that_is_full"),
    ),
    Fault(
        "every rank of a model on some of the job's ranks says that it takes no turns",
        "crossover_ddp/comm_hooks.py",
        "if group not in _warned_partial and group.rank() == 0:",
        "if group not in _warned_partial:",
        (_JOINING, "-k", "several_groups and False"),
    ),
)
