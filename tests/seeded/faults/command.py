"""Faults of the command, and of what tests start."""

from typing import Final

from tests.seeded.fault import Fault

_DEFECTS = "tests/defects/test_command.py"

_RUN = "tests/unit/cli/test_run.py"
_ADVISE = "tests/unit/cli/test_advise.py"

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
        "a job that is measured is left to train on",
        "crossover_ddp/cli/advise.py",
        "            job.finish(signal.SIGTERM, _GRACE_S)\n",
        "            pass\n",
        (_ADVISE, "-k", "signal_ends"),
    ),
    Fault(
        "buckets that were held back are sums",
        "crossover_ddp/cli/step_meter.py",
        "dist.all_reduce(buffer.div_(group.size()), ",
        "dist.all_reduce(buffer.div_(1 if self._apart else group.size()), ",
        (_ADVISE, "-k", "trains_as_plain"),
    ),
    Fault(
        "a rank that waits for another computes",
        "crossover_ddp/cli/advise.py",
        'block["step_s"] - block["met_s"] - block["wire_s"]',
        'block["step_s"] - block["wire_s"]',
        (_ADVISE, "-k", "slowest_rank"),
    ),
    Fault(
        "a huge bucket delays no other one",
        "crossover_ddp/cli/advise.py",
        "min(expected[DECOUPLED], plain_s / decoupled_s)",
        "expected[DECOUPLED]",
        (_ADVISE, "-k", "buckets_simulated"),
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
