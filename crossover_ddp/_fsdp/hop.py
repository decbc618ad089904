"""The hop between nodes: it passes FSDP2's gradients to a hook, and puts the averages in place.

[Note: late averages] Inside a node FSDP2 averages the gradients of one parameter group after the
other, in a flat tensor for each. It passes this tensor to our hook, and uses it as soon as the hook
returns: it divides or converts it, and adds it to the parameters' ``grad``. On a CUDA device with
NCCL this order is one of streams, so the host does not wait. On a CPU the hook would have to block,
while backward could continue. So it sends a copy of the gradients, leaves zeros in the tensor, and
returns at once. At the end of backward the averages are added to ``grad``. If backward raises
before, the ``grad`` of earlier micro-batches is still whole.

The hook blocks where its caller needs the average at once: if FSDP2 divides after the hook or
copies gradients to the CPU, if an optimizer runs inside of backward, or if some parameters have no
gradient, because the hook does not learn which ones. It also blocks for other libraries'
hooks, such as torch's PowerSGD, since some start collectives when former ones have ended: with
several buckets under way, the order of these would differ between ranks.

[Note: the end of the step] No group knows whether it is the last one of a backward pass. So at its
end the hook gets one more bucket, of a single zero, for which ``is_last()`` is true. Hooks give the
turn away with it, and count steps and compare replicas behind it.

[Note: sharing errors] If the exchange of one rank fails, only the ranks with the same shard know.
The others would wait inside the node for a rank that no longer trains. So where gloo connects the
ranks of a node, they share errors at the end of every backward pass. With NCCL, torch's watchdog
ends their processes after the group's timeout.

[Note: memory that FSDP2 lets go] On a CUDA device FSDP2 converts the flat tensor to the parameters'
dtype on the stream of our hook, and drops the tensor while that stream may not have got there.
Later reductions would be written to the same memory. So it is kept until the end of backward, and
the computation's stream waits there for our hook's.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule

from crossover_ddp._ddp import checks
from crossover_ddp._ddp.compiled import OwnHook, uncompiled
from crossover_ddp._ddp.groups import compare, gather_objects, set_ranks_of_model
from crossover_ddp._ddp.shards import TAIL, ShardedModel, Shards, own_part
from crossover_ddp._engine.buckets import errors_to_caller
from crossover_ddp._engine.exchange import Exchange
from crossover_ddp._engine.states import HookState
from crossover_ddp._system import torch_private
from crossover_ddp.errors import ExchangeError, UnsupportedConfigurationError

Hook = Callable[[Any, Any], torch.futures.Future[Any]]

# The hooks of torch that start all of their collectives before they return.
_SINGLE = (
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
)


class ShardBucket:
    """The gradients of one parameter group, with the methods of DDP's ``GradBucket``."""

    def __init__(
        self, index: int, flat: Tensor, shards: Sequence[nn.Parameter], *, is_last: bool = False
    ) -> None:
        self._index = index
        self._flat = flat
        self._shards = shards
        self._is_last = is_last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last

    def buffer(self) -> Tensor:
        return self._flat

    def set_buffer(self, flat: Tensor) -> None:
        self._flat = flat

    def parameters(self) -> list[nn.Parameter]:
        return list(self._shards)

    def gradients(self) -> list[Tensor]:
        pieces = self._flat.split([each.numel() for each in self._shards])
        return [piece.view(each.shape) for piece, each in zip(pieces, self._shards, strict=True)]


class _Late(NamedTuple):
    """Gradients that travel while backward continues, see [Note: late averages]."""

    number: int  # of the parameter group
    flat: Tensor
    shards: list[nn.Parameter]  # those with a gradient, since user code may freeze some meanwhile
    future: torch.futures.Future[Any]


