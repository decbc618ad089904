"""Faults of averaged replicas."""

from typing import Final

from tests.seeded.fault import Fault

AVERAGING: Final[tuple[Fault, ...]] = (
    Fault(
        "what was sent is not kept, so that late means change nothing",
        "crossover_ddp/_averaging/delayed.py",
        "sent = values.clone() if self.schedule.delay else None",
        "sent = values if self.schedule.delay else None",
        (
            "tests/multiprocess/test_averaging.py",
            "-k",
            "2-delayed",
        ),
    ),
    Fault(
        "the outer optimizer's anchor stays where training began",
        "crossover_ddp/_averaging/outer.py",
        "        torch.add(values, self._distance.data, out=self.anchor)\n        own.copy_(self.anchor)\n",
        "        own.copy_(values + self._distance.data)\n",
        (
            "tests/multiprocess/test_averaging.py",
            "-k",
            "4-diloco",
        ),
    ),
    Fault(
        "the outer step is rounded as a step of z, not of its distance to the mean",
        "crossover_ddp/_averaging/outer.py",
        "torch.add(values, self._distance.data, out=self.anchor)",
        "torch.add(self.anchor, self._distance.data - gradient, out=self.anchor)",
        (
            "tests/multiprocess/test_averaging_situations.py",
            "-k",
            "identities and 2",
        ),
    ),
    Fault(
        "exchanges begin in warm-up",
        "crossover_ddp/_averaging/schedule.py",
        "local = steps - self.warmup_steps",
        "local = steps",
        (
            "tests/multiprocess/test_averaging.py",
            "-k",
            "4-post_local",
        ),
    ),
    Fault(
        "ranks that stay away from a round pull the centre, too",
        "crossover_ddp/_averaging/centre.py",
        "sub_(former, alpha=pulling)",
        "sub_(former, alpha=self._means.exchange.world_size)",
        (
            "tests/multiprocess/test_elastic.py",
            "-k",
            "replayed",
        ),
    ),
    Fault(
        "what has ended the rounds is told to nobody",
        "crossover_ddp/_averaging/rounds.py",
        "                self._failure = error\n",
        "                self._ending.has_come = True\n",
        (
            "tests/multiprocess/test_averaging_faults.py",
            "-k",
            "stopped and async",
        ),
    ),
)
