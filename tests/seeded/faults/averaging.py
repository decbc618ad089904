"""Faults of averaged replicas."""

from typing import Final

from tests.seeded.fault import Fault

AVERAGING: Final[tuple[Fault, ...]] = (
    Fault(
        "what was sent is not kept, so that late means change nothing",
        "crossover_ddp/_averaging/late.py",
        "sent = values.clone() if self._schedule.delay else None",
        "sent = values if self._schedule.delay else None",
        ("tests/multiprocess/test_averaging.py", "-k", "2-delayed"),
    ),
    Fault(
        "the outer optimizer goes on from other parameters than it has sent",
        "crossover_ddp/_averaging/late.py",
        "        own.copy_(self.anchor.detach())\n",
        "        own.copy_(self.anchor.detach())\n        self.anchor.data.mul_(0.5)\n",
        ("tests/multiprocess/test_averaging.py", "-k", "4-diloco"),
    ),
    Fault(
        "exchanges begin in warm-up",
        "crossover_ddp/_averaging/late.py",
        "local = steps - self.warmup_steps",
        "local = steps",
        ("tests/multiprocess/test_averaging.py", "-k", "4-post_local"),
    ),
    Fault(
        "ranks that stay away from a round pull the centre, too",
        "crossover_ddp/_averaging/centre.py",
        "sub_(former, alpha=len(addends))",
        "sub_(former, alpha=2)",
        ("tests/multiprocess/test_elastic.py", "-k", "replayed"),
    ),
    Fault(
        "what has ended the rounds is told to nobody",
        "crossover_ddp/_averaging/centre.py",
        "                self._failure = self._failure or error\n",
        "                pass\n",
        ("tests/multiprocess/test_averaging_faults.py", "-k", "stopped and async"),
    ),
    Fault(
        "a mask of infinities has a mean",
        "crossover_ddp/_averaging/replica.py",
        " and counts and bool(get().isfinite().all()):",
        " and counts:",
        ("tests/defects/test_averaging.py", "-k", "mask"),
    ),
    Fault(
        "the rank with infinities is not told of its own",
        "crossover_ddp/_averaging/replica.py",
        "is_guilty=not all(map(all_finite, own))",
        "is_guilty=False",
        ("tests/defects/test_averaging.py", "-k", "rank_with_infinities"),
    ),
    Fault(
        "what bfloat16 rounds off is lost",
        "crossover_ddp/_averaging/replica.py",
        "torch.sub(whole, rounded, out=self._kept_back[span.start : span.stop])",
        "rounded.zero_()",
        ("tests/defects/test_averaging.py", "-k", "bfloat16"),
    ),
    Fault(
        "ranks may have other outer optimizers",
        "crossover_ddp/_averaging/late.py",
        "outer = None if outer_optimizer is None else described(outer_optimizer)",
        "outer = outer_optimizer is not None",
        ("tests/defects/test_averaging.py", "-k", "differ_are_told and outer"),
    ),
    Fault(
        "a second model of an averaging state trains alone",
        "crossover_ddp/averaging_hooks.py",
        "            self._only.enter(bucket, self)\n",
        "",
        ("tests/defects/test_averaging.py", "-k", "averaging_state_serves"),
    ),
    Fault(
        "local steps are not recorded for a plan",
        "crossover_ddp/averaging_hooks.py",
        "                exchange.records.add([(gradients.nbytes, time.monotonic())], self._begin_s)\n",
        "                pass\n",
        ("tests/multiprocess/test_averaging_situations.py", "-k", "plan_the_same"),
    ),
    Fault(
        "a disabled state takes no call",
        "crossover_ddp/averaging_hooks.py",
        "if self._replica is None and not environment.is_set(environment.DISABLE):",
        "if self._replica is None:",
        ("tests/defects/test_averaging.py", "-k", "disabled_state"),
    ),
    Fault(
        "a saver of one replica is not warned",
        "crossover_ddp/averaging_hooks.py",
        "differs = self._began and self._mean_of != self._steps",
        "differs = not self._began",
        ("tests/defects/test_averaging.py", "-k", "saver"),
    ),
    Fault(
        "nobody is warned of exchanges in flight",
        "crossover_ddp/averaging_hooks.py",
        'self._rule.stats().get("in_flight")',
        'self._rule.stats().get("flights")',
        ("tests/defects/test_averaging.py", "-k", "state_dict_in_flight"),
    ),
    Fault(
        "a mean pairs with another rank's next exchange",
        "crossover_ddp/averaging_hooks.py",
        '                compare(replica.group, {"call": call, "state of the optimizers": shapes, **steps})',
        "                steps.clear()",
        ("tests/defects/test_averaging.py", "-k", "one_rank_asks_for"),
    ),
    Fault(
        "a centre is made of pieces of all ranks' replicas",
        "crossover_ddp/_averaging/elastic.py",
        "return [from_first_rank(exchange, values) for values in own]",
        "return own",
        ("tests/defects/test_averaging.py", "-k", "begins_with_one_replica"),
    ),
    Fault(
        "a closed state leaves its process groups behind",
        "crossover_ddp/_averaging/elastic.py",
        "        self._made.append(made)\n",
        "",
        ("tests/defects/test_averaging.py", "-k", "leaves_no_process_group"),
    ),
)
