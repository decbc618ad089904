"""The installed torch has the names of FSDP2 that the package uses, with the same meaning.

They stand in the last section of ``torch_private``. A model on a mesh of one rank shows most of
them. The order and the padding of shards, and FSDP2's own divisions, need two ranks.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from crossover_ddp._system import torch_private
from tests.harness import in_ranks
from tests.harness.networks import blow

pytestmark = pytest.mark.torch_version

ONE_RANK = pytest.mark.usefixtures("process_group")


class Network(nn.Module):
    """Three groups of parameters: two blocks, and the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(5, 3)
        self.is_checkpointed = False

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            if self.is_checkpointed:
                values = checkpoint(block, values, use_reentrant=True)  # type: ignore[assignment]
            else:
                values = block(values)
        last: Tensor = self.head(values)
        return last


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def model_of(*, is_whole: bool = True, **options: Any) -> Any:
    """Apply ``fully_shard`` to the blocks, and to the whole network unless that is left out."""
    mesh, network = mesh_of_all(), Network()
    for block in network.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(network, mesh=mesh, **options) if is_whole else network


def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(4, 5, generator=generator, requires_grad=True)


def hooked(model: Any, hook: Callable[[int, Tensor], object]) -> list[Any]:
    """Have ``hook`` called with a group's number and its gradients. Return the groups."""
    groups = torch_private.fsdp_groups(model)
    for number, group in enumerate(groups):
        setattr(group, torch_private.FSDP_HOOK, functools.partial(hook, number))
    return groups


def gradients_of(group: Any) -> list[Tensor]:
    """Return the flat gradients of a group's shards, without padding."""
    found = []
    for whole, _ in torch_private.fsdp_shards(group):
        gradient: Any = whole.grad
        found.append(gradient.to_local().flatten())
    return found


def pieces(flat: Tensor, group: Any) -> list[tuple[Tensor, Tensor]]:
    """Divide a group's flat gradient as `fsdp_shards` does: each shard's values and padding."""
    shards = torch_private.fsdp_shards(group)
    assert flat.numel() == sum(memory.numel() for _, memory in shards)
    cut = flat.split([memory.numel() for _, memory in shards])
    own = [whole.to_local().numel() for whole, _ in shards]  # type: ignore[operator]
    return [(piece[:count], piece[count:]) for piece, count in zip(cut, own, strict=True)]


@ONE_RANK
def test_each_parameter_is_in_one_group_in_the_order_of_the_modules() -> None:
    model = model_of()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [
        [names[id(whole)] for whole, _ in torch_private.fsdp_shards(group)]
        for group in torch_private.fsdp_groups(model)
    ]
    blocks = [[f"blocks.{number}.0.{name}" for name in ("weight", "bias")] for number in range(2)]
    assert found == [["head.weight", "head.bias"], *blocks]


@ONE_RANK
def test_modules_that_share_their_state_and_modules_without_parameters_are_found_once() -> None:
    mesh = init_device_mesh("cpu", (1,))
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Tanh())
    fully_shard([network[0], network[1]], mesh=mesh)
    fully_shard(network, mesh=mesh)
    shards = [torch_private.fsdp_shards(group) for group in torch_private.fsdp_groups(network)]
    assert [len(each) for each in shards if each] == [4]
    assert torch_private.fsdp_groups(nn.Linear(2, 2)) == []


def check_order(model: Any) -> list[int]:
    """Check that shards follow each other in the hook's tensor. Return the sizes of the padding."""
    seen: dict[int, Tensor] = {}
    groups = hooked(model, lambda number, flat: seen.update({number: flat.clone()}))
    model(inputs()).square().sum().backward()
    assert sorted(seen) == [0, 1, 2]
    paddings = []
    for number, group in enumerate(groups):
        found = pieces(seen[number], group)
        for (values, padding), gradient in zip(found, gradients_of(group), strict=True):
            assert torch.equal(values, gradient)
            assert not padding.any()
            paddings.append(padding.numel())
        for whole, memory in torch_private.fsdp_shards(group):
            own: Any = whole
            local = own.to_local()
            assert memory.data_ptr() == local.data_ptr()
            assert torch.equal(memory.flatten()[: local.numel()], local.flatten())
    return paddings


@in_ranks(2)
def test_padded_shards_follow_each_other_as_in_the_hooks_tensor(rank: int) -> None:
    # The second rank has two of five rows, and one of three rows.
    assert check_order(model_of()) == [rank * each for each in (5, 1, 5, 1, 5, 1)]


