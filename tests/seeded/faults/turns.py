"""Faults of turns."""

from typing import Final

from tests.seeded.fault import Fault

_RULES = "crossover_ddp/_turns/rules.py"
_MODEL = ("tests/unit/turns/test_turn_model.py", "-k", "promise")
_TRIAL = "tests/unit/turns/test_trial.py"
_JOINING = "tests/multiprocess/test_joining.py"
_DEFECTS = "tests/defects/test_turns.py"

TURNS: Final[tuple[Fault, ...]] = (
    Fault(
        "a rank waits for the lowest turn alone, and for none once it has passed that over",
        _RULES,
        "for each in waiting if not",
        "for each in waiting[:1] if not",
        _MODEL,
    ),
    Fault(
        "who passes one job over forgets the jobs that it passed over before",
        _RULES,
        "if each.job == lost.job or _progress(each) in self.passed]",
        "if each.job == lost.job]",
        _MODEL,
    ),
    Fault(
        "a slot's record of its earlier owner is taken for one of the present owner",
        _RULES,
        "and last > member.joined_at:",
        "and last >= member.joined_at:",
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
    Fault(
        "giving a turn back asks the job's store",
        "crossover_ddp/_turns/turns.py",
        "        if self._lease.note(time.monotonic() - turn.began_s):\n",
        "        if self._channel is not None:\n"
        "            self._channel._connected().add(f'wait/{turn.number}', 0)\n"
        "        if self._lease.note(time.monotonic() - turn.began_s):\n",
        (_DEFECTS, "-k", "given_back"),
    ),
    Fault(
        "a job that wants turns is not heeded",
        _RULES,
        "        if not self._all_try:\n",
        "        if False:\n",
        (_TRIAL, "-k", "wants_turns"),
    ),
    Fault(
        "a trial counts the votes of the one before",
        _RULES,
        " and each.tried == self.begun_at and each.vote.pairs",
        " and each.vote.pairs",
        (_TRIAL, "-k", "again"),
    ),
    Fault(
        "a turn side by side waits for siblings",
        _RULES,
        "        for member in members if mode.waits else ():\n",
        "        for member in members:\n",
        (_TRIAL, "-k", "waits_for_nobody"),
    ),
    Fault(
        "a turn in which nothing is computed is kept",
        "crossover_ddp/_turns/turns.py",
        "        return self._idle >= _IDLE_LOOKS\n",
        "        return False\n",
        ("tests/multiprocess/test_gpu_mutex_jobs.py", "-k", "lent"),
    ),
    Fault(
        "nobody looks whose turns a mutex takes",
        "crossover_ddp/_engine/turns.py",
        "    if own != theirs and (theirs or len(own) > 1):\n",
        "    if False:\n",
        (_DEFECTS, "-k", "other_ranks"),
    ),
    Fault(
        "a process may be its own sibling",
        "crossover_ddp/_turns/joining.py",
        "        if place in _places:\n",
        "        if False:\n",
        (_DEFECTS, "-k", "two_mutexes"),
    ),
    Fault(
        "channels of a store are not told apart",
        "crossover_ddp/_turns/channel.py",
        'f"crossover-turns-{self._met(dist.PrefixStore(_MEETING, own))}"',
        '"crossover-turns"',
        (_DEFECTS, "-k", "same_store"),
    ),
    Fault(
        "release waits for the thread that waits for a turn",
        "crossover_ddp/_turns/turns.py",
        "        if not self._is_here() or not self.holding:\n            return\n",
        "        while not self.holding:\n            time.sleep(0.01)\n",
        (_DEFECTS, "-k", "beside_a_thread"),
    ),
    Fault(
        "an interrupted wait leaves its turn to siblings",
        "crossover_ddp/_turns/turns.py",
        "            self._put(functools.partial(self._give_up, wanted))\n            raise\n",
        "            raise\n",
        (_DEFECTS, "-k", "interrupted"),
    ),
    Fault(
        "the default name of a CPU is the whole machine's",
        "crossover_ddp/_system/device.py",
        'f"cpu-{machine()}{_cores()}"',
        'f"cpu-{machine()}"',
        (_DEFECTS, "-k", "pinned"),
    ),
    Fault(
        "nobody says who removes files under way",
        "crossover_ddp/_turns/segment.py",
        "where logind removes shared memory at logout, loginctl enable-linger keeps it; ",
        "",
        (_DEFECTS, "-k", "missed_aloud"),
    ),
)