class Hop:
    """Averages the gradients of one model over nodes by a hook.

    Args:
        network: the outermost module to which ``fully_shard`` was applied.
        state: the state of the hook, or its process group.
        hook: the hook.
        process_group: the ranks with the same shards.
    """

    def __init__(
        self, network: nn.Module, state: Any, hook: Hook, process_group: dist.ProcessGroup
    ) -> None:
        self._network = network
        self._state = state
        self._hook = hook
        self._group = process_group
        self._exchange = Exchange.of(process_group)
        self.model = ShardedModel(network, process_group, state, hook, self._around)
        self._shards: Shards = self.model.module
        # The modules to which fully_shard was applied.
        self._parts = [each for each in network.modules() if isinstance(each, FSDPModule)]
        # The process groups inside the node.
        meshes = self._shards.meshes()
        self._inside = [mesh.get_group() for mesh in meshes]
        self._device = torch.device(meshes[0].device_type)
        # The groups whose ranks share errors, see [Note: sharing errors].
        self._sharing = [
            group
            for group in self._inside
            if self._exchange.networks.sends_messages(self._device)
            and group.size() > 1
            and "cpu:gloo" in str(dist.get_backend_config(group)).split(",")
        ]
        # The indices of buckets that hold a part of a group, by the group and their size.
        self._partial: dict[tuple[int, int], tuple[int, nn.Parameter]] = {}
        self._tail: nn.Parameter | None = None
        # Whether several buckets may be under way. Hooks with "<locals>" wrap others.
        is_own = getattr(hook, "__module__", "").partition(".")[0] == "crossover_ddp"
        is_wrapper = "<locals>" in getattr(hook, "__qualname__", "")
        self._may_overlap = hook in _SINGLE or (is_own and not is_wrapper)
        # Gradients that wait for `set_requires_all_reduce`, by the number of their group.
        self._waiting: dict[int, Tensor] = {}
        # Parameters that had no gradient before, to which FSDP2 gives zeros meanwhile.
        self._without: list[Tensor] = []
        self._late: list[_Late] = []
        # See [Note: memory that FSDP2 lets go].
        self._kept: list[Tensor] = []
        self._streams: set[Any] = set()
        # Whether FSDP2 has averaged a group in this backward pass, whether a bucket of the step has
        # been sent, and the first error of the step.
        self._is_open = False
        self._is_sending = False
        self._error: Exception | None = None
        self._is_checked = False

    def register(self) -> None:
        """Have FSDP2 call the hop from now on."""
        ranks = [dist.get_process_group_ranks(each) for each in (self._group, *self._inside)]
        job = range(dist.get_world_size())
        if self._group.size() * max(map(len, ranks[1:])) == len(job):
            set_ranks_of_model(self._group, job)
        if isinstance(self._state, HookState):
            self._state.bound_model.give(self.model)  # type: ignore[arg-type]
        else:
            checks.remember(self.model)  # type: ignore[arg-type]
        for number, group in enumerate(self._shards.groups):
            setattr(group, torch_private.FSDP_HOOK, functools.partial(self._reduced, number))
        begins = OwnHook(uncompiled(self._forward_begins))
        self._network.register_forward_pre_hook(begins, prepend=True)
        torch_private.at_end_of_fsdp_backward(self._network, uncompiled(self._backward_ends))

    # --- in backward, when FSDP2 has averaged a group inside the node -----------------------------

    def _reduced(self, number: int, flat: Tensor) -> None:
        """Average the gradients of a group over the nodes. FSDP2 uses ``flat`` afterwards."""
        if not self._is_open:
            self._is_open = True
            self._shards.refresh()
        if flat.is_cuda:
            self._kept.append(flat)
            self._streams.add(torch.cuda.current_stream(flat.device))
        if not torch_private.is_fsdp_group_averaged(self._shards.groups[number]):
            # FSDP2 itself heeds set_requires_all_reduce only where it averages over nodes.
            waiting = self._waiting.get(number)
            self._waiting[number] = flat.clone() if waiting is None else waiting.add_(flat)
            flat.zero_()
            trained = map(checks.optimized, self._shards.trained(number))
            self._without += [each for each in trained if each.grad is None]
            return
        if (waiting := self._waiting.pop(number, None)) is not None:
            flat.add_(waiting)
        self._device = flat.device
        # A module that was used twice has two gradients, which a codec must not mix.
        self._land([each for each in self._late if each.number == number])
        if not self._is_checked:
            self._check()
        self._is_sending = True
        is_late = self._may_be_late(number, flat)
        bucket = self._bucket(number, flat.clone() if is_late else flat)
        future = self._send(bucket)
        if is_late:
            flat.zero_()
            if future is not None:
                shards = self._shards.trained(number)
                self._late.append(_Late(number, bucket.buffer(), shards, future))
        elif future is not None and self._wait(future, flat):
            flat.mul_(self._factor(number))

    def _bucket(self, number: int, flat: Tensor) -> ShardBucket:
        shards = self._shards.trained(number)
        if flat.numel() == sum(each.numel() for each in shards):
            return ShardBucket(number, flat, shards)
        # Some parameters have no gradient, and it is not known which ones. So codecs leave it exact.
        key = number, flat.numel()
        if key not in self._partial:
            name = f"(a part of group {number} with {flat.numel()} gradients)"
            placeholder = self._shards.add_placeholder(name, flat.numel(), flat.device)
            index = len(self._shards.groups) + 1 + len(self._partial)
            self._partial[key] = index, placeholder
        index, placeholder = self._partial[key]
        return ShardBucket(index, flat, [placeholder])

    def _may_be_late(self, number: int, flat: Tensor) -> bool:
        """Return whether the average may arrive at the end of backward, see [Note: late averages]."""
        group = self._shards.groups[number]
        shards = self._shards.trained(number)
        return self._may_overlap and not (
            self._exchange.networks[flat.device].in_program_order
            # FSDP2 divides these by a part of the number of ranks later, even float64.
            or flat.dtype not in (torch.float32, torch.bfloat16)
            or torch_private.fsdp_divides_late(group)
            or torch_private.is_fsdp_group_offloaded(group)
            or flat.numel() != sum(each.numel() for each in shards)
            or any(
                getattr(checks.optimized(each), torch_private.AFTER_GRADIENT, None)
                for each in shards
            )
        )

    def _factor(self, number: int) -> int:
        """Return the number by which averages of a group must be multiplied.

        After set_gradient_divide_factor, a gradient is the sum over all ranks over that divisor.
        """
        is_sum = torch_private.fsdp_divisor(self._shards.groups[number]) is not None
        return self._group.size() if is_sum else 1

    # --- exchanges --------------------------------------------------------------------------------

    def _send(self, bucket: ShardBucket) -> torch.futures.Future[Any] | None:
        """Pass a bucket to the hook, and return its Future; None if the hook has raised."""
        try:
            with errors_to_caller():
                return self._hook(self._state, bucket)
        except Exception as error:
            self._error = self._error or error
            return None

    def _wait(self, future: torch.futures.Future[Any], flat: Tensor) -> bool:
        """Wait for a Future and put its result in ``flat``. Return whether there was no error."""
        try:
            result = future.wait()
        except Exception as error:
            self._error = self._error or error
            return False
        if isinstance(result, (list, tuple)):  # from torch's own hooks
            [result] = result
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)
        return True

    @torch.no_grad()
    def _land(self, arrived: Sequence[_Late]) -> None:
        """Wait for late averages, and add them to the parameters' gradients."""
        for each in arrived:
            self._late.remove(each)
            if not self._wait(each.future, each.flat):
                continue
            average = each.flat.mul_(self._factor(each.number))
            begin = 0
            for shard in each.shards:
                gradient = own_part(cast(Tensor, checks.optimized(shard).grad))
                piece = average[begin : begin + gradient.numel()].view(gradient.shape)
                gradient.add_(piece.to(gradient.dtype))
                begin += shard.numel()

    def _check(self) -> None:
        """Refuse ranks with different shards, and a module that is not the outermost one."""
        if torch_private.is_fsdp_root(self._network) is False:
            raise UnsupportedConfigurationError(
                f"expected the outermost module of FSDP2, got {type(self._network).__name__} inside "
                "of another one, which ends backward passes; register the hook on the whole model"
            )
        known = {*map(id, self._shards.groups)}
        if not known.issuperset(map(id, torch_private.fsdp_groups(self._network))):
            raise UnsupportedConfigurationError(
                "expected all parameters that the model had when the hook was registered, got more: "
                "nothing averages their gradients over the nodes; register the hook after the last "
                "call of fully_shard"
            )
        # Padded shards may be equally large although the parameters are not.
        shards = {
            name: (tuple(checks.optimized(each).shape), tuple(each.shape))
            for name, each in self._shards.named_parameters()
        }
        places = [group.rank() for group in self._inside]
        remedy = "pass the process group of the ranks with the same shards, one on each node"
        compare(self._group, {"place inside the node": places, "shards": shards}, remedy)
        self._is_checked = True

    # --- at the end of backward -------------------------------------------------------------------

    def _backward_ends(self) -> None:
        """Wait for all averages, and raise the error of the step."""
        if self._is_in_backward():
            return  # several modules are outermost, if user code calls them instead of the model
        for stream in self._streams:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._streams.clear()
        is_step, self._is_sending = self._is_sending, False
        if is_step:
            self._shards.refresh()
            tail, zero = self._send_tail()
            self._land(self._late.copy())
            if tail is not None:
                self._wait(tail, zero)
        for parameter in self._without:
            parameter.grad = None
        error = self._error
        self._drop()
        if is_step:
            self._share_error(error)

    def _send_tail(self) -> tuple[torch.futures.Future[Any] | None, Tensor]:
        """Send a bucket that is the last one, see [Note: the end of the step]."""
        zero = torch.zeros(1, device=self._device)
        if self._tail is None:
            self._tail = self._shards.add_placeholder(TAIL, zero.numel(), zero.device)
        number = len(self._shards.groups)
        return self._send(ShardBucket(number, zero, [self._tail], is_last=True)), zero

    def _drop(self) -> None:
        """Forget everything that belongs to one backward pass."""
        self._late.clear()
        self._kept.clear()
        self._without.clear()
        self._is_open = self._is_sending = False
        self._error = None

    def _is_in_backward(self) -> bool:
        """Return whether FSDP2 has not yet ended a backward pass of the model or a part of it."""
        return any(map(torch_private.is_in_fsdp_backward, self._parts))

    def _share_error(self, error: Exception | None) -> None:
        """Raise ``error``, or the one of another rank, see [Note: sharing errors]."""
        for group in self._sharing:
            failed = torch.zeros(()) if error is None else torch.ones(())
            text = None if error is None else f"{type(error).__name__}: {error}"
            texts: list[str | None] = []
            try:
                dist.all_reduce(failed, group=group)
                if failed.item():
                    texts = gather_objects(group, text)
            except (RuntimeError, ExchangeError) as lost:
                texts = [str(lost)]
            found = next((each for each in texts if each is not None), None)
            if error is None and found is not None:
                error = ExchangeError(
                    f"another rank of this node has failed: {found}; no later step can succeed, "
                    "restart the job"
                )
        if error is not None:
            raise error

    # --- before forward ---------------------------------------------------------------------------

    def _forward_begins(self, *_: Any) -> None:
        """Drop the exchanges of a backward pass that has raised an error."""
        is_inside = self._is_in_backward()
        if is_inside and torch.is_grad_enabled() and not torch_private.is_in_backward():
            raise RuntimeError(
                "expected FSDP2 between two backward passes, got one that has never ended, since it "
                "has raised an error: FSDP2 would not end later ones either, and leave parameters "
                "without gradients; call model.reset_iter_state() after the error (torch 2.13), or "
                "restart the job"
            )
        if is_inside or not self._is_open:
            return
        for each in self._late:
            self._wait(each.future, each.flat)
        self._waiting.clear()
        self._drop()

    def _around(self, hook: Callable[..., None]) -> OwnHook:
        """Return a form of ``hook``, which changes shards, that runs before FSDP2 gathers them."""

        def around(*args: Any) -> None:
            self._shards.refresh()
            error = None
            try:
                hook(*args)
            except Exception as raised:
                error = raised
            # After unshard(async_op=True) the former parameters are still under way.
            for group in self._shards.groups:
                torch_private.wait_for_fsdp_group(group)
            for part in self._parts:
                part.reshard()  # an evaluation leaves some of them gathered
            self._share_error(error)

        return OwnHook(uncompiled(around))