@in_ranks(2)
def test_the_hooks_tensor_is_the_average_inside_the_node(rank: int) -> None:
    plain = Network()
    plain(inputs()).square().sum().backward()
    expected = []
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        expected.append((name, parameter.grad / 2))
    model = model_of()
    check_order(model)
    for (name, parameter), (same_name, gradient) in zip(
        model.named_parameters(), expected, strict=True
    ):
        assert name == same_name
        assert torch.equal(parameter.grad.full_tensor(), gradient)


@ONE_RANK
def test_the_hook_runs_between_reduction_and_use() -> None:
    model = model_of()
    model(inputs()).square().sum().backward()
    plain = [
        gradient.clone()
        for group in torch_private.fsdp_groups(model)
        for gradient in gradients_of(group)
    ]
    model.zero_grad()
    groups = hooked(model, lambda _, flat: flat.mul_(3))
    for times in (3, 6):  # the second backward adds to the gradients of the first one
        model(inputs()).square().sum().backward()
        found = [gradient for group in groups for gradient in gradients_of(group)]
        torch.testing.assert_close(found, [times * each for each in plain])


@ONE_RANK
def test_the_hook_is_the_one_of_set_all_reduce_hook() -> None:
    model = model_of()
    hooks = [lambda flat: None for _ in range(3)]
    modules: list[Any] = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for module, hook in zip(modules, hooks, strict=True):
        module.set_all_reduce_hook(hook)
    groups = torch_private.fsdp_groups(model)
    assert [getattr(each, torch_private.FSDP_HOOK) for each in groups] == hooks


@ONE_RANK
def test_frozen_parameters_have_no_place_in_the_hooks_tensor() -> None:
    model = model_of()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    seen: dict[int, Tensor] = {}
    groups = hooked(model, lambda number, flat: seen.update({number: flat.clone()}))
    model(inputs()).square().sum().backward()
    assert sorted(seen) == [0, 1]
    (weight, _), _ = torch_private.fsdp_shards(groups[0])
    gradient: Any = weight.grad
    assert torch.equal(seen[0], gradient.to_local().flatten())


@ONE_RANK
def test_a_user_can_set_whether_gradients_are_averaged_and_by_which_number() -> None:
    model = model_of()
    groups = torch_private.fsdp_groups(model)

    def values() -> list[tuple[bool, float | None, bool]]:
        return [
            (
                torch_private.is_fsdp_group_averaged(each),
                torch_private.fsdp_divisor(each),
                torch_private.fsdp_divides_late(each),
            )
            for each in groups
        ]

    assert values() == [(True, None, False)] * 3
    model.set_requires_all_reduce(False)
    model.blocks[0].set_gradient_divide_factor(3.0)
    model.blocks[1].set_force_sum_reduction_for_comms(True)
    assert values() == [(False, None, False), (False, 3.0, False), (False, None, True)]
    model.set_requires_all_reduce(True)
    assert all(is_averaged for is_averaged, _, _ in values())


@ONE_RANK
def test_on_a_mesh_of_one_dimension_the_hook_is_called_without_averaging() -> None:
    """FSDP2 itself looks at ``set_requires_all_reduce`` only in two dimensions."""
    model = model_of()
    calls: list[int] = []
    hooked(model, lambda number, _: calls.append(number))
    model.set_requires_all_reduce(False)
    model(inputs()).square().sum().backward()
    assert sorted(calls) == [0, 1, 2]
    calls.clear()
    model.set_requires_gradient_sync(False)
    model(inputs()).square().sum().backward()
    assert calls == []


DIVISIONS = {
    # A divisor of the hook's tensor, relative to the gradient, for each way to reduce on two ranks.
    "average": (1, {}, None),
    "sum": (2, {}, None),
    "half": (1, {"reduce_dtype": torch.float16}, None),
    "half, four": (2, {"reduce_dtype": torch.float16}, 4.0),
}


