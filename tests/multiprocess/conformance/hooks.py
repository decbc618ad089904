"""The hooks that must agree with plain DDP."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from crossover_ddp.averaging_hooks import LocalSGDState, local_sgd_hook
from crossover_ddp.codecs import CompressedState, compressed_hook
from crossover_ddp.comm_hooks import (
    CrossoverState,
    DecoupledState,
    crossover_hook,
    crossover_wrapper,
    decoupled_hook,
    reduce_scatter_all_gather_hook,
)
from crossover_ddp.kfac_hooks import KFACState, kfac_hook
from crossover_ddp.muon_hooks import MuonState, muon_hook
from tests.harness import inside
from tests.multiprocess.identity_codec import Identity

# Registers a hook for the time of the block, and leaves nothing behind.
Registration = Callable[[DistributedDataParallel], contextlib.AbstractContextManager[None]]
# The same for a hook that works on the optimizer as well; the block is given what makes gradients whole.
Attachment = Callable[
    [DistributedDataParallel, torch.optim.Optimizer],
    contextlib.AbstractContextManager[Callable[[], None] | None],
]


@dataclass(frozen=True)
class Row:
    """A hook, and how close to plain DDP it is.

    Args:
        register: a context manager that registers the hook on the model and cleans up after it.
        attach: the same with the model's optimizer, instead of ``register``.
        options: of DDP, in all cases.
        bitwise_world_sizes: with these many ranks results are identical; otherwise they are equal within
            ``tolerance``, and always identical on all ranks.
        tolerance: times the machine epsilon of the dtype, relative to the largest magnitude of a tensor.
        skip: names of cases that the hook does not support, with the reason.
    """

    register: Registration | None = None
    attach: Attachment | None = None
    options: Mapping[str, bool] = field(default_factory=dict)
    bitwise_world_sizes: tuple[int, ...] = (1, 2)
    tolerance: float = 128.0
    skip: dict[str, str] | None = None


@contextlib.contextmanager
def split(model: DistributedDataParallel) -> Iterator[None]:
    model.register_comm_hook(None, reduce_scatter_all_gather_hook)
    yield


@contextlib.contextmanager
def split_on_own_group(model: DistributedDataParallel) -> Iterator[None]:
    model.register_comm_hook(model.process_group, reduce_scatter_all_gather_hook)
    yield


@contextlib.contextmanager
def crossover(model: DistributedDataParallel) -> Iterator[None]:
    """All ranks of a test share one device here; a turn is the job's, so that changes nothing."""
    state = CrossoverState()
    model.register_comm_hook(state, crossover_hook)
    yield
    state.close()


@contextlib.contextmanager
def wrapped_all_reduce(model: DistributedDataParallel) -> Iterator[None]:
    state = CrossoverState()
    model.register_comm_hook(state, crossover_wrapper(allreduce_hook))
    yield
    state.close()


@contextlib.contextmanager
def decoupled(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Nobody looks at gradients between backward and step, so that every step is deferred that can be."""
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
    yield None
    state.close()


@contextlib.contextmanager
def decoupled_and_flushed(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[Callable[[], None]]:
    state = DecoupledState(optimizer, defer="always")
    model.register_comm_hook(state, decoupled_hook)
    yield state.flush
    state.close()


@contextlib.contextmanager
def decoupled_identity_codec(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[None]:
    """What is gathered late are messages, whose values are as they were."""
    state = DecoupledState(optimizer, codec=Identity(), defer="always")
    model.register_comm_hook(state, decoupled_hook)
    yield None
    state.close()


@contextlib.contextmanager
def kfac_of_nothing(
    model: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> Iterator[Callable[[], None]]:
    """All layers pass through K-FAC's payload, which a user is not allowed."""
    with inside.kfac_of_no_layer():
        state = KFACState(model, optimizer, skip=["*"])
    model.register_comm_hook(state, kfac_hook)
    yield lambda: None
    state.close()


@contextlib.contextmanager
def muon_of_nothing(model: DistributedDataParallel) -> Iterator[None]:
    """Muon has a matrix that is not trained, so that all of the model passes through its payload."""
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    model.register_comm_hook(MuonState(torch.optim.Muon([frozen])), muon_hook)
    yield


@contextlib.contextmanager
def compressed_by_nothing(model: DistributedDataParallel) -> Iterator[None]:
    model.register_comm_hook(CompressedState(codec=None), compressed_hook)
    yield


@contextlib.contextmanager
def averaged_every_step(model: DistributedDataParallel) -> Iterator[None]:
    """Replicas that never differ."""
    state = LocalSGDState(sync_every=1)
    model.register_comm_hook(state, local_sgd_hook)
    yield
    state.close()


@contextlib.contextmanager
def identity_codec(model: DistributedDataParallel) -> Iterator[None]:
    """Gradients travel as messages, whose values are as they were."""
    model.register_comm_hook(CompressedState(codec=Identity()), compressed_hook)
    yield


VIEWS = {"gradient_as_bucket_view": True}
NO_VIEWS = {
    "unused_parameters": "find_unused_parameters needs gradient_as_bucket_view, which is said",
    "complex_parameters": "complex parameters need gradient_as_bucket_view, which is said",
}

IN_DOUBLE = {"several_dtypes": "a codec refuses float64, which is said"}

AS_MANY_STEPS = dict.fromkeys(
    ("joined_ranks", "joined_ranks_with_buffers"), "averaging needs as many steps on all ranks, which is said"
)

HOOKS: dict[str, Row] = {
    "split": Row(split),
    "split_on_own_group": Row(split_on_own_group),
    "crossover": Row(crossover),
    "wrapped_all_reduce": Row(wrapped_all_reduce),
    "averaged_every_step": Row(averaged_every_step, skip=AS_MANY_STEPS),
    "decoupled": Row(attach=decoupled, options=VIEWS),
    "decoupled_and_copied": Row(attach=decoupled, skip=NO_VIEWS),
    "decoupled_and_flushed": Row(attach=decoupled_and_flushed, options=VIEWS),
    "compressed_by_nothing": Row(compressed_by_nothing),
    "identity_codec": Row(identity_codec, bitwise_world_sizes=(1,), skip=IN_DOUBLE),
    "decoupled_identity_codec": Row(
        attach=decoupled_identity_codec, options=VIEWS, bitwise_world_sizes=(1,), skip=IN_DOUBLE
    ),
    "kfac_of_nothing": Row(attach=kfac_of_nothing),
    "muon_of_nothing": Row(muon_of_nothing),
}
