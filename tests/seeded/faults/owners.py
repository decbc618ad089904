"""Faults of owners, also those of Muon."""

from typing import Final

from tests.seeded.fault import Fault

_OWNERS = "tests/multiprocess/test_owners.py"
_OWNED_MUON = "tests/multiprocess/test_owners_muon.py"
_MUON = "tests/multiprocess/test_muon.py"

OWNERS: Final[tuple[Fault, ...]] = (
    Fault(
        "a direction is applied with the learning rate of the moment at which it arrives",
        "crossover_ddp/_decoupled/owned_muon.py",
        "take_step(update.parameter, direction, _group(plan, update.parameter))",
        "number = plan.group_of[id(update.parameter)]\n"
        "            take_step(update.parameter, direction, self.optimizer.param_groups[number])",
        (
            _OWNED_MUON,
            "-k",
            "bits_of_ddp and as",
        ),
    ),
    Fault(
        "an owner does not apply the directions that it has computed",
        "crossover_ddp/_decoupled/owned_muon.py",
        "for update, direction, _ in arrived:",
        "for update, direction, _ in [each for each in arrived if not each.is_own]:",
        (
            _OWNED_MUON,
            "-k",
            "fed_the_owners_sums and 3",
        ),
    ),
    Fault(
        "a direction takes the place of a matrix in float32",
        "crossover_ddp/_decoupled/owned_muon.py",
        "return -(-numel * torch.bfloat16.itemsize // itemsize)",
        "return numel",
        (
            _OWNED_MUON,
            "-k",
            "three_quarters and 2",
        ),
    ),
    Fault(
        "a rank that owns nothing of a group does not count its steps",
        "crossover_ddp/_decoupled/owned_optimizers.py",
        "                self._count_alone(plan, number)\n",
        "                pass\n",
        (
            _OWNERS,
            "-k",
            "parameters_without_gradients",
        ),
    ),
    Fault(
        "rank 0 sends what it has as the state of all owners",
        "crossover_ddp/_decoupled/owned_optimizers.py",
        "group=group, group_src=owner)",
        "group=group, group_src=0)",
        (
            _OWNERS,
            "-k",
            "checkpoints and soap",
        ),
    ),
    Fault(
        "owners send what their parameters were before the step",
        "crossover_ddp/_decoupled/owned_optimizers.py",
        "        self.partial.apply(plan, [each.update for each in own])\n"
        "        for update, piece, _ in own:\n"
        "            piece.copy_(update.parameter)\n",
        "        for update, piece, _ in own:\n"
        "            piece.copy_(update.parameter)\n"
        "        self.partial.apply(plan, [each.update for each in own])\n",
        (
            _OWNERS,
            "-k",
            "fed_the_owners_sums and adamw",
        ),
    ),
    Fault(
        "Muon's momentum is that of gradients as large as the loss's scale",
        "crossover_ddp/_muon/payload.py",
        "gradient.mul_(1.0 / plan.scale)",
        "pass",
        (
            _MUON,
            "-k",
            "overflow",
        ),
    ),
    Fault(
        "all matrices have the first group's momentum",
        "crossover_ddp/_muon/stepping.py",
        '(DirectionSettings.of(group), group["params"])',
        '(DirectionSettings.of(self._muon.param_groups[0]), group["params"])',
        (
            _MUON,
            "-k",
            "last_bit and 2",
        ),
    ),
    Fault(
        "a step that is skipped has changed the momentum",
        "crossover_ddp/_muon/momentum.py",
        "            put_momentum(state, self._next.pop(index))\n"
        "            if old is not None:\n"
        "                self._next[index] = old\n",
        "            put_momentum(state, self._next[index])\n",
        (
            _MUON,
            "-k",
            "skipped_step",
        ),
    ),
)