@pytest.mark.parametrize("case", DIVISIONS)
@in_ranks(2)
def test_after_the_hook_fsdp_divides_sums_and_half_precision_only(rank: int, case: str) -> None:
    factor, dtypes, divisor = DIVISIONS[case]
    model = model_of(mp_policy=MixedPrecisionPolicy(**dtypes))
    for module in (model, *model.blocks):  # neither method sets it for submodules
        module.set_force_sum_reduction_for_comms(case == "sum")
        if divisor is not None:
            module.set_gradient_divide_factor(divisor)
    seen: dict[int, Tensor] = {}
    groups = hooked(model, lambda number, flat: seen.update({number: flat.clone()}))
    model(inputs()).square().sum().backward()
    for number, group in enumerate(groups):
        assert torch_private.fsdp_divides_late(group) == (case == "sum")
        for (values, _), gradient in zip(
            pieces(seen[number], group), gradients_of(group), strict=True
        ):
            assert values.dtype == dtypes.get("reduce_dtype", torch.float32)
            assert torch.equal((values / factor).float(), gradient)


@ONE_RANK
def test_a_group_that_is_kept_on_the_cpu_is_known() -> None:
    policy = CPUOffloadPolicy(pin_memory=False)
    for model, expected in ((model_of(), False), (model_of(offload_policy=policy), True)):
        groups = torch_private.fsdp_groups(model)
        assert [torch_private.is_fsdp_group_offloaded(each) for each in groups] == [expected] * 3


@ONE_RANK
def test_hooks_after_a_gradient_run_with_the_one_that_our_hook_has_left() -> None:
    model = model_of()
    weight = model.head.weight
    assert not getattr(weight, torch_private.AFTER_GRADIENT, None)
    gradients: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(
        lambda parameter: gradients.append(parameter.grad.to_local().clone())
    )
    (whole, _), _ = torch_private.fsdp_shards(torch_private.fsdp_groups(model)[0])
    assert whole is weight
    assert getattr(whole, torch_private.AFTER_GRADIENT)
    hooked(model, lambda _, flat: flat.fill_(7))
    model(inputs()).square().sum().backward()
    (gradient,) = gradients
    assert torch.equal(gradient, torch.full((3, 5), 7.0))


@pytest.mark.parametrize("case", ["plain", "cast", "checkpointed"])
@ONE_RANK
def test_the_callback_runs_once_after_fsdp_has_ended_backward(case: str) -> None:
    policy = MixedPrecisionPolicy(output_dtype=torch.bfloat16 if case == "cast" else None)
    model = fully_shard(model_of(is_whole=False), mp_policy=policy, mesh=mesh_of_all())
    model.is_checkpointed = case == "checkpointed"
    order: list[object] = []

    def ends() -> None:
        assert all(parameter.grad is not None for parameter in model.parameters())
        order.append(("end", torch_private.is_in_fsdp_backward(model)))

    hooked(model, lambda number, _: order.append(torch_private.is_in_fsdp_backward(model)))
    torch_private.at_end_of_fsdp_backward(model, ends)
    for _ in range(2):
        assert not torch_private.is_in_fsdp_backward(model)
        output = model(inputs())
        assert not torch_private.is_in_fsdp_backward(model)
        output.square().sum().backward()
        assert order == [True, True, True, ("end", False)]
        order.clear()
        model.zero_grad()


@ONE_RANK
def test_the_callback_runs_after_the_root_module_is_resharded_and_its_hook_was_called() -> None:
    """The root's gradients are reduced within FSDP2's own callback if its inputs have none."""
    model = model_of()
    order: list[str] = []
    hooked(model, lambda number, _: order.append(f"group {number}"))
    torch_private.at_end_of_fsdp_backward(model, lambda: order.append("end"))
    model(inputs().detach()).square().sum().backward()
    assert len(order) == 4
    assert order[-1] == "end"


@ONE_RANK
def test_the_callback_does_not_run_after_a_backward_that_has_raised() -> None:
    model = model_of()
    ended: list[bool] = []
    torch_private.at_end_of_fsdp_backward(model, lambda: ended.append(True))
    handle = model.blocks[0].register_forward_pre_hook(lambda _, given: blow(*given))
    with pytest.raises(ArithmeticError, match="blown"):
        model(inputs()).sum().backward()
    assert torch_private.is_in_fsdp_backward(model)
    assert ended == []
    handle.remove()
    if not hasattr(model, "reset_iter_state"):
        return  # torch 2.11 and 2.12
    model.reset_iter_state()
    assert not torch_private.is_in_fsdp_backward(model)
    model(inputs()).sum().backward()
    assert ended == [True]


@ONE_RANK
def test_the_root_is_known_from_the_first_forward() -> None:
    model = model_of()
    modules = [model, *model.blocks]
    assert [torch_private.is_fsdp_root(each) for each in modules] == [None, None, None]
    model(inputs())
    assert [torch_private.is_fsdp_root(each) for each in modules] == [True, False, False]
