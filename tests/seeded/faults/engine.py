"""Faults of the engine: journeys, links, the exchange of a group."""

from typing import Final

from tests.seeded.fault import Fault

_BUCKETS, _EXCHANGE, _GLOO, _JOURNEYS, _LINKS, _SPANS, _STAGED, _TURNS = (
    f"crossover_ddp/_engine/{name}.py"
    for name in (
        *("buckets", "exchange", "gloo", "journeys", "links", "spans", "staged"),
        "turns",
    )
)
_TURN = "tests/journeys/test_turn_and_futures.py"
_FAILURES = "tests/journeys/test_failures.py"
_ENDS = "tests/journeys/test_ends.py"
_REPLICAS = "tests/journeys/test_replicas.py"
_TOLD = "tests/journeys/test_spans.py"
_DEVICES = "tests/journeys/test_devices.py"
_BITS = "tests/journeys/test_bits_and_buffers.py"
_OWN = "tests/unit/engine/test_exchange.py"
_TABLE = "tests/conformance/test_conformance.py"

ENGINE: Final[tuple[Fault, ...]] = (
    Fault(
        "a thread hears of the last bucket before the turn is given away",
        _JOURNEYS,
        "            self._launch()\n            if self._park():\n",
        "            threading.Timer(0.1, self._launch).start()\n            if self._park():\n",
        (_TURN, "-k", "before_anybody_hears and split or crossover"),
    ),
    Fault(
        "the last Future is done before the turn is taken",
        _TURNS,
        "            turn.request()\n        bucket.exchanged()\n",
        "            turn.request()\n        bucket.exchanged()\n        bucket.end(None, lambda: None)\n"
        "        bucket.end = lambda *_: None\n",
        (_TURN, "-k", "last_future_waits and crossover"),
    ),
    Fault(
        "under the wrapper the last Future does not wait for the step's earlier ones",
        _TURNS,
        "for future in futures:",
        "for future in futures[-1:]:",
        (_TURN, "-k", "under_the_wrapper"),
    ),
    Fault(
        "a failure has no cause",
        _EXCHANGE,
        "                failure.__cause__ = cause\n",
        "                pass\n",
        (_TURN, "-k", "carries_its_cause"),
    ),
    Fault(
        "a failure is forgotten with its step",
        _EXCHANGE,
        "            self._failure = failure\n            if",
        "            if",
        (_FAILURES, "-k", "dead_peer and split"),
    ),
    Fault(
        "a failure closes no connection, so that nobody else hears of it",
        _EXCHANGE,
        "            network.interrupt()\n",
        "            pass\n",
        (_ENDS, "-k", "process_ends and split"),
    ),
    Fault(
        "what is to close the connections at the end has a tag that gloo refuses",
        _GLOO,
        "torch.empty(1), rank, _PRIVATE_TAG - 1)",
        "torch.empty(1), rank, -1)",
        (_ENDS, "-k", "process_ends and split"),
    ),
    Fault(
        "a failure ends the journey that failed, and no other one",
        _EXCHANGE,
        "            doomed = [trip.journey for trip in self._under_way]\n",
        "            doomed = []\n",
        (_OWN, "-k", "ends_all", "--timeout=30"),
    ),
    Fault(
        "a rank that has heard of another's failure tells nobody else",
        _GLOO,
        "        for rank in self.others:\n            with contextlib.suppress(RuntimeError, ValueError):\n",
        "        for rank in self.others[:1]:\n            with contextlib.suppress(RuntimeError, ValueError):\n",
        (_OWN, "-k", "one_rank_reaches_all"),
    ),
    Fault(
        "digests that differ are nobody's error",
        "crossover_ddp/_engine/digest.py",
        "if 0 not in digests and len({*digests}) > 1:",
        "if 0 not in digests and len(digests) < 1:",
        (_REPLICAS, "-k", "one_error and split"),
    ),
    Fault(
        "digests are of parameters with gradients alone",
        "crossover_ddp/_engine/digest.py",
        "if name not in ignored}",
        "if name not in ignored and each.requires_grad}",
        (_REPLICAS, "-k", "any_kind and 0"),
    ),
    Fault(
        "a rank that is told not to compare sends nothing, and the others wait for it",
        "crossover_ddp/_engine/digest.py",
        "if self.steps & (self.steps - 1) == 0 or",
        "if wanted and self.steps & (self.steps - 1) == 0 or",
        (_REPLICAS, "-k", "purpose and argument"),
    ),
    Fault(
        "ranks that have joined are compared",
        "crossover_ddp/_engine/digest.py",
        "if model is None or is_joined(model):",
        "if model is None or not is_joined(model):",
        (_REPLICAS, "-k", "joined or one_error and split"),
    ),
    Fault(
        "a fork of a rank sends on its parent's connections",
        _EXCHANGE,
        "        if os.getpid() != self._pid:\n            raise ExchangeError",
        "        if self._pid == 0:\n            raise ExchangeError",
        (_ENDS, "-k", "fork_that_uses and split"),
    ),
    Fault(
        "the process group goes and leaves the engine's threads behind",
        _EXCHANGE,
        "self._leave_group = on_destruction(group, self._end)",
        "self._leave_group = lambda: None",
        (_ENDS, "-k", "go_with_the_group and split"),
    ),
    Fault(
        "the end of a group waits long for what nobody else needs",
        _EXCHANGE,
        "_NEEDED_BY_OTHERS_S if needed else _END_S",
        "_NEEDED_BY_OTHERS_S",
        (_ENDS, "-k", "late and crossover"),
    ),
    Fault(
        "an error of a bucket leaves the hook's Future",
        _BUCKETS,
        "        if error is None or self.leave(error):\n",
        "        if error is None:\n",
        (_FAILURES, "-k", "dead_peer and split"),
    ),
    Fault(
        "gathers of a ring are passed on by one thread, in each rank's own order",
        _GLOO,
        "relay = net.relay()",
        "relay = net.gathering",
        ("tests/unit/engine/test_gloo.py", "-k", "may_begin"),
    ),
    Fault(
        "even layouts go around a ring",
        _GLOO,
        "len(layout) > 2 and is_uneven and ",
        "len(layout) > 2 and ",
        ("tests/unit/engine/test_gloo.py", "-k", "goes_around"),
    ),
    Fault(
        "the tags of the engine's messages are those of its users, counted from 0",
        _GLOO,
        "return _PRIVATE_TAG | self._channel << _NUMBER_BITS | number % (1 << _NUMBER_BITS)",
        "return number % 8",
        (_TABLE, "-k", "messages_of_the_users and (decoupled or 3)"),
    ),
    Fault(
        "tags leave gloo's range when numbers are used up",
        _GLOO,
        "number % (1 << _NUMBER_BITS)",
        "number",
        (_BITS, "-k", "exact_up_to_rounding and anew"),
    ),
    Fault(
        "owners add in their own order, not as a tree over ranks",
        _GLOO,
        "tree_sum(row.addends, piece)",
        "tree_sum([*row.addends[self.rank :], *row.addends[: self.rank]], piece)",
        (_TABLE, "-k", "gloo-split-many_buckets-4 or gloo-split-many_buckets-3"),
    ),
    Fault(
        "of what is left over by equal parts nothing travels",
        _GLOO,
        "    return part.split(numel) if part.numel() else ()\n",
        "    pieces = part.split(numel) if part.numel() else ()\n    return pieces[:1]\n",
        ("tests/unit/engine/test_gloo.py", "-k", "bounded"),
    ),
    Fault(
        "a piece is added before all ranks' addends of it have come",
        _GLOO,
        "            for work in row.arriving:\n                work.wait()\n",
        "            row.arriving[0].wait()\n",
        (_TABLE, "-k", "gloo-split-many_buckets-3 or gloo-split-many_buckets-4"),
    ),
    Fault(
        "gradients are rounded to half precision on their way",
        "crossover_ddp/_engine/buckets.py",
        "    await link.all_reduce(",
        "    bucket.flat.copy_(bucket.flat.bfloat16())\n    await link.all_reduce(",
        (_BITS, "-k", "exact_up_to_rounding"),
    ),
    Fault(
        "a bucket is divided by two, however many ranks have added to it",
        "crossover_ddp/_engine/gloo.py",
        "            flat.div_(self.size)\n",
        "            flat.div_(2)\n",
        ("tests/conformance/test_conformance.py", "-k", "gloo-split- and 4"),
    ),
    Fault(
        "a second model of the same shapes is not compared with the hook's group",
        "crossover_ddp/_engine/exchange.py",
        "if group is not None and grad_bucket.parameters()[0] not in self._checked:",
        "if not self._checked and group is not None:",
        ("tests/defects/test_hooks.py", "-k", "hooks_group and split"),
    ),
    Fault(
        "by collectives a rest that the last rank has is not summed",
        _LINKS,
        "return front, [(self.size - 1, last)] if last.numel() else []",
        "return front, []",
        (_TABLE, "-k", "native-split-many_buckets-2"),
    ),
    Fault(
        "the side stream does not follow the compute stream",
        _JOURNEYS,
        "            self.stream.wait_stream(current)\n",
        "            pass\n",
        (_DEVICES, "-k", "late_changes and nccl"),
    ),
    Fault(
        "a journey begins before the device has its gradients",
        _JOURNEYS,
        "            there.synchronize()\n",
        "            pass\n",
        (_DEVICES, "-k", "late_changes and gloo"),
    ),
    Fault(
        "the host reads a message before its copy from the device has come",
        _STAGED,
        "        there.synchronize()\n",
        "        pass\n",
        (_DEVICES, "-k", "late_changes and gloo"),
    ),
    Fault(
        "the side stream does not wait for copies to the device",
        _STAGED,
        "        self.place.stream.wait_stream(self._up)\n",
        "        pass\n",
        (_DEVICES, "-k", "late_changes and gloo"),
    ),
    Fault(
        "copies to the host do not follow the side stream",
        _STAGED,
        "        self._down.wait_stream(self.place.stream)\n",
        "        pass\n",
        (_DEVICES, "-k", "late_changes and gloo"),
    ),
    Fault(
        "whoever waits for an average is not ordered behind it",
        _JOURNEYS,
        "return lambda: torch.cuda.current_stream(self.device).wait_event(event)",
        "return lambda: None",
        (_DEVICES, "-k", "late_changes and averaged"),
    ),
    Fault(
        "a bucket's Future is completed on another stream than its journey's",
        _BUCKETS,
        "        with self.place.side():\n",
        "        if self.place:\n",
        (_DEVICES, "-k", "late_changes and nccl and split"),
    ),
    Fault(
        "the side stream does not wait for a backend's own collectives",
        _LINKS,
        "    work.wait()\n",
        "    pass\n",
        (_DEVICES, "-k", "late_changes and nccl"),
    ),
    Fault(
        "threads of journeys work on device 0",
        _JOURNEYS,
        "        torch.cuda.set_device(self.device)\n",
        "        pass\n",
        (_DEVICES, "-k", "no_thread_makes"),
    ),
    Fault(
        "the two halves of a journey have one name",
        _SPANS,
        'self._tell("all_gather", begin_s, flat)',
        'self._tell("reduce_scatter", begin_s, flat)',
        (_TOLD, "-k", "both_halves and split"),
    ),
    Fault(
        "on a backend of its own a codec's messages are decoded before they have come",
        _LINKS,
        "_wait(dist.all_to_all_single(incoming, outgoing, **sizes, group=living(self._group), async_op=True))",
        "dist.all_to_all_single(incoming, outgoing, **sizes, group=living(self._group), async_op=True)",
        (_BITS, "-k", "same_bits"),
    ),
    Fault(
        "a coded bucket does not tell what it sent",
        _SPANS,
        'said["sent_bytes"], said["exact_bytes"] = sent',
        "pass",
        (_TOLD, "-k", "int8"),
    ),
)
