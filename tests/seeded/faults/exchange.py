"""Faults of the exchange."""

from typing import Final

from tests.seeded.fault import Fault

_CONFORMANCE = "tests/conformance/test_conformance.py"
_SEARCH = ("tests/unit/ddp/test_model_search.py", "-k", "tuple_in_the_making")

EXCHANGE: Final[tuple[Fault, ...]] = (
    Fault(
        "a thread of the exchange that waits for a peer keeps its process alive",
        "crossover_ddp/_system/worker.py",
        "name=self._name, daemon=True",
        "name=self._name, daemon=False",
        ("tests/journeys/test_ends.py", "-k", "process_ends"),
    ),
    Fault(
        "rank 0's buffers count inside of Join, too, where it has run out of inputs",
        "crossover_ddp/_ddp/module_buffers.py",
        " and not is_joined(model) and not hasattr(",
        " and not hasattr(",
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
        "crossover_ddp/_engine/buckets.py",
        "    if not isinstance(state, kind):",
        "    if state is None and not isinstance(state, kind):",
        ("tests/defects/test_hooks.py", "-k", "another_hooks_state and crossover-int8"),
    ),
    Fault(
        "torch's python reducer is answered as if backward would raise",
        "crossover_ddp/_engine/buckets.py",
        "    if isinstance(bucket, tuple):\n        raise UnsupportedConfigurationError(PYTHON_REDUCER)\n",
        "",
        ("tests/defects/test_hooks.py", "-k", "python_reducer and split"),
    ),
    Fault(
        "ranks do not compare their arguments",
        "crossover_ddp/_engine/buckets.py",
        "            if group.size() > 1:",
        "            if group.size() > 99:",
        ("tests/defects/test_codecs.py", "-k", "other_codecs and compressed-none"),
    ),
    Fault(
        "a disabled rank leaves the others to compare alone",
        "crossover_ddp/_engine/buckets.py",
        "            if group.size() > 1:\n                compare(group, {environment.DISABLE",
        "            if group.size() > 1 and not self.disabled:\n                compare(group, {environment.DISABLE",
        ("tests/defects/test_hooks.py", "-k", "environments"),
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
        "numbers of ranks are rounded to the default dtype on their way",
        "crossover_ddp/_engine/exchange.py",
        "torch.tensor(numbers, dtype=flat.dtype)",
        "torch.tensor(numbers, dtype=torch.float16)",
        ("tests/defects/test_averaging.py", "-k", "count_of_steps"),
    ),
    Fault(
        "two exchanges of a group share the tags of their messages",
        "crossover_ddp/_engine/gloo.py",
        "_take_channel(self._channels)",
        "_take_channel(self._channels) * 0",
        ("tests/unit/engine/test_gloo.py", "-k", "apart"),
    ),
)
