"""Faults of the command, and of what tests start."""

from typing import Final

from tests.seeded.fault import Fault

_DEFECTS = "tests/defects/test_command.py"

COMMAND: Final[tuple[Fault, ...]] = (
    Fault(
        "only a closed pipe may keep the runner from showing something",
        "crossover_ddp/cli/run/output.py",
        "        except (OSError, ValueError):\n            self._lost",
        "        except (BrokenPipeError, ValueError):\n            self._lost",
        (_DEFECTS, "-k", "ends_well or end_well"),
    ),
    Fault(
        "what a non-blocking terminal does not take at once is lost",
        "crossover_ddp/cli/run/output.py",
        "            left = left[full.characters_written :]\n",
        "            left = left[len(left) :]\n",
        (_DEFECTS, "-k", "non_blocking"),
    ),
    Fault(
        "any word torchrun is the program",
        "crossover_ddp/cli/run/ports.py",
        '        if name.startswith("python"):\n',
        "        if False:\n",
        (_DEFECTS, "-k", "argument_called"),
    ),
    Fault(
        "an id makes a rendezvous of its own at the same endpoint",
        "crossover_ddp/cli/run/ports.py",
        'and found.rdzv_backend not in ("c10d", "static")',
        "",
        (_DEFECTS, "-k", "one_endpoint"),
    ),
    Fault(
        "children ignore the signals that the suite ignores",
        "tests/harness/scripts.py",
        "        if signal.getsignal(number) is signal.SIG_IGN:\n",
        "        if False:\n",
        ("tests/harness/test_scripts.py", "-k", "take_signals"),
    ),
)
