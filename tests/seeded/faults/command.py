"""Faults of the command, and of what tests start."""

from typing import Final

from tests.seeded.fault import Fault

_DEFECTS = "tests/defects/test_command.py"

_RUN = "tests/unit/cli/test_run.py"

COMMAND: Final[tuple[Fault, ...]] = (
    Fault(
        "a runner that cannot write fails",
        "crossover_ddp/cli/output.py",
        "    with contextlib.suppress(OSError):\n        os.write(",
        "    with contextlib.suppress(BrokenPipeError):\n        os.write(",
        (_DEFECTS, "-k", "ends_well or end_well"),
    ),
    Fault(
        "only ids make a rendezvous of its own",
        "crossover_ddp/cli/run.py",
        "(?:endpoint|port)",
        "(?:id|port)",
        (_DEFECTS, "-k", "one_endpoint"),
    ),
    Fault(
        "what has left a job's session outlives it",
        "crossover_ddp/cli/jobs.py",
        "            for pid in self.left() if number == signal.SIGKILL or not running else ():\n",
        "            for pid in ():\n",
        (_RUN, "-k", "leaves_running"),
    ),
    Fault(
        "jobs do not hear the signals that the runner waits for",
        "crossover_ddp/cli/jobs.py",
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING",
        "signal.pthread_sigmask(signal.SIG_BLOCK, ENDING",
        (_RUN, "-k", "have_the_signals"),
    ),
    Fault(
        "a job outlives a runner that was killed",
        "crossover_ddp/cli/jobs.py",
        "            _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)\n",
        "",
        (_RUN, "-k", "killed_runner"),
    ),
    Fault(
        "all jobs have one port",
        "crossover_ddp/cli/run.py",
        "int(first) + self._begun - 1",
        "int(first)",
        (_RUN, "-k", "ports_of_their_own"),
    ),
    Fault(
        "children ignore the signals that the suite ignores",
        "tests/harness/scripts.py",
        "        if signal.getsignal(number) is signal.SIG_IGN:\n",
        "        if False:\n",
        ("tests/harness/test_scripts.py", "-k", "take_signals"),
    ),
)
