"""Faults of the exchange."""

from typing import Final

from tests.seeded.fault import Fault

_CONFORMANCE = "tests/conformance/test_conformance.py"
_SEARCH = ("tests/unit/exchange/test_model_search.py", "-k", "tuple_in_the_making")

EXCHANGE: Final[tuple[Fault, ...]] = (
    Fault(
        "a chunk that arrives takes the place of what it is to be added to",
        "crossover_ddp/_exchange/collectives.py",
        "self._buffer.piece(span).add_(scratch[: span.numel])",
        "self._buffer.piece(span).copy_(scratch[: span.numel])",
        (_CONFORMANCE, "-k", "split and 2"),
    ),
    Fault(
        "with three ranks and more the ring's parts are summed in another order than they travel",
        "crossover_ddp/_exchange/collectives.py",
        "steps = [(ring.rank - 2 - step) % ring.size for step in range(ring.size - 1)]",
        "steps = [(ring.rank - 2 + step) % ring.size for step in range(ring.size - 1)]",
        ("tests/journeys/test_bits_and_buffers.py", "-k", "exact_up_to and 3-"),
    ),
    Fault(
        "a thread of the exchange that waits for a peer keeps its process alive",
        "crossover_ddp/_system/worker.py",
        "name=self._name, daemon=True",
        "name=self._name, daemon=False",
        ("tests/journeys/test_ends.py", "-k", "process_ends"),
    ),
    Fault(
        "a bucket is divided by two, however many ranks have added to it",
        "crossover_ddp/_exchange/ring_way.py",
        "must not overflow.\n        transfer.tensor.div_(engine.world_size)",
        "must not overflow.\n        transfer.tensor.div_(2)",
        (_CONFORMANCE, "-k", "split and 4"),
    ),
    Fault(
        "rank 0's buffers count inside of Join, too, where it has run out of inputs",
        "crossover_ddp/_ddp/module_buffers.py",
        "own_way = model._join_config.enable or hasattr(",
        "own_way = hasattr(",
        (_CONFORMANCE, "-k", "split-joined_ranks_with_buffers-2"),
    ),
    Fault(
        "buffers that somebody has changed since backward are overwritten",
        "crossover_ddp/_ddp/module_buffers.py",
        "if self._sends or self._versions != self._count_changes():",
        "if self._sends:",
        ("tests/multiprocess/test_module_buffers.py", "-k", "stay_changed and decoupled"),
    ),
    Fault(
        "all buffers are taken from the beginning of what has arrived",
        "crossover_ddp/_ddp/module_buffers.py",
        "self.flat[stop - tensor.nbytes : stop].view(tensor.dtype)",
        "self.flat[: tensor.nbytes].view(tensor.dtype)",
        (_CONFORMANCE, "-k", "kfac_of_nothing-batch_norm_buffers-3"),
    ),
    Fault(
        "a collection may run finalizers while models are searched",
        "crossover_ddp/_ddp/checks.py",
        "    gc.disable()  # or",
        "    # or",
        _SEARCH,
    ),
    Fault(
        "what others are making is looked at one by one",
        "crossover_ddp/_ddp/checks.py",
        "return list(_of_types(frozenset(classes), *itertools.tee(everybody)))",
        "return [each for each in gc.get_referrers(*classes) if type(each) in classes]",
        _SEARCH,
    ),
    Fault(
        "a state of another hook is taken for its own",
        "crossover_ddp/_exchange/hook.py",
        "    if not isinstance(state, kind):",
        "    if state is None and not isinstance(state, kind):",
        ("tests/defects/test_hooks.py", "-k", "another_hooks_state and crossover-kfac"),
    ),
    Fault(
        "torch's python reducer is answered as if backward would raise",
        "crossover_ddp/_exchange/hook.py",
        "    if isinstance(bucket, tuple):\n        raise UnsupportedConfigurationError(PYTHON_REDUCER)\n",
        "",
        ("tests/defects/test_hooks.py", "-k", "python_reducer and split-step"),
    ),
    Fault(
        "ranks do not compare their arguments",
        "crossover_ddp/_engine/agreement.py",
        "            if group.size() > 1:",
        "            if group.size() > 99:",
        ("tests/defects/test_codecs.py", "-k", "other_codecs and compressed-none"),
    ),
    Fault(
        "a disabled rank leaves the others to compare alone",
        "crossover_ddp/_averaging/state.py",
        "            state._replica.agreement.make(group, dict)\n",
        "",
        ("tests/defects/test_hooks.py", "-k", "environments and local_sgd"),
    ),
    Fault(
        "the names of siblings are not compared",
        "crossover_ddp/comm_hooks.py",
        "environment.GROUP: siblings}",
        "environment.GROUP: None}",
        ("tests/defects/test_hooks.py", "-k", "environments and CROSSOVER_GROUP"),
    ),
    Fault(
        "a wrapped hook ignores the codec of its state",
        "crossover_ddp/comm_hooks.py",
        "            if state.codec is not None:\n                raise",
        "            if state.codec is None and state.mutex is state:\n                raise",
        ("tests/defects/test_hooks.py", "-k", "takes_no_codec"),
    ),
    Fault(
        "the DDP model inside of replicate() counts as one whose forward is called",
        "crossover_ddp/_ddp/checks.py",
        "    if isinstance(model.module, torch.nn.ParameterList):",
        "    if model.module is None:",
        ("tests/defects/test_hooks.py", "-k", "replicate_is_refused and (elastic or decoupled)"),
    ),
    Fault(
        "a second model of the same shapes is not compared with the hook's group",
        "crossover_ddp/_exchange/routes.py",
        "if parameter not in self._checked and group is not None:",
        "if not vars(self).get('once') and group is not None:\n            self.once = True",
        ("tests/defects/test_hooks.py", "-k", "hooks_group and split"),
    ),
    Fault(
        "numbers of ranks are rounded to the default dtype on their way",
        "crossover_ddp/_engine/exchange.py",
        "torch.tensor(numbers, dtype=flat.dtype)",
        "torch.tensor(numbers, dtype=torch.float16)",
        ("tests/defects/test_averaging.py", "-k", "count_of_steps"),
    ),
    Fault(
        "two exchanges of a group share the tags of their messages",
        "crossover_ddp/_engine/gloo.py",
        "Channels.take(group)",
        "Channels.take(group) * 0",
        ("tests/defects/test_averaging.py", "-k", "sixteenth"),
    ),
)
